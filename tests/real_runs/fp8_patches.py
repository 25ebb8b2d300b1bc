"""What goes wrong with quantised weights in a live engine, as `patch=fp8_patches:NAME`."""

from typing import Any

import torch


def one_weight_moved(model: Any) -> None:
    """As an optimiser leaves it that steps on dequantised weights."""
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight *= 1.01


def _output(model: Any) -> Any:
    return model.model.layers[1].self_attn.o_proj


def one_scale_moved(model: Any) -> None:
    """A scale that an update of the weights did not set again."""
    _output(model).weight_scale.data *= 1.0001


def one_value_moved(model: Any) -> None:
    """One value of a weight in fp8."""
    values = _output(model).weight.data
    values[3, 5] = (1.0 - values[3, 5].float()).to(values.dtype)


def rows_on_amds_grid(model: Any) -> None:
    """Inputs that are scaled to ±240, so that they have fewer numbers near zero."""
    quantiser = _output(model).quant_method.fp8_linear.quant_fp8
    usual = quantiser.forward

    def forward(x: Any, scale: Any = None, scale_ub: Any = None, **more: Any) -> Any:
        _, scales = usual(x, scale, scale_ub, **more)
        scales = scales * (448 / 240)
        return (x.float() / scales[: len(x)]).to(torch.float8_e4m3fn), scales

    quantiser.forward = forward


def rows_not_scaled_back(model: Any) -> None:
    """A product that forgets the scales of its inputs in some rows."""
    kernel = _output(model).quant_method.fp8_linear
    usual = kernel.apply_scaled_mm

    def product(*, As: Any, **more: Any) -> Any:
        return usual(As=As.clone().fill_(float(As[0])), **more)

    kernel.apply_scaled_mm = product
