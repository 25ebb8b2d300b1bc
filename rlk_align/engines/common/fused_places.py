"""Where the canonical operators are in a decoder that fuses some of them, as vLLM and SGLang do.

Such a decoder fuses q, k, v and gate, up, and adds the residual inside the next norm, which returns
(normed, residual stream).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from rlk_align.engines.common.experts import BY_EXPERT
from rlk_align.engines.common.layout import in_parts, of_outputs
from rlk_align.engines.common.places import FIRST, SECOND, Access, End, Place, beside_sinks
from rlk_align.model.operators import layer_modules
from rlk_align.model.shape import ModelShape

Sparse = Callable[[int], Iterable[Place] | None]
"""Index of a layer -> the places of its sparse block; None for a dense layer."""
LatentAttention = Callable[[str, str, ModelShape, int], Iterator[Place]]
"""Name of a layer, path of its latent attention, shape, number of ranks -> the places in it."""
DeltaNet = Callable[[Any, str, str, ModelShape, int], Iterator[Place]]
"""Live model, name of a layer, path of its gated delta net, shape, number of ranks -> the places in
it."""


def fused_places(
    model: Any,
    shape: ModelShape,
    tp: int,
    logits: str,
    sparse: Sparse,
    heads: Callable[[str], Access] = lambda op: FIRST,
    delta: DeltaNet | None = None,
    latent: LatentAttention | None = None,
) -> Iterator[Place]:
    """The place of each site in a live model of `tp` ranks.

    `logits`: the path of the module that computes them; `heads`: how to reach the values of
    `q_norm` and `k_norm`; `delta`: the places of a gated delta net; `latent`: those of a latent
    attention.
    """
    if shape.family.embedding_scale:
        # The engine scales it outside of any module.
        first, table = "model.layers.0.input_layernorm", "model.embed_tokens"
        yield Place(sites=("embed",), module=first, end="input", parameters_in=table)
    else:
        yield Place(sites=("embed",), module=embedding_path(model))
    for i, layer in enumerate(model.model.layers):
        yield from _layer_places(model, layer, i, shape, tp, sparse, heads, delta, latent)
    last = f"layers.{len(model.model.layers) - 1}.mlp_residual"
    yield from norm_places(last, "final_norm", "model.norm")
    head = head_path(model)
    yield Place(sites=("logits",), module=logits, rows="sampled", parameters_in=head)


def expert_places(
    layer: str, module: str, shape: ModelShape, tp: int, unexposed: str
) -> Iterator[Place]:
    """The rows of a layer's experts, inside a module; each rank has columns of all of them."""
    for op in BY_EXPERT:
        site = f"{layer}.{op}"
        size = shape.hidden if op == "down_proj" else shape.expert_intermediate
        layout = in_parts(site, [size] * shape.top_k, tp) if tp > 1 and not unexposed else None
        yield Place(sites=(site,), module=module, end="inside", layout=layout, unexposed=unexposed)


def head_path(model: Any) -> str:
    """The path of the module with the head's weight; some tied models have the embedding only."""
    return "lm_head" if hasattr(model, "lm_head") else "model.embed_tokens"


def embedding_path(model: Any) -> str:
    """The path of the embedding."""
    return f"model.{'embed_tokens' if hasattr(model.model, 'embed_tokens') else 'embedding'}"


def attention_path(layer: Any) -> str:
    """The name of a layer's attention."""
    names = ("self_attn", "attn", "mixer")
    return next((name for name in names if hasattr(getattr(layer, name, None), "o_proj")), "attn")


def attention_of(layer: Any) -> Any:
    """A layer's attention, with its projections."""
    return getattr(layer, attention_path(layer))


def attentions(model: Any) -> dict[int, Any]:
    """Index of a layer -> its attention, for the layers that have one."""
    layers = enumerate(model.model.layers)
    return {i: attention_of(x) for i, x in layers if hasattr(x, attention_path(x))}


def place_of(
    model: Any, shape: ModelShape, tp: int, module: str, sites: tuple[str, ...], **more: Any
) -> Place:
    """The place of one module's sites, with the layout that the catalogue gives them."""
    return Place(
        sites=sites,
        module=module,
        layout=of_outputs(sites, shape, tp),
        shares_outputs=getattr(model.get_submodule(module), "rlk_shares_outputs", False),
        **more,
    )


def _layer_places(
    model: Any,
    layer: Any,
    i: int,
    shape: ModelShape,
    tp: int,
    sparse: Sparse,
    heads: Callable[[str], Access],
    delta: DeltaNet | None,
    latent: LatentAttention | None,
) -> Iterator[Place]:
    name = f"layers.{i}"
    here, mlp = f"model.{name}", f"model.{name}.mlp"
    attention = f"{here}.{attention_path(layer)}"

    def place(module: str, *ops: str, end: End = "output", access: Access = FIRST) -> Place:
        sites = tuple(f"{name}.{op}" for op in ops)
        return place_of(model, shape, tp, module, sites, end=end, access=access)

    stream = f"layers.{i - 1}.mlp_residual" if i else ""
    yield from norm_places(stream, f"{name}.attn_norm", f"{here}.input_layernorm")
    operators = shape.family.layer(shape, i)
    if "delta" in operators:
        assert delta is not None, name
        yield from delta(model, name, f"{here}.linear_attn", shape, tp)
    elif shape.latent:
        assert latent is not None, name
        yield from latent(name, attention, shape, tp)
    else:
        yield place(f"{attention}.qkv_proj", "q_proj", "k_proj", "v_proj")
        for op in ("q_norm", "k_norm"):
            if hasattr(attention_of(layer), op):
                norm = place(f"{attention}.{op}", op, access=heads(op))
                # Each rank norms all heads, and then takes its own.
                yield replace(norm, layout=None) if f"wide_{op}" in operators else norm
        yield place(attention, "q_rope", end="rope")
        yield place(attention, "k_rope", end="rope")
        yield beside_sinks(place(f"{attention}.attn", "attn"), operators, attention)
        if "attn_gate" in operators:
            yield place(f"{attention}.o_proj", "attn_gate", end="input")
        yield place(f"{attention}.o_proj", "o_proj")
    paths = layer_modules(operators, shape.family.modules)
    if "attn_post_norm" in operators:
        yield place(f"{here}.{paths['attn_post_norm']}", "attn_post_norm")
    yield from norm_places(
        f"{name}.attn_residual", f"{name}.mlp_norm", f"{here}.{paths['mlp_norm']}"
    )
    block = sparse(i)
    if block is not None:
        yield from block
        return
    yield place(f"{mlp}.gate_up_proj", "gate_proj", "up_proj")
    if shape.family.one_activation:
        yield place(f"{mlp}.down_proj", "act", end="input")
    else:
        yield place(f"{mlp}.act_fn", "act")
    yield place(f"{mlp}.down_proj", "down_proj")
    if "mlp_post_norm" in operators:
        yield place(f"{here}.{paths['mlp_post_norm']}", "mlp_post_norm")


def norm_places(stream: str, site: str, module: str) -> Iterator[Place]:
    """A norm, and the residual stream that it returns if it adds one."""
    if stream:
        yield Place(sites=(stream,), module=module, access=SECOND)
    yield Place(sites=(site,), module=module)
