"""Where the canonical operators are in a vLLM decoder.

vLLM fuses q, k, v and gate, up, and adds the residual inside the next norm, which returns
(normed, residual stream).
"""

from collections.abc import Iterator
from typing import Any

from rlk_align.engines.common.experts import BY_EXPERT, has_kernels
from rlk_align.engines.common.layout import in_slots, of_outputs
from rlk_align.engines.common.places import SECOND, End, Place
from rlk_align.engines.vllm.experts import FUSED, PARTIAL, sparse_blocks
from rlk_align.model.families import ModelShape


def vllm_places(model: Any, shape: ModelShape, tp: int) -> Iterator[Place]:
    """The place of each site in a live model of `tp` ranks."""
    yield Place(sites=("embed",), module="model.embed_tokens")
    for i, layer in enumerate(model.model.layers):
        yield from _layer_places(model, layer, f"layers.{i}", i, shape, tp)
    yield from _norm(
        f"layers.{len(model.model.layers) - 1}.mlp_residual", "final_norm", "model.norm"
    )
    yield Place(
        sites=("logits",), module="logits_processor", rows="sampled", parameters_in="lm_head"
    )


def _layer_places(
    model: Any, layer: Any, name: str, i: int, shape: ModelShape, tp: int
) -> Iterator[Place]:
    here, attention, mlp = f"model.{name}", f"model.{name}.self_attn", f"model.{name}.mlp"

    def place(module: str, *ops: str, end: End = "output", unexposed: str = "") -> Place:
        sites = tuple(f"{name}.{op}" for op in ops)
        return Place(
            sites=sites,
            module=module,
            end=end,
            layout=of_outputs(sites, shape, tp),
            shares_outputs=getattr(model.get_submodule(module), "rlk_shares_outputs", False),
            unexposed=unexposed,
        )

    stream = f"layers.{i - 1}.mlp_residual" if i else ""
    yield from _norm(stream, f"{name}.attn_norm", f"{here}.input_layernorm")
    yield place(f"{attention}.qkv_proj", "q_proj", "k_proj", "v_proj")
    for op in ("q_norm", "k_norm"):
        if hasattr(layer.self_attn, op):
            yield place(f"{attention}.{op}", op)
    yield place(attention, "q_rope", end="rope")
    yield place(attention, "k_rope", end="rope")
    yield place(f"{attention}.attn", "attn")
    yield place(f"{attention}.o_proj", "o_proj")
    yield from _norm(
        f"{name}.attn_residual", f"{name}.mlp_norm", f"{here}.post_attention_layernorm"
    )
    sparse = next(((path, block) for at, path, block in sparse_blocks(model) if at == i), None)
    if sparse is not None:
        path, block = sparse
        kernels = has_kernels(block.experts)
        yield from _sparse_places(f"{here}.{path}", name, shape, tp if kernels else 0)
        if hasattr(block, "shared_experts"):
            shared = f"{here}.{path}.shared_experts"
            yield place(f"{shared}.gate_up_proj", "shared_gate_proj", "shared_up_proj")
            yield place(f"{shared}.act_fn", "shared_act")
            partial = "" if tp == 1 or kernels else PARTIAL
            yield place(f"{shared}.down_proj", "shared_down_proj", unexposed=partial)
        return
    yield place(f"{mlp}.gate_up_proj", "gate_proj", "up_proj")
    yield place(f"{mlp}.act_fn", "act")
    yield place(f"{mlp}.down_proj", "down_proj")


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


def _norm(stream: str, site: str, module: str) -> Iterator[Place]:
    """A norm, and the residual stream that it returns if it adds one."""
    if stream:
        yield Place(sites=(stream,), module=module, access=SECOND)
    yield Place(sites=(site,), module=module)
