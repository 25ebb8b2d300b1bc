"""Where the canonical operators are in megatron-core's GPTModel."""

from collections.abc import Iterator

from rlk_align.engines.common.layout import of_outputs
from rlk_align.engines.common.places import FIRST, WITH_BIAS, Access, End, Place
from rlk_align.engines.megatron.experts import sparse_places
from rlk_align.engines.megatron.latent import latent_places
from rlk_align.engines.megatron.layout import grouped_qkv, vocabulary
from rlk_align.model.shape import ModelShape

FUSED = "TransformerEngine computes it inside the linear that follows"


def megatron_places(
    shape: ModelShape, tp: int, te: bool, tied: bool, kernels: bool = False
) -> Iterator[Place]:
    """The place of each site in a model of `tp` ranks. `te`: whether TransformerEngine's linears
    include the norm before them; `tied`: whether the head has no weight of its own; `kernels`:
    whether our kernels compute its sparse layers and latent attention."""
    table = "embedding.word_embeddings"
    yield Place(sites=("embed",), module="embedding", parameters_in=table)
    for i in range(shape.layers):
        yield from _layer_places(i, shape, tp, te, kernels)
    yield Place(sites=("final_norm",), module="decoder.final_layernorm")
    logits = vocabulary("logits", shape, tp)
    yield Place(
        sites=("logits",),
        module="output_layer",
        layout=logits,
        rows="sampled",
        parameters_in=table if tied else "",
    )


def _layer_places(i: int, shape: ModelShape, tp: int, te: bool, kernels: bool) -> Iterator[Place]:
    name, here = f"layers.{i}", f"decoder.layers.{i}"
    attention, mlp = f"{here}.self_attention", f"{here}.mlp"

    def place(module: str, *ops: str, end: End = "output", access: Access = FIRST) -> Place:
        sites = tuple(f"{name}.{op}" for op in ops)
        layout = of_outputs(sites, shape, tp)
        return Place(sites=sites, module=module, end=end, access=access, layout=layout)

    def norm(module: str, op: str, linear: str) -> Place:
        if not te:
            return place(module, op)
        sites, weight = (f"{name}.{op}",), "layer_norm_weight"
        return Place(sites=sites, module=linear, weight=weight, unexposed=FUSED)

    yield norm(f"{here}.input_layernorm", "attn_norm", f"{attention}.linear_qkv")
    if shape.latent:
        yield from latent_places(i, shape, tp, kernels)
    else:
        qkv = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        grouped = grouped_qkv(shape, tp, qkv)
        yield Place(sites=qkv, module=f"{attention}.linear_qkv", layout=grouped)
        if shape.has("q_norm"):
            yield place(f"{attention}.q_layernorm", "q_norm")
            yield place(f"{attention}.k_layernorm", "k_norm")
        yield place(attention, "q_rope", end="rope")
        yield place(attention, "k_rope", end="rope")
        yield place(f"{attention}.linear_proj", "attn", end="input")
        yield place(f"{attention}.linear_proj", "o_proj", access=WITH_BIAS)
    yield place(f"{here}.pre_mlp_layernorm", "attn_residual", end="input")
    yield norm(f"{here}.pre_mlp_layernorm", "mlp_norm", f"{mlp}.linear_fc1")
    if i in shape.sparse_layers:
        yield from sparse_places(name, mlp, kernels)
        if shape.shared_intermediate:
            shared, hidden = f"{mlp}.shared_experts", ("shared_gate_proj", "shared_up_proj")
            yield place(f"{shared}.linear_fc1", *hidden, access=WITH_BIAS)
            yield place(f"{shared}.linear_fc2", "shared_act", end="input")
            yield place(f"{shared}.linear_fc2", "shared_down_proj", access=WITH_BIAS)
        yield place(here, "mlp_residual")
        return
    yield place(f"{mlp}.linear_fc1", "gate_proj", "up_proj", access=WITH_BIAS)
    yield place(f"{mlp}.linear_fc2", "act", end="input")
    yield place(f"{mlp}.linear_fc2", "down_proj", access=WITH_BIAS)
    yield place(here, "mlp_residual")
