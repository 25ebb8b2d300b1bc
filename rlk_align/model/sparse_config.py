"""The settings of config.json that describe sparse layers, and those that are not supported."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError

_SHARED = "experts that every token is sent to"
_GROUPED = "experts chosen from the best groups of experts"
_LATENT = (
    "it has latent attention (MLA) over keys that an indexer chooses, which no description covers"
)
UNKNOWN_ROUTING = {
    "deepseek_v32": _LATENT,
    "kimi_linear": "it has Kimi delta attention (KDA), a delta rule with a decay for each feature "
    "of a head, which no description covers",
    "kimi_k2": "its operators are those of deepseek_v3, and transformers has no class of this "
    "name: state model_type deepseek_v3 in config.json, as its publisher advises",
}
"""Families that are not supported, and are refused before their settings are read -> the reason."""
_UNKNOWN_SETTINGS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "n_shared_experts": (_SHARED, (None, 0)),
    "num_shared_experts": (_SHARED, (None, 0)),
    "shared_expert_intermediate_size": (_SHARED, (None, 0)),
    "n_group": (_GROUPED, (None, 1)),
    "topk_group": (_GROUPED, (None, 1)),
    "scoring_func": ("routers that score by anything other than a softmax", (None, "softmax")),
    "topk_method": ("experts chosen by anything other than their scores", (None, "greedy")),
    "routed_scaling_factor": ("experts' weights that are scaled", (None, 1)),
}
"""Settings of a sparse family -> their feature, and the values that do not enable it."""
EXPERT_KEYS = frozenset(
    {
        *("num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok"),
        *("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", *_UNKNOWN_SETTINGS),
    }
)
"""The keys that `read_experts` reads in any family."""
CLAMP_KEYS = ("swiglu_alpha", "swiglu_limit")
"""The keys of a family whose experts clamp what they activate."""
_MAX_SELECTIONS = 10_000
"""The largest number of selections of groups, with each of which a choice is compared."""


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """How the configs of one family describe its experts."""

    intermediate: str
    """The config's key for the inner size of an expert."""
    norm_topk: bool | None = None
    """Whether the chosen experts' weights are divided by their sum; None asks the config."""
    sigmoid: bool = False
    """Whether a router scores experts by a sigmoid and corrects the scores for the choice; if not,
    it scores by a softmax."""
    corrected: bool = False
    """Whether a router that scores by a softmax corrects the scores for the choice."""
    grouped: bool = False
    """Whether experts are chosen from the best groups, their weights are scaled, and shared experts
    are added, by the keys of GLM-4.5."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Usual key of a config -> this family's key."""
    layer_kinds: str = ""
    """The config's key for `dense` or `sparse` of each layer, which counts more than the number of
    dense layers at first; empty for none."""
    shared: str = ""
    """The config's key for the inner size of a shared expert; empty for none."""
    optional: bool = False
    """Whether a config may state 0 experts, and then has dense layers alone."""
    clamped: bool = False
    """Whether an expert activates (up + 1) gate σ(α gate), of values clamped to a limit: the
    config's `swiglu_alpha` and `swiglu_limit`."""
    known: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    """Settings of sparse layers -> further values that the family supports; None for all."""


def read_experts(
    model: Path, config: dict[str, Any], settings: ExpertSettings, size: Callable[..., int]
) -> dict[str, Any]:
    """The fields of `ModelShape` that describe experts; `size` reads a positive whole number from
    the config. Raises ModelError for settings that are wrong or not supported."""
    # transformers has several names for the number of experts.
    named = settings.names
    names = (named.get("num_experts", "num_experts"), "n_routed_experts", "num_local_experts")
    name = next((n for n in names if config.get(n) is not None), names[-1])
    if settings.optional and config.get(name) == 0:
        return {}
    of_token = named.get("num_experts_per_tok", "num_experts_per_tok")
    experts, top_k = size(name), size(of_token, 2 if settings.norm_topk else None)
    if top_k > experts:
        raise ModelError(f"{model}/config.json: {of_token} is {top_k}, and {name} is {experts}")
    for name, (what, usual) in _UNKNOWN_SETTINGS.items():
        known = settings.known.get(name, ())
        if known is not None and config.get(name) not in (*usual, *known):
            raise ModelError(
                f"{model}/config.json: {name} is {config[name]!r}: {what} are not supported"
            )
    layers = size("num_hidden_layers")
    step = size(named.get("decoder_sparse_step", "decoder_sparse_step"), 1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(i) is not int for i in dense_layers):
        raise ModelError(f"{model}/config.json: mlp_only_layers is not a list of layers")
    norm = settings.norm_topk
    key = named.get("first_k_dense_replace", "first_k_dense_replace" if settings.grouped else "")
    first, last = config.get(key) if key else 0, config.get(named.get("last_sparse_layer", ""))
    if type(first) is not int or first < 0:
        raise ModelError(f"{model}/config.json: {key} is {first!r}")
    if last in (None, -1):
        last = layers - 1
    if type(last) is not int or not 0 <= last < layers:
        raise ModelError(f"{model}/config.json: {named['last_sparse_layer']} is {last!r}")
    sparse = tuple(
        i for i in range(first, last + 1) if i not in dense_layers and (i + 1) % step == 0
    )
    kinds = config.get(settings.layer_kinds) if settings.layer_kinds else None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {"dense", "sparse"}:
            raise ModelError(
                f"{model}/config.json: {settings.layer_kinds} is not dense or sparse for each layer"
            )
        sparse = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_intermediate": size(settings.intermediate),
        "norm_topk": bool(config.get("norm_topk_prob")) if norm is None else norm,
        "sparse_layers": sparse,
        **_shared(settings, size),
        **{key: _positive(model, config, key) for key in CLAMP_KEYS if settings.clamped},
        **(_corrected(model, config, experts, top_k, size) if settings.grouped else {}),
    }


def _shared(settings: ExpertSettings, size: Callable[..., int]) -> dict[str, Any]:
    """The inner size of shared experts, by keys of the family's own."""
    if settings.shared:
        return {"shared_intermediate": size(settings.shared)}
    if count := settings.names.get("n_shared_experts"):
        return {"shared_intermediate": size(count) * size(settings.intermediate)}
    return {}


def _corrected(
    model: Path, config: dict[str, Any], experts: int, top_k: int, size: Callable[..., int]
) -> dict[str, Any]:
    """The fields of `ModelShape` that describe corrected routers and shared experts. Raises
    ModelError if the groups are too few or too small to choose from."""
    groups, top_groups = size("n_group"), size("topk_group")
    scale, shared = _positive(model, config, "routed_scaling_factor"), size("n_shared_experts")
    of_group, rest = divmod(experts, groups)
    if rest or of_group < 2 or top_groups > groups or top_groups * of_group < top_k:
        raise ModelError(
            f"{model}/config.json: num_experts_per_tok={top_k} cannot be chosen from "
            f"topk_group={top_groups} of n_group={groups} groups of {experts} experts"
        )
    if (selections := math.comb(groups, top_groups)) > _MAX_SELECTIONS:
        raise ModelError(
            f"{model}/config.json: n_group={groups} and topk_group={top_groups} allow "
            f"{selections:,} selections of groups; at most {_MAX_SELECTIONS:,} are supported"
        )
    return {
        "groups": groups,
        "top_groups": top_groups,
        "weight_scale": scale,
        "shared_intermediate": shared * size("moe_intermediate_size"),
    }


def _positive(model: Path, config: dict[str, Any], key: str) -> float:
    """A positive number of the config. Raises ModelError."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{model}/config.json: {key} is {value!r}")
    return float(value)
