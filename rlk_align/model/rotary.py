"""The rotary embedding of a checkpoint, by its config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config, transformers_config
from rlk_align.model.families import FAMILIES, layer_kind
from rlk_align.model.family import Family
from rlk_align.model.shape import ModelShape

FIXED = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""The kinds whose frequencies do not depend on the sequence, as far as `ModelShape.context`."""
_MIN_PAIRS = 4
"""With fewer pairs, rotations by different positions cannot be distinguished."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of a checkpoint."""

    inv_freq: tuple[float, ...]
    """w_j, radians for each position; the rotated width is twice their number."""
    heads: int
    """The number of heads of the queries."""
    kv_heads: int
    """The number of heads of the keys."""
    context: int
    """The number of positions."""
    source: str
    """The site that the `q_rope` of `layer` rotates."""
    key_source: str
    """The site that the `k_rope` of `layer` rotates."""
    layer: int = 0
    """The first layer with attention."""
    interleaved: bool = False
    """Whether features 2j and 2j + 1 are a pair, and not j and j + half the rotated width."""
    scaling: float = 1.0
    """The factor of a rotated vector: yarn's attention factor."""

    @property
    def tells_positions(self) -> bool:
        """Whether a position can be measured from its rotation."""
        return len(self.inv_freq) >= _MIN_PAIRS


def last_features(x: Any, heads: int, features: int) -> Any:
    """The last features of each of `heads` heads, `features` in all, of a tensor `[N, F]`: those
    that a latent attention rotates; all of them in other attentions."""
    if x.shape[1] == features:
        return x
    return x.unflatten(1, (heads, -1))[..., -(features // heads) :].flatten(1)


def rope_parameters(config: dict[str, Any], layer: int = 0) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the parameters of the kind for a layer, from either form of
    config.json; if it has both, the older one counts, as in transformers. Raises ModelError."""
    family = FAMILIES.get(str(config.get("model_type")), Family())
    usual = family.defaults.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or usual
    key, default = "rope_theta", family.theta
    if family.rope_by_kind:
        of_layer = layer_kind(config, layer)
        scaling = _of_kind({"rope_parameters": usual, **config}, of_layer)
        if of_layer == "sliding_attention":
            key, default = family.local_theta
    try:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        theta = float(scaling.get("rope_theta") or config.get(key) or default)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: its rope is malformed: {error}") from error
    return {**scaling, "rope_type": kind, "rope_theta": theta}


def _of_kind(config: dict[str, Any], kind: str) -> Any:
    """The rope of one kind of layers: `rope_parameters` of that kind or, in the older form, no
    scaling for layers with a window."""
    parameters = config.get("rope_parameters") or {}
    if isinstance(parameters, dict) and isinstance(parameters.get(kind), dict):
        return parameters[kind]
    return {} if kind == "sliding_attention" else config.get("rope_scaling") or parameters


def partial_rotary_factor(config: dict[str, Any]) -> float:
    """The rotated part of a head, by config.json or, if that leaves it out, by the family."""
    family = FAMILIES.get(str(config.get("model_type")))
    if width := config.get("rotary_dim"):
        return float(width) / float(config["head_dim"])
    stated = rope_parameters(config).get("partial_rotary_factor")
    default = family.defaults.get("partial_rotary_factor") if family else None
    return float(stated or config.get("partial_rotary_factor") or default or 1.0)


def rotates_a_part(config: dict[str, Any]) -> bool:
    """Whether all engines rotate a part of each head in this family, if its config says so."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and "partial_rotary_factor" in family.defaults


def lacks_factor(rope: dict[str, Any]) -> bool:
    """Whether `rope_parameters` are of a kind that needs a factor, and have none. HF's yarn then
    computes one from the lengths of the context."""
    has_factor = isinstance(rope.get("factor"), int | float)
    return rope["rope_type"] in ("linear", "llama3", "yarn") and not has_factor


def has_alpha(rope: dict[str, Any]) -> bool:
    """Whether `rope_parameters` are of Hunyuan's kind, whose theta is multiplied once by
    alpha^(d / (d - 2)), although it is named `dynamic`."""
    return rope["rope_type"] == "dynamic" and bool(rope.get("alpha"))


def checkpoint_rotary(model: Path, shape: ModelShape, layer: int = 0) -> Rotary | None:
    """The rotation of a layer; None if its frequencies depend on the sequence, or if no layer
    rotates."""
    # Imported here, because callers that only name kinds of rope do not need sites.
    from rlk_align.model.sites import model_sites

    config = read_config(model)
    rope = rope_parameters(config, layer)
    if rope["rope_type"] not in FIXED and not has_alpha(rope):
        return None
    inputs = {s.name: s.inputs for s in model_sites(shape) if s.operator.formula == "rotary"}
    if not inputs:
        return None
    kind = layer_kind(config, layer) if shape.family.rope_by_kind else None
    partial = partial_rotary_factor(config)
    inv_freq, scaling = _frequencies(model, shape.at(layer), rope, partial, kind)
    return Rotary(
        inv_freq=inv_freq,
        scaling=scaling,
        interleaved=shape.family.interleaved,
        heads=shape.heads,
        kv_heads=1 if shape.latent else shape.kv_heads,
        context=shape.context,
        source=inputs[f"layers.{shape.first_attention}.q_rope"][0],
        key_source=inputs[f"layers.{shape.first_attention}.k_rope"][0],
        layer=shape.first_attention,
    )


def _frequencies(
    model: Path, shape: ModelShape, rope: dict[str, Any], partial: float, kind: str | None
) -> tuple[tuple[float, ...], float]:
    if rope["rope_type"] == "default" or has_alpha(rope):
        width, theta = int(shape.head_dim * partial), rope["rope_theta"]
        if has_alpha(rope):
            theta *= float(rope["alpha"]) ** (width / (width - 2))
        return tuple(theta ** (-j / width) for j in range(0, width, 2)), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The dtype does not matter, and transformers fails on some values in config.json.
    config = transformers_config(model, dtype="float32").get_text_config()
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", layer_type=kind)
    return tuple(inv_freq.tolist()), float(scaling)
