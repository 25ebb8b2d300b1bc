"""The sizes of a checkpoint's model, and what its config.json says of its operators."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.config_keys import unknown_settings
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.families import FAMILIES, WITHOUT_FAMILY, layer_kind
from rlk_align.model.family import Family
from rlk_align.model.operators import OPERATORS, Operator, Size
from rlk_align.model.sparse_config import UNKNOWN_ROUTING, read_experts
from rlk_align.model.stored import FusedRows, stored_dtype, stored_layers


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
    """The length of the longest sequence, in tokens; that of a longrope's short factors."""
    dtype: str
    """The checkpoint's own dtype, e.g. `bfloat16`."""
    wide_layers: tuple[int, ...] = ()
    """The layers whose heads are `wide_head_dim` wide, of which `wide_kv_heads` are of keys."""
    wide_head_dim: int = 0
    wide_kv_heads: int = 0
    keys_are_values: bool = False
    """Whether these layers have no product for v, and take k before its norm."""
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
    swiglu_alpha: float = 0.0
    """The factor of the gate within the sigmoid of a clamped activation."""
    swiglu_limit: float = 0.0
    """The largest gate, and the largest magnitude of up, that the experts activate; 0 without a
    limit."""
    unrotated_layers: tuple[int, ...] = ()
    """The layers that do not rotate q and k."""
    delta_layers: tuple[int, ...] = ()
    """The layers with a gated delta net or a state-space model, in place of attention or beside
    it."""
    mlp_layers: tuple[int, ...] = ()
    """The layers with an MLP and no attention, in a family whose layers have one part each."""
    scan_norm: bool = True
    """Whether a norm follows the gate of a state-space model's scan."""
    delta_key_heads: int = 0
    """The number of heads of q and of k in a gated delta net, each for several heads of v."""
    delta_heads: int = 0
    """The number of heads of v."""
    delta_key_width: int = 0
    """The number of features of a head of q and k."""
    delta_width: int = 0
    """The number of features of a head of v."""
    conv_taps: int = 0
    """The number of rows that the convolution before a gated delta net reads, its own included."""
    latent: int = 0
    """The number of features of the latent of keys and values; 0 without a latent attention, whose
    `head_dim` is that of the rotated features of a head."""
    query_latent: int = 0
    """The number of features of the latent of queries; 0 if they are computed from the stream."""
    unrotated_width: int = 0
    """The number of features of a head of q, and of a key, that a latent attention does not
    rotate."""
    value_width: int = 0
    """The number of features of a head of v in a latent attention."""
    qk_norm: bool = False
    """Whether the config enables norms of q and k, in a family that leaves them to the config."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def at(self, layer: int | None) -> "ModelShape":
        """The shape with the heads of a layer; None for what is outside of the layers."""
        if layer not in self.wide_layers:
            return self
        return replace(self, head_dim=self.wide_head_dim, kv_heads=self.wide_kv_heads)

    def of_site(self, site: str) -> "ModelShape":
        """The shape with the heads of a site's layer."""
        number = site.removeprefix("layers.").partition(".")[0]
        return self.at(int(number)) if number.isdecimal() else self

    def operators(self) -> Iterator[tuple[int | None, Operator]]:
        """(layer, operator) in execution order; layer is None for operators outside the layers."""
        for name in self.family.before:
            yield None, OPERATORS[name]
        for layer in range(self.layers):
            for name in self.family.layer(self, layer):
                yield layer, OPERATORS[name]
        for name in self.family.after:
            yield None, OPERATORS[name]

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Module of a layer in the checkpoint -> the operators of this model in it, in order."""
        return {m: tuple(filter(self.has, ops)) for m, ops in self.family.fused.items()}

    @property
    def fused_rows(self) -> dict[str, tuple[FusedRows, ...]]:
        """Module of a layer in the checkpoint -> the rows of its operators, in stored order."""
        return {m: tuple(self._fused(ops)) for m, ops in self.fused.items()}

    def _fused(self, ops: Sequence[str]) -> Iterator[FusedRows]:
        if not self.family.by_key_head:
            for op in ops:
                yield FusedRows(op, 0, self.size(OPERATORS[op].features))
            return
        keys, _, values = self.delta_parts
        # The first row of each part of an operator, and the number of rows for a head of keys.
        parts = {
            "qkv_in": ((0, keys), (keys, keys), (2 * keys, values)),
            "z": ((0, values),),
            "b": ((0, self.delta_heads),),
            "a": ((0, self.delta_heads),),
        }
        for head in range(self.delta_key_heads):
            for op in ops:
                for first, size in parts[op]:
                    step = size // self.delta_key_heads
                    yield FusedRows(op, first + head * step, first + (head + 1) * step)

    def operator_of(self, site: str) -> Operator:
        """The record of a site's operator: of those that share its name and formula, the one that
        its layer has."""
        layer, _, op = site.rpartition(".")
        usual = OPERATORS[op]
        names = self.family.layer(self, int(layer.removeprefix("layers."))) if layer else ()
        records = (OPERATORS[name] for name in names)
        same = (o for o in records if (o.site, o.formula) == (op, usual.formula))
        return next(same, usual)

    @property
    def delta_parts(self) -> tuple[int, int, int]:
        """The features of q, k and v in a gated delta net."""
        keys = self.delta_key_heads * self.delta_key_width
        return keys, keys, self.delta_heads * self.delta_width

    @property
    def first_attention(self) -> int:
        """The first layer with attention, on which positions and boundaries are measured."""
        cores = ("attention", "latent_attention")
        layers = (
            map(OPERATORS.__getitem__, self.family.layer(self, i)) for i in range(self.layers)
        )
        return next(i for i, ops in enumerate(layers) if any(o.formula in cores for o in ops))

    def has(self, op: str) -> bool:
        """Whether any layer has that operator."""
        return any(op in self.family.layer(self, layer) for layer in range(self.layers))

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return any(OPERATORS[op].part == "mlp" for op in self.family.layer(self, layer))

    def correction(self, layer: int) -> tuple[int, ...]:
        """The dimensions of the correction of a layer's scores; empty without one."""
        choices = (OPERATORS[n] for n in self.family.layer(self, layer))
        return tuple(self.size(d) for o in choices if o.formula == "top_k" for d in o.weight)

    def heads_of(self, size: Size) -> int:
        """The number of heads that a dimension consists of; 1 if it does not count heads."""
        return {
            "query_heads": self.heads,
            "gated_query_heads": self.heads,
            "kv_heads": self.kv_heads,
            "delta_values": self.delta_heads,
            "latent_query_heads": self.heads,
            "rotated_query_heads": self.heads,
            "latent_values": self.heads,
        }.get(size, 1)

    def size(self, size: Size) -> int:
        """The number of features of a dimension in this model."""
        if size == "one":
            return 1
        if size in ("query_heads", "kv_heads"):
            return self.heads_of(size) * self.head_dim
        if size == "gated_query_heads":
            return 2 * self.heads * self.head_dim
        if size in _OF_LATENT:
            return self._latent_size(size)
        if size == "delta_values":
            return self.delta_heads * self.delta_width
        if size == "delta_inputs":
            return sum(self.delta_parts)
        if size in ("expert_slots", "hidden_slots"):
            return self.top_k * (
                self.hidden if size == "hidden_slots" else self.expert_intermediate
            )
        return getattr(self, size)

    def _latent_size(self, size: Size) -> int:
        of_head = {
            "latent_query_heads": self.unrotated_width + self.head_dim,
            "rotated_query_heads": self.head_dim,
            "expanded_heads": self.unrotated_width + self.value_width,
            "latent_values": self.value_width,
        }
        if size in of_head:
            return self.heads * of_head[size]
        return self.head_dim + (self.latent if size == "latent_and_key" else 0)


