"""Model families as tables: each layer's operators, and the config's settings for them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.config_keys import PAGE, unknown_settings
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.operators import OPERATORS, Operator, Size
from rlk_align.model.sparse_config import (
    EXPERT_KEYS,
    UNKNOWN_ROUTING,
    ExpertSettings,
    read_experts,
)
from rlk_align.model.stored import stored_dtype, stored_layers

LayerOperators = Callable[["ModelShape", int], tuple[str, ...]]
"""(shape, index of a layer) -> that layer's operators, in execution order."""


def dense(qk_norm: bool = False) -> LayerOperators:
    """Equal layers; `qk_norm`: with an RMSNorm on each head of q and k before they are rotated."""
    operators = (
        *("attn_norm", "q_proj", "k_proj", "v_proj", *(("q_norm", "k_norm") if qk_norm else ())),
        *("q_rope", "k_rope", "attn", "o_proj", "attn_residual"),
        *("mlp_norm", "gate_proj", "up_proj", "act", "down_proj", "mlp_residual"),
    )
    return lambda _shape, _layer: operators


DENSE = dense()


def mixture(qk_norm: bool = False) -> LayerOperators:
    """Dense layers, and sparse layers in which a router sends each token to a few experts."""
    dense_layer = dense(qk_norm)

    def operators(shape: "ModelShape", layer: int) -> tuple[str, ...]:
        every = dense_layer(shape, layer)
        if layer not in shape.sparse_layers:
            return every
        return (
            *every[: every.index("gate_proj")],
            *("router", "experts", "routing_weights", "expert_gate_proj", "expert_up_proj"),
            *("expert_act", "expert_down_proj", "moe_out", "mlp_residual"),
        )

    return operators


def corrected_mixture(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Dense layers, and sparse layers with shared experts, whose router computes in float32 and
    corrects its scores for the choice of experts only."""
    every = dense(shape.qk_norm)(shape, layer)
    if layer not in shape.sparse_layers:
        return every
    return (
        *every[: every.index("gate_proj")],
        *("fp32_router", "corrected_experts", "fp32_routing_weights"),
        *("expert_gate_proj", "expert_up_proj", "expert_act", "expert_down_proj"),
        *("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj"),
        *("moe_out_with_shared", "mlp_residual"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The properties of one decoder family."""

    layer: LayerOperators = DENSE
    before: tuple[str, ...] = ("embed",)
    after: tuple[str, ...] = ("final_norm", "logits", "logprob")
    """The operators before and after the layers."""
    biases: Mapping[str, bool] = field(default_factory=dict)
    """Operator -> whether it has a bias, regardless of the config."""
    window: Mapping[str, int | bool] = field(default_factory=dict)
    """Defaults of the config's keys for a sliding window; empty for a family without windows."""
    experts: ExpertSettings | None = None
    """How its config describes experts; None for a family without experts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other settings that the config may leave out."""
    qk_norm: str = ""
    """The config's key for norms of q and k; empty if the family decides this itself."""
    predictors: str = ""
    """The config's key for the number of layers after the decoder's, which predict further tokens;
    empty if the family has none."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Operator -> the module of its parameters, where it is not the catalogue's."""

    @property
    def sigmoid(self) -> bool:
        """Whether its routers score experts by a sigmoid."""
        return self.experts is not None and self.experts.sigmoid

    @property
    def keys(self) -> frozenset[str]:
        """The keys of config.json that this description covers, beside those of every family."""
        windows = {*self.window, "layer_types"} if self.window else set()
        experts = {*EXPERT_KEYS, self.experts.intermediate} if self.experts else set()
        return frozenset({*windows, *experts, *self.defaults, self.qk_norm, self.predictors} - {""})


_QWEN_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window={"sliding_window": 4096, "use_sliding_window": True}),
    "qwen2": Family(
        biases={"q_proj": True, "k_proj": True, "v_proj": True, "o_proj": False},
        window=_QWEN_WINDOW,
    ),
    "qwen3": Family(layer=dense(qk_norm=True), window=_QWEN_WINDOW),
    "qwen3_moe": Family(
        layer=mixture(qk_norm=True),
        window={"sliding_window": 4096, "use_sliding_window": False},
        experts=ExpertSettings("moe_intermediate_size"),
    ),
    "mixtral": Family(
        layer=mixture(),
        experts=ExpertSettings("intermediate_size", norm_topk=True),
        modules={
            "router": "block_sparse_moe.gate",
            "expert_gate_proj": "block_sparse_moe.experts.{}.w1",
            "expert_up_proj": "block_sparse_moe.experts.{}.w3",
            "expert_down_proj": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "glm4_moe": Family(
        layer=corrected_mixture,
        biases={"o_proj": False},
        experts=ExpertSettings(
            "moe_intermediate_size",
            sigmoid=True,
            known={
                **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), None),
                **{"routed_scaling_factor": None, "scoring_func": ("sigmoid",)},
                "topk_method": ("noaux_tc",),
            },
        ),
        defaults={
            **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
            "routed_scaling_factor": 1.0,
        },
        qk_norm="use_qk_norm",
        predictors="num_nextn_predict_layers",
    ),
}
"""The config's `model_type` -> the family. A new family is an entry here."""
WITHOUT_FAMILY = (
    f"known: {', '.join(sorted(FAMILIES))}; the log-probs of any model can be judged: `import` and "
    "`explain` a dump of the run, or `monitor` it; `weights` compares any two checkpoints; "
    f"{PAGE} shows how to describe a family"
)
"""The remedy for a model of another family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that determine a model's sites."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    """The length of the longest sequence, in tokens."""
    dtype: str
    """The checkpoint's own dtype, e.g. `bfloat16`."""
    sparse_layers: tuple[int, ...] = ()
    """The layers that send each token to a few experts."""
    experts: int = 0
    """The number of experts of each sparse layer."""
    top_k: int = 0
    """The number of experts to which a token is sent."""
    expert_intermediate: int = 0
    norm_topk: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    groups: int = 1
    """The number of equal groups of experts."""
    top_groups: int = 1
    """The number of groups to choose experts from: those whose two best scores add up highest."""
    weight_scale: float = 1.0
    """The factor by which the weights of a token's experts are multiplied in the end."""
    shared_intermediate: int = 0
    """The inner size of the shared experts, which are computed as one."""
    qk_norm: bool = False
    """Whether the config enables norms of q and k, in a family that leaves them to the config."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def operators(self) -> Iterator[tuple[int | None, Operator]]:
        """(layer, operator) in execution order; layer is None for operators outside the layers."""
        for name in self.family.before:
            yield None, OPERATORS[name]
        for layer in range(self.layers):
            for name in self.family.layer(self, layer):
                yield layer, OPERATORS[name]
        for name in self.family.after:
            yield None, OPERATORS[name]

    def has(self, op: str) -> bool:
        """Whether any layer has that operator."""
        return any(op in self.family.layer(self, layer) for layer in range(self.layers))

    def heads_of(self, size: Size) -> int:
        """The number of heads that a dimension consists of; 1 if it does not count heads."""
        return {"query_heads": self.heads, "kv_heads": self.kv_heads}.get(size, 1)

    def size(self, size: Size) -> int:
        """The number of features of a dimension in this model."""
        if size == "one":
            return 1
        if size in ("query_heads", "kv_heads"):
            return self.heads_of(size) * self.head_dim
        if size in ("expert_slots", "hidden_slots"):
            return self.top_k * (
                self.hidden if size == "hidden_slots" else self.expert_intermediate
            )
        return getattr(self, size)


_MAX_SIZE = 1 << 28
"""The largest supported size of a model's dimension."""


