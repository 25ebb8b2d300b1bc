"""Where the canonical operators are in a vLLM decoder."""

from collections.abc import Iterator
from typing import Any

from rlk_align.engines.common.experts import BY_EXPERT, has_kernels
from rlk_align.engines.common.fused_places import fused_places, place_of
from rlk_align.engines.common.layout import in_slots
from rlk_align.engines.common.places import Place
from rlk_align.engines.vllm.experts import FUSED, PARTIAL, sparse_blocks
from rlk_align.model.families import ModelShape


def vllm_places(model: Any, shape: ModelShape, tp: int) -> Iterator[Place]:
    """The place of each site in a live model of `tp` ranks."""
    blocks = {i: (path, block) for i, path, block in sparse_blocks(model)}

    def sparse(layer: int) -> Iterator[Place] | None:
        return _block_places(model, layer, *blocks[layer], shape, tp) if layer in blocks else None

    yield from fused_places(model, shape, tp, "logits_processor", sparse)


def _block_places(
    model: Any, layer: int, path: str, block: Any, shape: ModelShape, tp: int
) -> Iterator[Place]:
    name, here = f"layers.{layer}", f"model.layers.{layer}.{path}"
    kernels = has_kernels(block.experts)
    yield from _sparse_places(here, name, shape, tp if kernels else 0)
    if not hasattr(block, "shared_experts"):
        return

    def place(module: str, *ops: str, unexposed: str = "") -> Place:
        sites = tuple(f"{name}.{op}" for op in ops)
        path = f"{here}.shared_experts.{module}"
        return place_of(model, shape, tp, path, sites, unexposed=unexposed)

    yield place("gate_up_proj", "shared_gate_proj", "shared_up_proj")
    yield place("act_fn", "shared_act")
    partial = "" if tp == 1 or kernels else PARTIAL
    yield place("down_proj", "shared_down_proj", unexposed=partial)


def _sparse_places(block: str, name: str, shape: ModelShape, shown: int) -> Iterator[Place]:
    """`shown`: the number of ranks that share the experts' rows; 0 if these are not tensors."""
    yield Place(sites=(f"{name}.router",), module=f"{block}.gate")
    for op in ("experts", "routing_weights"):
        yield Place(sites=(f"{name}.{op}",), module=f"{block}.experts", end="inside")
    for op in BY_EXPERT:
        site = f"{name}.{op}"
        size = shape.hidden if op == "down_proj" else shape.expert_intermediate
        yield Place(
            sites=(site,),
            module=f"{block}.experts",
            end="inside",
            layout=in_slots(site, size, shape.top_k, shown) if shown > 1 else None,
            unexposed="" if shown else FUSED,
        )
    yield Place(sites=(f"{name}.moe_out",), module=block)
