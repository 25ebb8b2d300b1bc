"""Where the canonical operators are in an HF decoder."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlk_align.engines.common.experts import INSIDE, router_path
from rlk_align.engines.common.layout import of_fused
from rlk_align.engines.common.places import (
    FIRST,
    HALVES,
    HEADS_FIRST,
    LOGITS,
    Place,
    beside_sinks,
    embedding_place,
    final_norm_path,
    rescaled,
)
from rlk_align.engines.common.transformers_rope import INTERLEAVE, rotating
from rlk_align.engines.hf.delta_net import delta_places
from rlk_align.engines.hf.experts import ROUTER, mlp_path
from rlk_align.engines.hf.mamba import mamba_places
from rlk_align.model.operators import OPERATORS, layer_modules
from rlk_align.model.shape import ModelShape


def hf_places(model: Any, shape: ModelShape) -> Iterator[Place]:
    """The place of each site in a live model."""
    yield embedding_place(shape)
    for i, layer in enumerate(model.model.layers):
        here = f"model.layers.{i}"
        attention = f"{here}.{shape.family.parent('o_proj')}"
        modules = dict(layer.named_modules())
        operators = shape.family.layer(shape, i)
        sites = {OPERATORS[name].site for name in operators}
        named = layer_modules(operators, shape.family.modules)
        # transformers may have renamed the modules of a checkpoint.
        paths = {
            op: named[op] if named[op] in modules else path
            for op, path in layer_modules(operators).items()
        }
        inside = {"router", "conv", "gated_norm", "mamba_norm", "latent_attn"}
        for op, path in paths.items():
            if path in modules and op not in inside:
                first = shape.family.heads_first and op in ("q_norm", "k_norm")
                access = HEADS_FIRST if first else FIRST
                yield Place(sites=(f"layers.{i}.{op}",), module=f"{here}.{path}", access=access)
        for path, ops in shape.fused.items():
            if path in modules:
                rows = tuple(f"layers.{i}.{op}" for op in ops)
                layout = of_fused(f"layers.{i}", path, shape)
                yield Place(sites=rows, module=f"{here}.{path}", layout=layout)
        for op in ("q_rope", "k_rope") if "q_rope" in sites else ():
            # The kernels leave the features in their order.
            halves = shape.latent and not hasattr(layer.self_attn, "rlk_calls")
            halves = halves and rotating(layer.self_attn) == INTERLEAVE
            access = HALVES if halves else FIRST
            yield Place(sites=(f"layers.{i}.{op}",), module=attention, end="rope", access=access)
        if "delta" in operators:
            yield from delta_places(f"layers.{i}", f"{here}.linear_attn", shape.delta_heads)
        if "scan" in operators:
            mamba = f"{here}.{shape.family.parent('conv')}"
            yield from mamba_places(f"layers.{i}", mamba, shape.scan_norm)
        mlp = mlp_path(layer)
        if hasattr(getattr(layer, mlp), "experts"):
            yield from _sparse_places(f"layers.{i}", f"{here}.{mlp}", getattr(layer, mlp))
        # Operators without a module of their own -> the module whose input is that site.
        attended = next((op for op in ("attn_gate", "latent_attn") if op in sites), "attn")
        inputs = {attended: f"{shape.family.parent('o_proj')}.o_proj"}
        if "mlp_residual" in sites:
            inputs["attn_residual"] = paths.get("mlp_norm", mlp)
        if attended == "attn_gate":
            yield Place(sites=(f"layers.{i}.attn",), module=attention, end="inside")
        for act, down in (("act", "down_proj"), ("shared_act", "shared_down_proj")):
            inputs |= {act: paths[down]} if down in paths else {}
        for op, path in inputs.items():
            if op not in sites or path not in modules:
                continue
            place = Place(sites=(f"layers.{i}.{op}",), module=f"{here}.{path}", end="input")
            if op == "latent_attn":
                place = replace(place, parameters_in=f"{here}.{paths[op]}")
            yield beside_sinks(place, operators, attention) if op == "attn" else place
        last = OPERATORS[operators[-1]].site
        yield rescaled(Place(sites=(f"layers.{i}.{last}",), module=here), operators)
    yield Place(sites=("final_norm",), module=final_norm_path(shape))
    if shape.family.logit_cap or shape.family.multiplies("logits"):
        # transformers caps and scales them after the head, outside of any module.
        yield Place(
            sites=("logits",), module="", access=LOGITS, rows="sampled", parameters_in="lm_head"
        )
    else:
        yield Place(sites=("logits",), module="lm_head", rows="sampled")


def _sparse_places(name: str, path: str, block: Any) -> Iterator[Place]:
    """The places of a block of experts."""
    yield Place(sites=(f"{name}.router",), module=f"{path}.{router_path(block)}", access=ROUTER)
    for op in INSIDE:
        yield Place(sites=(f"{name}.{op}",), module=f"{path}.experts", end="inside")
    yield Place(sites=(f"{name}.moe_out",), module=path)
