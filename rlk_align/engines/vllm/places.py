"""Where the canonical operators are in a vLLM decoder.

vLLM fuses q, k, v and gate, up, and adds the residual inside the next norm, which returns
(normed, residual stream). In a family that vLLM has no class for, it runs the code of transformers.
"""

from collections.abc import Iterator
from typing import Any

from rlk_align.engines.common.experts import BY_EXPERT, has_kernels
from rlk_align.engines.common.layout import in_slots, of_outputs
from rlk_align.engines.common.places import SECOND, End, Place
from rlk_align.engines.vllm.experts import FUSED, PARTIAL, sparse_blocks
from rlk_align.model.families import ModelShape
from rlk_align.model.operators import layer_modules


def vllm_places(model: Any, shape: ModelShape, tp: int) -> Iterator[Place]:
    """The place of each site in a live model of `tp` ranks."""
    if of_transformers(model):
        yield from _transformers_places(model, shape)
        return
    if shape.family.embedding_scale:
        # vLLM scales it outside of any module.
        first, table = "model.layers.0.input_layernorm", "model.embed_tokens"
        yield Place(sites=("embed",), module=first, end="input", parameters_in=table)
    else:
        yield Place(sites=("embed",), module="model.embed_tokens")
    for i, layer in enumerate(model.model.layers):
        yield from _layer_places(model, layer, f"layers.{i}", i, shape, tp)
    yield from _norm(
        f"layers.{len(model.model.layers) - 1}.mlp_residual", "final_norm", "model.norm"
    )
    yield Place(
        sites=("logits",), module="logits_processor", rows="sampled", parameters_in=head_path(model)
    )


def head_path(model: Any) -> str:
    """The path of the module with the head's weight; some tied models have the embedding only."""
    return "lm_head" if hasattr(model, "lm_head") else "model.embed_tokens"


def of_transformers(model: Any) -> bool:
    """Whether the model is the code of transformers, with vLLM's linear layers, norms and attention
    in it: vLLM runs a family so that it has no class for."""
    return type(model).__name__.startswith("Transformers")


def sliding_window(attention: Any) -> int | None:
    """The number of keys that vLLM's attention of a layer sees; None if it has no window."""
    window = attention.sliding_window
    return None if window in (None, -1) else int(window)


_FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}
"""Module of a layer -> the operators that vLLM fuses in the code of transformers."""


def _transformers_places(model: Any, shape: ModelShape) -> Iterator[Place]:
    """The places in the code of transformers, which adds residuals outside of norms."""
    yield Place(sites=("embed",), module="model.embed_tokens")
    for i, layer in enumerate(model.model.layers):
        modules, operators = dict(layer.named_modules()), shape.family.layer(shape, i)

        def place(module: str, *ops: str, end: End = "output", i: int = i) -> Place:
            sites = tuple(f"layers.{i}.{op}" for op in ops)
            path = f"model.layers.{i}.{module}".removesuffix(".")
            return Place(sites=sites, module=path, end=end, layout=of_outputs(sites, shape, 1))

        paths = layer_modules(operators, shape.family.modules)
        yield from (place(module, *ops) for module, ops in _FUSED.items())
        yield from (place(path, op) for op, path in paths.items() if path in modules)
        for op in ("q_rope", "k_rope") if "q_rope" in operators else ():
            yield place("self_attn", op, end="rope")
        yield place("self_attn.o_proj", "attn", end="input")
        yield place(paths.get("mlp_norm", "mlp"), "attn_residual", end="input")
        yield place("mlp.down_proj", "act", end="input")
        yield place("", "mlp_residual")
    yield Place(sites=("final_norm",), module="model.norm")
    yield Place(
        sites=("logits",), module="logits_processor", rows="sampled", parameters_in=head_path(model)
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
    operators = shape.family.layer(shape, i)
    paths = layer_modules(operators, shape.family.modules)
    if "attn_post_norm" in operators:
        yield place(f"{here}.{paths['attn_post_norm']}", "attn_post_norm")
    yield from _norm(f"{name}.attn_residual", f"{name}.mlp_norm", f"{here}.{paths['mlp_norm']}")
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
    if shape.family.one_activation:
        yield place(f"{mlp}.down_proj", "act", end="input")
    else:
        yield place(f"{mlp}.act_fn", "act")
    yield place(f"{mlp}.down_proj", "down_proj")
    if "mlp_post_norm" in operators:
        yield place(f"{here}.{paths['mlp_post_norm']}", "mlp_post_norm")


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