_OF_LATENT: tuple[Size, ...] = (
    *("latent_query_heads", "rotated_query_heads", "expanded_heads", "latent_values"),
    *("latent_and_key", "rotated_key"),
)


def original_context(config: Mapping[str, Any]) -> int | None:
    """The length up to which a longrope has its short factors; None for another rope. The engines
    differ beyond it: transformers chooses the factors by the longest position of each forward, and
    vLLM by the longest that it serves."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return None
    key = "original_max_position_embeddings"
    length = rope.get(key) or config.get(key)
    return length if type(length) is int and length > 0 else None


_MAX_SIZE = 1 << 28
"""The largest supported size of a model's dimension."""


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head has the embedding's weight, by config.json or by the family's default."""
    family = FAMILIES.get(str(config.get("model_type")))
    defaults = family.defaults if family else {}
    return bool({**defaults, **config}.get("tie_word_embeddings"))


def cap_of(config: Mapping[str, Any], key: str) -> float | None:
    """The cap that a key of the config states, or the family's default; None for no cap."""
    family = FAMILIES.get(str(config.get("model_type")))
    stated = {**(family.defaults if family else {}), **config}.get(key) if key else None
    return None if stated is None else float(stated)


def multiplier_of(config: Mapping[str, Any], operator: Operator) -> float:
    """The number that multiplies the operator's output or, of a residual add, its branch."""
    if not operator.multiplier:
        return 1.0
    family = FAMILIES.get(str(config.get("model_type")))
    stated = {**(family.defaults if family else {}), **config}.get(operator.multiplier)
    factor = 1.0 if stated is None else float(stated)
    return 1 / factor if operator.divides else factor


