"""Latent attention in vLLM (MLA): where its operators are, and the weight that expands latents."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rlk_align.engines.common.layout import fused, of_outputs, whole
from rlk_align.engines.common.places import Place
from rlk_align.model.shape import ModelShape


def latent_places(name: str, attention: str, shape: ModelShape, tp: int) -> Iterator[Place]:
    """The places in a latent attention, whose path is `attention`. One product computes both
    latents, and the key that is rotated."""

    def place(module: str, op: str, **more: Any) -> Place:
        site = (f"{name}.{op}",)
        path = f"{attention}.{module}".removesuffix(".")
        return Place(sites=site, module=path, layout=of_outputs(site, shape, tp), **more)

    if shape.query_latent:
        both = (f"{name}.q_a", f"{name}.kv_a")
        sizes = [shape.size(shape.operator_of(site).features) for site in both]
        layout = fused(*(whole(site, size, tp) for site, size in zip(both, sizes, strict=True)))
        yield Place(sites=both, module=f"{attention}.fused_qkv_a_proj", layout=layout)
        yield place("q_a_layernorm", "q_a_norm")
        yield place("q_b_proj", "q_b")
    else:
        yield place("q_proj", "q_proj")
        yield place("kv_a_proj_with_mqa", "kv_a")
    yield place("kv_a_layernorm", "kv_a_norm")
    yield place("", "q_rope", end="rope")
    yield place("", "k_rope", end="rope")
    weight = f"{attention}.kv_b_proj"
    yield place("o_proj", "latent_attn", end="input", parameters_in=weight)
    yield place("o_proj", "o_proj")


def core_of(attention: Any) -> Any:
    """The attention inside a layer's, which has the scale and the cache."""
    wrapper = getattr(attention, "mla_attn", None)
    return attention.attn if wrapper is None else wrapper.mla_attn


COPIES = ("W_UK_T", "W_UV")
"""The names of the next in vLLM."""


class Absorbed(NamedTuple):
    """The copies of the weight that expands latents with which vLLM multiplies queries and outputs
    when it decodes. They are views of the parameter while both have one dtype, so that they follow
    an update in place, and not one that replaces the parameter's tensor."""

    keys: torch.Tensor
    """`[heads, keys, latent]`."""
    values: torch.Tensor
    """`[heads, latent, values]`."""

    def whole(self) -> torch.Tensor:
        """`[heads * (keys + values), latent]`, in the checkpoint's layout."""
        return torch.cat([self.keys, self.values.mT], 1).flatten(0, 1)


def absorbed(core: Any) -> Absorbed | None:
    """The copies in `core_of` a layer's attention; None without them: the kernels make none, and
    vLLM's kernels for AMX have packed ones alone."""
    keys, values = (getattr(core, name, None) for name in COPIES)
    return None if keys is None or values is None else Absorbed(keys.detach(), values.detach())


def expanding_weight(attention: Any) -> torch.Tensor:
    """The weight `[heads * (keys + values), latent]` that vLLM's kernels for AMX compute with, and
    of which they keep packed copies alone: the products with the identity."""
    from vllm import _custom_ops as ops

    impl = core_of(attention).impl
    heads, latent, width = impl.num_heads, impl.kv_lora_rank, impl.qk_nope_head_dim

    def product(inputs: int, outputs: int, packed: torch.Tensor) -> torch.Tensor:
        one = torch.eye(inputs, dtype=packed.dtype).expand(heads, -1, -1).contiguous()
        out = one.new_empty(heads, inputs, outputs)
        ops.bmm_cpu(out, one, packed, True, impl._w_scale)
        return out

    keys = product(width, latent, impl._w_uk_packed)
    values = product(latent, impl.v_head_dim, impl._w_uv_packed)
    return torch.cat([keys, values.mT], 1).flatten(0, 1)
