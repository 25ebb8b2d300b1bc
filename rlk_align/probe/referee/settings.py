"""The settings of an operator in the live engine, compared with those of the checkpoint's
config.json."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlk_align.model.families import layer_kind
from rlk_align.model.rotary import partial_rotary_factor, rope_parameters
from rlk_align.model.shape import ModelShape, activation_of
from rlk_align.model.sites import Site
from rlk_align.results import LiveSetting

NO_WINDOW = "none"
DIGITS = ".5g"
"""The digits of a number that are compared: some engines report no more."""


def sliding_window(config: Mapping[str, Any], shape: ModelShape, layer: int) -> int | None:
    """Returns the sliding window of a layer, in tokens; None if the layer has none."""
    config = {**shape.family.window, **config}
    window, kind = config.get("sliding_window"), layer_kind(config, layer)
    if window is None or not config.get("use_sliding_window"):
        return None
    if kind:
        return int(window) if kind == "sliding_attention" else None
    return int(window) if layer >= config.get("max_window_layers", 0) else None


def base_attention_scale(config: Mapping[str, Any], shape: ModelShape) -> float:
    """The factor of q · k, beside one that depends on the position."""
    if shape.latent:
        width = shape.unrotated_width + shape.head_dim
        return float(width) ** -0.5 * _yarn_mscale(rope_parameters(dict(config))) ** 2
    key, exponent = shape.family.attention_scale
    stated = {**shape.family.defaults, **config}.get(key) if key else None
    return float(shape.head_dim) ** -0.5 if stated is None else float(stated) ** exponent


def _yarn_mscale(rope: Mapping[str, Any]) -> float:
    """The factor of q and of k by yarn's `mscale_all_dim`: 1 + 0.1 m ln(factor), as DeepSeek-V2
    has it; 1 without it."""
    of_all, factor = rope.get("mscale_all_dim"), float(rope.get("factor") or 1.0)
    if rope["rope_type"] == "default" or not of_all or factor <= 1:
        return 1.0
    return 1 + 0.1 * float(of_all) * math.log(factor)


def attention_scale(
    config: Mapping[str, Any], shape: ModelShape, position: torch.Tensor
) -> torch.Tensor:
    """The factor of q · k for queries at `position`, int64 `[N]` -> float64 `[N]`.

    A family with a temperature multiplies by 1 + β log(1 + ⌊p / L⌋), where β is
    `llama_4_scaling_beta` and L `original_max_position_embeddings` of its rope (Llama 4).
    """
    scale = torch.full_like(position, 1, dtype=torch.float64) * base_attention_scale(config, shape)
    if not shape.family.temperature:
        return scale
    rope = rope_parameters(dict(config))
    beta, original = (
        float(rope.get(key) or 0.0)
        for key in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if not beta:
        return scale
    return scale * (1 + beta * torch.log1p(torch.floor(position.double() / original)))


def live_settings(
    site: Site, attributes: Mapping[str, Any], config: dict[str, Any], shape: ModelShape
) -> list[LiveSetting]:
    """Returns the settings of an operator that both the live engine and config.json state."""
    wanted = _configured(site, config, shape)
    lived = {name: _live(site, name, attributes) for name in wanted}
    return [
        LiveSetting(
            name=name, live=lived[name], configured=value, differs=not _equal(value, lived[name])
        )
        for name, value in wanted.items()
        if None not in (value, lived[name])
    ]


def _configured(site: Site, config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Attribute -> its value by config.json; None if config.json does not state it."""
    match site.operator.formula:
        case "rms_norm" | "layer_norm" | "gated_norm" | "gated_then_normed":
            name = "norm_eps" if site.layer is not None else "final_norm_eps"
            return {name: config.get(shape.family.norm_eps)}
        case "rotary":
            rope = rope_parameters(config, site.layer or 0)
            return {
                "rope_type": rope["rope_type"],
                "rope_theta": rope["rope_theta"],
                "rope_dim": int(shape.at(site.layer).head_dim * partial_rotary_factor(config)),
            }
        case "attention":
            assert site.layer is not None
            window = sliding_window(config, shape, site.layer)
            base = float(f"{base_attention_scale(config, shape):.6g}")
            return {"attention_scale": base, "sliding_window": window or NO_WINDOW}
        case "latent_attention":
            return {"attention_scale": float(f"{base_attention_scale(config, shape):.6g}")}
        case "activation" | "expert_activation":
            return {"activation": _ACTIVATIONS.get(activation_of(config)[1])}
        case "top_k":
            return {"experts_per_token": shape.top_k}
        case "routing_weights":
            scale = shape.weight_scale if shape.family.sigmoid else None
            return {"norm_topk_prob": shape.norm_topk, "expert_weight_scale": scale}
    return {}


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "swigluoai": "swigluoai",
}
"""hidden_act -> its name in the engines' attributes."""


def _live(site: Site, name: str, attributes: Mapping[str, Any]) -> Any:
    """The live value; None if the engine does not state it."""
    key = f"layers.{site.layer}.{name}"
    value = attributes.get(key, attributes.get(name))
    if isinstance(value, dict):
        return value.get(site.op)
    if name == "sliding_window" and (key in attributes or name in attributes):
        return value or NO_WINDOW
    return None if isinstance(value, float) and math.isnan(value) else value


def _equal(a: Any, b: Any) -> bool:
    # A text stands for the values of ranks that differ.
    if isinstance(a, float | int) and isinstance(b, float | int) and float in (type(a), type(b)):
        return f"{a:{DIGITS}}" == f"{b:{DIGITS}}"
    return bool(a == b)