def input_scales(
    config: Mapping[str, Any], shape: ModelShape, operator: Operator
) -> list[tuple[float, ...]]:
    """For each input of an operator the numbers that multiply it before: one for all features, or
    one for each of x, B and C. Empty if none of them is multiplied."""
    stated = {**shape.family.defaults, **config}

    def numbers(path: str) -> tuple[float, ...]:
        key, _, places = path.partition(".")
        value = stated.get(key) if key else None
        if value is None:
            return (1.0,)
        first, _, last = places.partition("-")
        some = value[int(first) : int(last or first) + 1] if places else [value]
        return tuple(map(float, some))

    return [numbers(path) for path in shape.family.scales.get(operator.name, ())]


def activation_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """The config's key for the activation, and the activation by config.json or by the family."""
    family = FAMILIES.get(str(config.get("model_type")))
    key, default = family.activation if family else ("hidden_act", "silu")
    return key, str(config.get(key) or default)


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
    every = frozenset().union(*({*f.keys, *f.values} for f in FAMILIES.values()))
    names = sorted(unknown_settings(config, every))
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"; no known family has its {', '.join(names[:_MAX_NAMED])}{more}"


def _unrotated(model: Path, config: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """The layers that do not rotate q and k. Raises ModelError if the first layer is one."""
    layers = family.unrotated(config) if family.unrotated else ()
    if 0 in layers and len(layers) < int(config["num_hidden_layers"]):
        raise ModelError(
            f"{model}/config.json: the first layer does not rotate q and k, and positions are "
            "checked by its rotation",
            WITHOUT_FAMILY,
        )
    return layers


_DELTA_SIZES = {
    "delta_key_heads": "linear_num_key_heads",
    "delta_heads": "linear_num_value_heads",
    "delta_key_width": "linear_key_head_dim",
    "delta_width": "linear_value_head_dim",
    "conv_taps": "linear_conv_kernel_dim",
}


def _read_delta_net(
    model: Path, config: dict[str, Any], size: Callable[..., int]
) -> dict[str, Any]:
    """The fields of `ModelShape` that describe gated delta nets. Raises ModelError."""
    sizes = {name: size(key) for name, key in _DELTA_SIZES.items()}
    if sizes["delta_heads"] % sizes["delta_key_heads"]:
        raise ModelError(
            f"{model}/config.json: linear_num_value_heads={sizes['delta_heads']} is no multiple of "
            f"linear_num_key_heads={sizes['delta_key_heads']}"
        )
    layers = range(size("num_hidden_layers"))
    kinds = {i: layer_kind(config, i) for i in layers}
    rotated = [i for i in layers if kinds[i] == "full_attention"]
    if not rotated:
        raise ModelError(
            f"{model}/config.json: no layer has full_attention, and positions are checked by a "
            "layer's rotation",
            WITHOUT_FAMILY,
        )
    return {**sizes, "delta_layers": tuple(i for i in layers if kinds[i] == "linear_attention")}


def _read_state_space(
    model: Path, config: dict[str, Any], family: Family, size: Callable[..., int]
) -> dict[str, Any]:
    """The fields of `ModelShape` that describe state-space models. Raises ModelError."""
    keys = family.state_space
    sizes = {name: size(key) for name, key in keys.items() if name != "delta_width"}
    heads, stated = sizes["delta_heads"], config.get(keys["delta_width"])
    if config.get("mamba_d_ssm") is not None:
        inner = size("mamba_d_ssm")
    elif "mamba_expand" in family.defaults:
        inner = size("mamba_expand") * size("hidden_size")
    else:
        inner = heads * size(keys["delta_width"])
    if inner % heads or stated not in ("auto", inner // heads):
        raise ModelError(
            f"{model}/config.json: {keys['delta_heads']}={heads} heads of {keys['delta_width']}="
            f"{stated!r} are not the {inner} features of a state-space model"
        )
    if heads % sizes["delta_key_heads"]:
        raise ModelError(
            f"{model}/config.json: {keys['delta_heads']}={heads} is no multiple of "
            f"{keys['delta_key_heads']}={sizes['delta_key_heads']}"
        )
    normed = bool(config.get("mamba_rms_norm", True))
    found = {**sizes, "delta_width": inner // heads, "scan_norm": normed}
    if family.beside_attention:
        return {**found, "delta_layers": tuple(range(size("num_hidden_layers")))}
    kinds = [layer_kind(config, i) for i in range(size("num_hidden_layers"))]
    if others := {*kinds} - {"linear_attention", "full_attention", "mlp", ""}:
        raise ModelError(
            f"{model}/config.json: layers of kind {min(others)!r} are not supported: the layers of "
            "this description have state-space models, attention or MLPs",
            WITHOUT_FAMILY,
        )
    layers = {
        field: tuple(i for i, each in enumerate(kinds) if each == kind)
        for field, kind in (("delta_layers", "linear_attention"), ("mlp_layers", "mlp"))
    }
    if sum(map(len, layers.values())) == len(kinds):
        raise ModelError(
            f"{model}/config.json: no layer has attention, and attributes are read from one",
            WITHOUT_FAMILY,
        )
    return {**found, **layers}


_WIDE_SIZES = {"head_dim": "wide_head_dim", "num_key_value_heads": "wide_kv_heads"}


def _read_wide_heads(model: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ModelShape` that describe the heads of layers that see all keys: published
    configs have keys for them, and transformers saves `per_layer_config`. Raises ModelError."""
    count = int(config["num_hidden_layers"])
    wide = [i for i in range(count) if layer_kind(config, i) == "full_attention"]
    if count - 1 not in wide:
        raise ModelError(
            f"{model}/config.json: the last layer has a window by layer_types, and engines let it "
            "see all keys"
        )
    shared = bool(config.get("attention_k_eq_v"))
    own = {"head_dim": config["global_head_dim"]}
    if shared and config.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    stated = config.get("per_layer_config", {str(i): own for i in wide})
    first = stated.get(str(wide[0])) if isinstance(stated, dict) else None
    own = first if isinstance(first, dict) else {}
    if stated != {str(i): own for i in wide if own} or not own.keys() <= _WIDE_SIZES.keys():
        raise ModelError(
            f"{model}/config.json: per_layer_config = {stated!r} is not one size and one number of "
            "heads for all layers that see all keys",
            WITHOUT_FAMILY,
        )
    sizes = {field: own.get(key) or config[key] for key, field in _WIDE_SIZES.items()}
    if wrong := [v for v in sizes.values() if type(v) is not int or not 0 < v <= _MAX_SIZE]:
        raise ModelError(
            f"{model}/config.json: {wrong[0]!r} in per_layer_config, global_head_dim or "
            "num_global_key_value_heads must be a positive whole number"
        )
    return {**sizes, "wide_layers": tuple(wide), "keys_are_values": shared}


def _read_latent(model: Path, config: dict[str, Any], size: Callable[..., int]) -> dict[str, Any]:
    """The fields of `ModelShape` that describe a latent attention. Raises ModelError."""
    if config.get("rope_interleave") is not True:
        raise ModelError(
            f"{model}/config.json: rope_interleave is {config.get('rope_interleave')!r}: rotations "
            "of j and j + half the width are not supported with latent attention"
        )
    queries = config.get("q_lora_rank")
    return {
        "latent": size("kv_lora_rank"),
        "query_latent": 0 if queries is None else size("q_lora_rank"),
        "unrotated_width": size("qk_nope_head_dim"),
        "value_width": size("v_head_dim"),
        "head_dim": size("qk_rope_head_dim"),
    }


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
    longest = size("max_position_embeddings")
    return ModelShape(
        model_type=kind,
        layers=size("num_hidden_layers", largest=10_000),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        **{"head_dim": size("head_dim", max(1, hidden // heads))}
        | (_read_latent(model, config, size) if family.latent else {}),
        intermediate=size(family.inner),
        vocab=size("vocab_size"),
        context=min(longest, original_context(config) or longest),
        dtype=dtype,
        qk_norm=bool(family.qk_norm and config.get(family.qk_norm)),
        unrotated_layers=_unrotated(model, config, family),
        **(_read_delta_net(model, config, size) if family.hybrid else {}),
        **(_read_state_space(model, config, family, size) if family.state_space else {}),
        **(_read_wide_heads(model, config) if family.wide_heads else {}),
        **(read_experts(model, config, family.experts, size) if family.experts else {}),
    )
