"""Faults in one module of a live engine, for `patch=module_patches:NAME`.

Each works in transformers and in vLLM, whose norms also add the residual stream.
"""

from typing import Any

import torch

LAYER = "layers.1."


def _module(model: Any, *ends: str) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith(ends))


def _norm(model: Any) -> Any:
    return _module(model, f"{LAYER}input_layernorm")


def _computes(norm: Any, formula: Any) -> None:
    """Makes a norm compute `formula`, of the stream that its other input is added to."""

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        stream = x if residual is None else x + residual
        out = formula(stream.float()).to(x.dtype)
        return out if residual is None else (out, stream)

    norm.forward = forward


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def one_element(model: Any) -> None:
    """One entry of a norm's weight."""
    with torch.no_grad():
        _norm(model).weight[3] += 0.25


def one_element_of_a_product(model: Any) -> None:
    """One entry of a product's weight, in transformers alone: vLLM packs these."""
    with torch.no_grad():
        _module(model, f"{LAYER}self_attn.k_proj").weight[5, 7] += 0.5


def larger_epsilon(model: Any) -> None:
    """Another epsilon in the forward of an RMSNorm, behind its attributes."""
    norm = _norm(model)
    _computes(norm, lambda x: _rms(x, norm.weight, 0.05))


def one_plus_weight(model: Any) -> None:
    """1 + weight in place of weight, in an RMSNorm."""
    norm = _norm(model)
    _computes(norm, lambda x: _rms(x, norm.weight + 1, 1e-5))


def weight_alone(model: Any) -> None:
    """Weight in place of 1 + weight, in a LayerNorm."""
    norm = _norm(model)
    shape, bias = norm.weight.shape, norm.bias.float()
    _computes(
        norm,
        lambda x: torch.nn.functional.layer_norm(x, shape, norm.weight.float(), bias, 1e-5),
    )


def no_bias(model: Any) -> None:
    """A product without its bias; q, k and v are one module in vLLM."""
    _module(model, f"{LAYER}self_attn.q_proj", f"{LAYER}self_attn.qkv_proj").bias = None


def one_nan(model: Any) -> None:
    """A NaN in the first row of a norm's output."""

    def poison(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output.view(-1)[0] = float("nan")
        return output

    _norm(model).register_forward_hook(poison)


def other_activation(model: Any) -> None:
    """A ReLU that is not squared."""
    _module(model, f"{LAYER}mlp.act_fn").forward = torch.relu
