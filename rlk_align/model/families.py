"""Model families as tables: which operators a layer has, and what a checkpoint's config says of
them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config, stored_dtype, stored_layers
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.operators import OPERATORS, Operator, Size

LayerOperators = Callable[["ModelShape", int], tuple[str, ...]]
"""(shape, index of a layer) -> that layer's operators, in execution order."""


def dense(qk_norm: bool = False) -> LayerOperators:
    """Every layer alike; `qk_norm`: an RMSNorm on each head of q and k before they are rotated."""
    operators = (
        *("attn_norm", "q_proj", "k_proj", "v_proj", *(("q_norm", "k_norm") if qk_norm else ())),
        *("q_rope", "k_rope", "attn", "o_proj", "attn_residual"),
        *("mlp_norm", "gate_proj", "up_proj", "act", "down_proj", "mlp_residual"),
    )
    return lambda _shape, _layer: operators


DENSE = dense()


def mixture(qk_norm: bool = False) -> LayerOperators:
    """Dense layers, and sparse ones in which a router sends each token to a few experts."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What sets one decoder family apart from the others."""

    layer: LayerOperators = DENSE
    before: tuple[str, ...] = ("embed",)
    after: tuple[str, ...] = ("final_norm", "logits", "logprob")
    """The operators around the layers."""
    biases: Mapping[str, bool] = field(default_factory=dict)
    """Operator -> whether it has a bias, whatever the config says of it."""
    window: Mapping[str, int | bool] = field(default_factory=dict)
    """What it takes for keys of a sliding window that the config leaves out; none has no window."""
    expert_intermediate: str = ""
    """The config's key for the inner size of an expert; empty for a family without experts."""
    norm_topk: bool | None = None
    """Whether the chosen experts' weights are divided by their sum; None asks the config."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Operator -> the module that holds its parameters in a checkpoint, where that is not the
    catalogue's."""


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
        expert_intermediate="moe_intermediate_size",
    ),
    "mixtral": Family(
        layer=mixture(),
        expert_intermediate="intermediate_size",
        norm_topk=True,
        modules={
            "router": "block_sparse_moe.gate",
            "expert_gate_proj": "block_sparse_moe.experts.{}.w1",
            "expert_up_proj": "block_sparse_moe.experts.{}.w3",
            "expert_down_proj": "block_sparse_moe.experts.{}.w2",
        },
    ),
}
"""By the config's `model_type`. A new family is an entry here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that fix a model's sites."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    """Longest sequence, in tokens, that the positions allow."""
    dtype: str
    """The checkpoint's own dtype, e.g. `bfloat16`."""
    sparse_layers: tuple[int, ...] = ()
    """The layers that send each token to a few experts."""
    experts: int = 0
    """How many experts each of them has."""
    top_k: int = 0
    """To how many of them a token is sent."""
    expert_intermediate: int = 0
    norm_topk: bool = False
    """Whether the weights of a token's experts are divided by their sum."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def operators(self) -> Iterator[tuple[int | None, Operator]]:
        """(layer, operator) in execution order; the layer is None outside of the layers."""
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
        """In how many heads that many features lie; 1 where they are no heads'."""
        return {"query_heads": self.heads, "kv_heads": self.kv_heads}.get(size, 1)

    def size(self, size: Size) -> int:
        """What a dimension measures in this model."""
        if size == "one":
            return 1
        if size in ("query_heads", "kv_heads"):
            return self.heads_of(size) * self.head_dim
        if size in ("expert_slots", "hidden_slots"):
            return self.top_k * (
                self.hidden if size == "hidden_slots" else self.expert_intermediate
            )
        return getattr(self, size)


_LARGEST = 1 << 28
"""What a size of a model can be at most."""


def _check_layers(model: Path, wanted: object) -> None:
    """Raises ModelError where the checkpoint has the tensors of more or fewer layers."""
    stored = stored_layers(model)
    if type(wanted) is int and wanted > 0 and stored not in (0, wanted):
        raise ModelError(
            f"{model}/config.json states num_hidden_layers={wanted}, and the checkpoint has "
            f"tensors of {stored} layers",
            "it is incomplete, or its config.json belongs to another model",
        )


