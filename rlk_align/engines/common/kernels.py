"""`kernels=rlk`: an engine's interface to the kernels, which only `engines.patch` imports."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rlk_align.errors import BadOption, ModelError
from rlk_align.model.families import FAMILIES
from rlk_align.model.operators import OPERATORS, Formula, Operator
from rlk_align.model.rotary import (
    FIXED,
    has_alpha,
    lacks_factor,
    partial_rotary_factor,
    rope_parameters,
    rotates_a_part,
)

if TYPE_CHECKING:
    import torch

    from rlk_align.model.prompts import TokenBatch

KERNELS: dict[Formula, tuple[str, ...]] = {
    "embedding": ("embedding",),
    "rms_norm": ("rms_norm", "norm_add_norm", "norm_rope"),
    "layer_norm": ("layer_norm",),
    "linear": ("linear",),
    "rotary": ("rope", "norm_rope"),
    "attention": ("attention", "paged_attention"),
    "latent_attention": ("latent_attention", "paged_latent_attention"),
    "output_gate": ("swiglu",),
    "short_conv": ("causal_conv1d", "cached_causal_conv1d"),
    "decay": ("delta_gates",),
    "sigmoid": ("delta_gates",),
    "delta_rule": ("gated_delta_rule", "cached_gated_delta_rule"),
    "gated_norm": ("gated_rms_norm",),
    "activation": ("swiglu", "activation"),
    "log_softmax": ("logp",),
    "router": ("linear",),
    "top_k": ("route", "route_corrected"),
    "routing_weights": ("route", "route_corrected"),
    "expert_linear": ("grouped_linear", "grouped_swiglu"),
    "expert_activation": ("swiglu", "grouped_swiglu", "clamped_swiglu"),
    "combine": ("combine_experts",),
}
"""Formula -> the kernels that may compute it. Residual additions are left out, because every engine
computes them equally: in fp32, rounded once."""
REPLACEABLE = tuple(
    dict.fromkeys(
        o.site
        for o in OPERATORS.values()
        # The kernels do not compute state-space models.
        if o.formula in KERNELS and not o.module.startswith("mamba.")
    )
)
"""The operators that the kernels compute and that `except` may name, by their sites."""


def parse_excluded(text: str) -> frozenset[str]:
    """The operators that `except=attn+act` excludes. Raises ValueError with unknown names."""
    names = text.split("+")
    if unknown := [n for n in names if n not in REPLACEABLE]:
        raise ValueError(", ".join(unknown))
    return frozenset(names)


NOT_FIXED = {
    "dynamic": "its frequencies follow the longest sequence of a batch",
    "longrope": "its frequencies and its scale follow the longest sequence of a batch",
}
"""Kinds of rope that no kernel can make batch-invariant -> the reason. The kernels have a copy,
because they are not imported here; a test compares the two."""


def check_kernels(engine: str, config: dict[str, Any]) -> None:
    """Raises ModelError if config.json asks for something that no kernel computes."""
    kind = str(config.get("model_type"))
    FAMILIES[kind].check("kernels", kind)
    rope, (key, usual) = rope_parameters(config), FAMILIES[kind].activation
    activation = config.get(key) or usual
    kind = rope["rope_type"]
    partial = partial_rotary_factor(config)
    refused = {
        f"rope_type={kind}": (
            (kind not in FIXED or kind in NOT_FIXED) and not has_alpha(rope),
            NOT_FIXED.get(kind, ""),
        ),
        f"rope_type={kind} without a factor": (lacks_factor(rope), ""),
        f"partial_rotary_factor={partial}": (
            partial != 1.0 and not rotates_a_part(config),
            "in these families transformers rotates whole heads, and vLLM a part of each",
        ),
        f"rope_type={kind} on a part of each head": (partial != 1.0 and kind != "default", ""),
        f"{key}={activation}": (activation != usual, ""),
    }
    for what, (is_so, why) in refused.items():
        if is_so:
            raise ModelError(
                f"engine {engine!r}: kernels=rlk does not support {what}, which config.json asks "
                "for" + (f": {why}" if why else ""),
                "compare with kernels=off",
            )


_SPARSE: tuple[Formula, ...] = (
    *("router", "top_k", "routing_weights"),
    *("expert_linear", "expert_activation", "combine"),
)


_DELTA_NET: tuple[Formula, ...] = ("short_conv", "decay", "sigmoid", "delta_rule", "gated_norm")


_LATENT = ("latent_q_rope", "latent_k_rope", "latent_attn")


def _computed_together(operator: Operator) -> bool:
    """Whether the operator belongs to a sparse layer, to a gated delta net or to a latent
    attention, each of which the kernels compute as a whole."""
    sparse = operator.formula in _SPARSE or operator.site.startswith("shared_")
    delta = operator.formula in _DELTA_NET or operator.module.startswith("linear_attn.")
    return sparse or delta or operator.name in _LATENT


def check_excluded(engine: str, excluded: str, sites: Mapping[str, str]) -> None:
    """Raises BadOption if `except=` names an operator that the model lacks, which would exclude
    nothing, or an operator of a sparse layer, a gated delta net or a latent attention. `sites`:
    operator -> its site."""
    operators = set(sites.values())
    whole = {site for name, site in sites.items() if _computed_together(OPERATORS[name])}
    if inside := sorted(parse_excluded(excluded) & whole):
        raise BadOption(
            f"engine {engine!r}: except={excluded}: in a model with sparse layers, gated delta "
            f"nets or latent attention, {', '.join(inside)} cannot be excluded",
            f"leave {', '.join(inside)} out of except=",
        )
    if missing := sorted(parse_excluded(excluded) - operators):
        raise BadOption(
            f"engine {engine!r}: except={excluded}: this model has no {', '.join(missing)}",
            f"it has {', '.join(op for op in REPLACEABLE if op in operators)}",
        )


class Kernels(Protocol):
    """The kernels in one engine. BadOption or ModelError is raised for what they do not support."""

    excluded: frozenset[str]
    """The operators that the engine computes itself."""

    def before_loading(self) -> None:
        """Registers the kernels with an engine that creates its model from registries."""

    def in_spec(self, block: Any, windows: tuple[int | None, ...]) -> Any:
        """A layer spec with the kernels; `windows`: the number of keys that each layer sees."""

    def in_model(self, model: Any, rope: Mapping[str, Any]) -> None:
        """Installs the kernels in a live model. `rope`: its checkpoint's `rope_parameters`."""

    def logprobs(
        self, logits: "torch.Tensor", target: "torch.Tensor", temperature: float,
        group: Any = None, limits: Mapping[str, Any] | None = None,
    ) -> "torch.Tensor | None":  # fmt: skip
        """The log-probs of rows `[N, V]` of logits, or of this rank's columns if the ranks of a
        process `group` share the vocabulary, among the tokens that the `limits` (top_k, top_p,
        min_p) keep: float32 `[N]`. None if they are excluded."""

    def kept(
        self, logits: "torch.Tensor", temperature: float, limits: Mapping[str, Any]
    ) -> "torch.Tensor":
        """The tokens that the limits keep: bool `[N, V]`."""

    def called(self, engine: Any, batch: "TokenBatch") -> AbstractContextManager[None]:
        """Raises EngineFailed if a replaced operator is not called while the batch is scored."""