def predictor_layers(config: Mapping[str, Any]) -> int:
    """The number of layers after the decoder's, which predict further tokens."""
    family = FAMILIES.get(str(config.get("model_type")))
    count = config.get(family.predictors) if family else None
    return count if type(count) is int and count > 0 else 0


def _check_layers(model: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if the checkpoint has tensors of more or fewer layers than its config."""
    stored, wanted = stored_layers(model), config.get("num_hidden_layers")
    if type(wanted) is not int or wanted <= 0:
        return
    if stored not in (0, wanted, wanted + predictor_layers(config)):
        raise ModelError(
            f"{model}/config.json states num_hidden_layers={wanted}, and the checkpoint has "
            f"tensors of {stored} layers",
            "it is incomplete, or its config.json belongs to another model",
        )


_MAX_NAMED = 6
"""The largest number of settings that an error lists."""


def _of_no_family(config: Mapping[str, Any]) -> str:
    """The settings of a config.json that no known family has, for an error; empty if none."""
    every = frozenset().union(*(family.keys for family in FAMILIES.values()))
    names = sorted(unknown_settings(config, every))
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"; no known family has its {', '.join(names[:_MAX_NAMED])}{more}"


def read_shape(model: Path) -> ModelShape:
    """The shape of the checkpoint in folder `model`, from its config.json. If that has no dtype, it
    is the dtype of the stored weights.

    Raises ModelError if the folder or its config is missing or unreadable, or if the family is
    unknown.
    """
    config = read_config(model)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in UNKNOWN_ROUTING:
        raise ModelError(
            f"{model}: model_type {kind!r} is not supported: {UNKNOWN_ROUTING[kind]}",
            WITHOUT_FAMILY,
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"{model}: model_type {kind!r} in config.json is not a known decoder family, so the "
            f"operators of its layers are unknown{_of_no_family(config)}",
            WITHOUT_FAMILY,
        )

    def size(name: str, default: int | None = None, largest: int = _MAX_SIZE) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise ModelError(
                f"{model}/config.json: {name} is {value!r}; it must be a positive whole number"
            )
        if value > largest:
            raise ModelError(
                f"{model}/config.json: {name} is {value}; at most {largest} is supported"
            )
        return value

    _check_layers(model, config)
    dtype = config.get("dtype") or config.get("torch_dtype") or stored_dtype(model) or "float32"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ModelError(f"{model}/config.json: dtype {dtype!r} is unknown", f"known: {known}")
    family = FAMILIES[kind]
    config = {**family.defaults, **config}
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    return ModelShape(
        model_type=kind,
        layers=size("num_hidden_layers", largest=10_000),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, hidden // heads)),
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        context=size("max_position_embeddings"),
        dtype=dtype,
        qk_norm=bool(family.qk_norm and config.get(family.qk_norm)),
        **(read_experts(model, config, family.experts, size) if family.experts else {}),
    )