def read_shape(model: Path) -> ModelShape:
    """The shape of the checkpoint in folder `model`, from its config.json; a dtype that this leaves
    out is that of the stored weights.

    Raises ModelError where the folder or its config is missing or unreadable, or where the
    family is unknown.
    """
    config = read_config(model)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _UNKNOWN_ROUTING:
        raise ModelError(
            f"{model}: model_type {kind!r} is not supported: {_UNKNOWN_ROUTING[kind]}",
            f"known: {', '.join(sorted(FAMILIES))}",
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"{model}: model_type {kind!r} is not a known family",
            f"known: {', '.join(sorted(FAMILIES))}; a decoder like them is an entry in families.py",
        )

    def size(name: str, default: int | None = None, largest: int = _LARGEST) -> int:
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

    _check_layers(model, config.get("num_hidden_layers"))
    dtype = config.get("dtype") or config.get("torch_dtype") or stored_dtype(model) or "float32"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ModelError(f"{model}/config.json: dtype {dtype!r} is unknown", f"known: {known}")
    family = FAMILIES[kind]
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
        **(_experts(model, config, family, size) if family.expert_intermediate else {}),
    )


_SHARED = "experts that every token is sent to"
_GROUPED = "experts chosen from the best groups of experts"
_SIGMOID = "routers that score by a sigmoid, with a bias for the choice alone"
_UNKNOWN_ROUTING = {
    "deepseek_v2": f"it has {_SHARED}, {_GROUPED}, and latent attention",
    "deepseek_v3": f"it has {_SIGMOID}, {_GROUPED}, {_SHARED}, and latent attention",
    "glm4_moe": f"it has {_SIGMOID}, {_GROUPED}, and {_SHARED}",
    "qwen2_moe": f"it has {_SHARED}",
    "gpt_oss": "its routers and its experts have biases, and its attention has sinks",
}
"""Sparse families by what of them is not known here."""
_UNKNOWN_SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "n_shared_experts": (_SHARED, bool),
    "num_shared_experts": (_SHARED, bool),
    "shared_expert_intermediate_size": (_SHARED, bool),
    "n_group": (_GROUPED, lambda value: value not in (None, 1)),
    "topk_group": (_GROUPED, lambda value: value not in (None, 1)),
    "scoring_func": (
        "routers that score by anything other than a softmax",
        lambda value: value not in (None, "softmax"),
    ),
    "topk_method": (
        "experts chosen by anything other than their scores",
        lambda value: value not in (None, "greedy"),
    ),
    "routed_scaling_factor": (
        "experts' weights that are scaled",
        lambda value: value not in (None, 1, 1.0),
    ),
}
"""Settings of a sparse family -> what they ask for, and whether a value asks for it."""


def _experts(
    model: Path, config: dict[str, Any], family: Family, size: Callable[..., int]
) -> dict[str, Any]:
    """What a config says of the experts; transformers writes their number by two names. Raises
    ModelError for what is wrong, or not known here."""
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts, top_k = size(name), size("num_experts_per_tok", 2 if family.norm_topk else None)
    if top_k > experts:
        raise ModelError(
            f"{model}/config.json: num_experts_per_tok is {top_k}, and {name} is {experts}"
        )
    for name, (what, asks) in _UNKNOWN_SETTINGS.items():
        if asks(config.get(name)):
            raise ModelError(
                f"{model}/config.json: {name} is {config[name]!r}: {what} are not supported"
            )
    layers, step = size("num_hidden_layers"), size("decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(i) is not int for i in dense_layers):
        raise ModelError(f"{model}/config.json: mlp_only_layers is not a list of layers")
    norm = family.norm_topk
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_intermediate": size(family.expert_intermediate),
        "norm_topk": bool(config.get("norm_topk_prob")) if norm is None else norm,
        "sparse_layers": tuple(
            i for i in range(layers) if i not in dense_layers and (i + 1) % step == 0
        ),
    }
