"""Model families as tables: which operators a layer has, and what a checkpoint's config says of
them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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


_QWEN_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window={"sliding_window": 4096, "use_sliding_window": True}),
    "qwen2": Family(
        biases={"q_proj": True, "k_proj": True, "v_proj": True, "o_proj": False},
        window=_QWEN_WINDOW,
    ),
    "qwen3": Family(layer=dense(qk_norm=True), window=_QWEN_WINDOW),
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
        return getattr(self, size)


_LARGEST = 1 << 28
"""What a size of a model can be at most."""


def _check_layers(model: Path, wanted: object) -> None:
    """Raises ModelError where the checkpoint has the tensors of more or fewer layers."""
    stored = stored_layers(model)
    if type(wanted) is int and wanted > 0 and stored not in (0, wanted):
        raise ModelError(
            f"{model}/config.json says num_hidden_layers={wanted}, and the checkpoint has tensors "
            f"of {stored} layers",
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
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"{model}: model_type {kind!r} is not a known family",
            f"known: {', '.join(sorted(FAMILIES))}; a dense decoder is one line in families.py",
        )

    def size(name: str, default: int | None = None, largest: int = _LARGEST) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise ModelError(
                f"{model}/config.json: {name} is {value!r}; a positive whole number is wanted"
            )
        if value > largest:
            raise ModelError(f"{model}/config.json: {name} is {value}; {largest} is the most")
        return value

    _check_layers(model, config.get("num_hidden_layers"))
    dtype = config.get("dtype") or config.get("torch_dtype") or stored_dtype(model) or "float32"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ModelError(f"{model}/config.json: dtype {dtype!r} is unknown", f"known: {known}")
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
    )
