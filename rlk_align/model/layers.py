"""The operators of a layer, in the orders that families have."""

from collections.abc import Callable
from typing import Literal, Protocol

from rlk_align.model.operators import OPERATORS


class LayerShape(Protocol):
    """The properties of a model that decide the operators of a layer."""

    @property
    def sparse_layers(self) -> tuple[int, ...]: ...

    @property
    def unrotated_layers(self) -> tuple[int, ...]: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def delta_layers(self) -> tuple[int, ...]: ...

    @property
    def mlp_layers(self) -> tuple[int, ...]: ...

    @property
    def scan_norm(self) -> bool: ...

    @property
    def wide_layers(self) -> tuple[int, ...]: ...

    @property
    def keys_are_values(self) -> bool: ...

    @property
    def query_latent(self) -> int: ...


LayerOperators = Callable[[LayerShape, int], tuple[str, ...]]
"""(shape, index of a layer) -> that layer's operators, in execution order."""


def dense(qk_norm: bool = False, wide: bool = False) -> LayerOperators:
    """Equal layers; `qk_norm`: with an RMSNorm on each head of q and k before they are rotated;
    `wide`: with one over all heads of q, and one over all heads of k."""
    norms = ("q_norm", "k_norm") if qk_norm else ("wide_q_norm", "wide_k_norm") if wide else ()
    operators = (
        *("attn_norm", "q_proj", "k_proj", "v_proj", *norms),
        *("q_rope", "k_rope", "attn", "o_proj", "attn_residual"),
        *("mlp_norm", "gate_proj", "up_proj", "act", "down_proj", "mlp_residual"),
    )
    return lambda _shape, _layer: operators


DENSE = dense()


_SHARED = ("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj")


def mixture(
    qk_norm: bool = False,
    wide: bool = False,
    routing: tuple[str, str, str] = ("router", "experts", "routing_weights"),
    shared: Literal["", "added", "gated"] = "",
) -> LayerOperators:
    """Dense layers, and sparse layers in which a router sends each token to a few experts.

    `qk_norm`, `wide`: as for `dense`; `routing`: the router, its choice, and the weights; `shared`:
    whether the row of shared experts is added, or multiplied by the sigmoid of a gate first."""
    dense_layer = dense(qk_norm, wide)
    out = {
        "": ("moe_out",),
        "added": (*_SHARED, "moe_out_with_shared"),
        "gated": (*_SHARED, "shared_gate", "moe_out_gated"),
    }[shared]

    def operators(shape: LayerShape, layer: int) -> tuple[str, ...]:
        every = dense_layer(shape, layer)
        if layer not in shape.sparse_layers:
            return every
        return (
            *every[: every.index("gate_proj")],
            *(*routing, "expert_gate_proj", "expert_up_proj", "expert_act", "expert_down_proj"),
            *(*out, "mlp_residual"),
        )

    return operators


def corrected_mixture(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Dense layers, and sparse layers with shared experts, whose router computes in float32 and
    corrects its scores for the choice of experts only."""
    routing = ("fp32_router", "corrected_experts", "fp32_routing_weights")
    return mixture(shape.qk_norm, routing=routing, shared="added")(shape, layer)


_SINKS = {"attn": "sink_attn", "router": "biased_router", "expert_act": "clamped_expert_act"}


def with_sinks(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Sparse layers whose attention has sinks, whose router has a bias, and whose experts clamp
    what they activate."""
    return tuple(_SINKS.get(op, op) for op in mixture()(shape, layer))


def normed_after(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers whose branches read the residual stream itself and are normed before they are added
    to it, with an RMSNorm over all heads of q and of k."""
    return (
        *("q_proj", "k_proj", "v_proj", "wide_q_norm", "wide_k_norm", "q_rope", "k_rope", "attn"),
        *("o_proj", "attn_post_norm", "attn_residual"),
        *("gate_proj", "up_proj", "act", "down_proj", "mlp_post_norm", "mlp_residual"),
    )


def plain_sandwich(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers that norm each branch before and after its operators."""
    return _sandwiched(DENSE(shape, layer))


def sandwich(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers that norm each branch before and after its operators, and each head of q and k."""
    return _sandwiched(dense(qk_norm=True)(shape, layer))


def values_normed(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers that norm each branch before and after its operators, and each head of q, k and v, and
    that multiply the residual stream in the end. In some of them v is k before its norm."""
    of_keys = shape.keys_are_values and layer in shape.wide_layers
    replaced = {
        "v_proj": ("key_v_norm",) if of_keys else ("v_proj", "v_norm"),
        "mlp_residual": ("rescaled_mlp_residual",),
    }
    return sum((replaced.get(op, (op,)) for op in sandwich(shape, layer)), ())


def _sandwiched(every: tuple[str, ...]) -> tuple[str, ...]:
    at, end = every.index("attn_residual"), every.index("mlp_residual")
    return (*every[:at], "attn_post_norm", *every[at:end], "mlp_post_norm", *every[end:])


def scaled_residuals(layers: LayerOperators = DENSE) -> LayerOperators:
    """Layers that multiply each branch before it is added to the residual stream."""
    return lambda shape, layer: tuple(
        f"scaled_{op}" if op.endswith("residual") else op for op in layers(shape, layer)
    )


def normed_after_by_head(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers whose branches are normed before they are added, with an RMSNorm on each head of q and
    k, and of which some do not rotate q and k."""
    absent = {"attn_norm", "mlp_norm"}
    absent |= {"q_rope", "k_rope"} if layer in shape.unrotated_layers else set()
    return tuple(op for op in sandwich(shape, layer) if op not in absent)


def ungated(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers with an MLP that has no gate."""
    every = (op for op in DENSE(shape, layer) if op != "gate_proj")
    return tuple("plain_act" if op == "act" else op for op in every)


def layer_normed(layers: LayerOperators = DENSE) -> LayerOperators:
    """Layers with LayerNorms in place of RMSNorms."""
    replaced = {"attn_norm": "attn_layer_norm", "mlp_norm": "mlp_layer_norm"}
    return lambda shape, layer: tuple(replaced.get(op, op) for op in layers(shape, layer))


def parallel(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers whose attention and MLP read one LayerNorm and are added together; some do not rotate
    q and k."""
    replaced = {
        **{"attn_norm": "attn_layer_norm", "down_proj": "parallel_down_proj"},
        "mlp_residual": "parallel_residual",
    }
    absent = ("mlp_norm", "attn_residual")
    every = partly_rotated()(shape, layer)
    return tuple(replaced.get(op, op) for op in every if op not in absent)


def normed_after_rotation(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Dense layers with an RMSNorm on each head of q and k after they are rotated."""
    every = DENSE(shape, layer)
    at = every.index("attn")
    return (*every[:at], "rotated_q_norm", "rotated_k_norm", *every[at:])


def partly_rotated(layers: LayerOperators = DENSE) -> LayerOperators:
    """Layers, in some of which q and k are not rotated (NoPE). `layers`: those to change."""

    def operators(shape: LayerShape, layer: int) -> tuple[str, ...]:
        rotations = ("q_rope", "k_rope") if layer in shape.unrotated_layers else ()
        return tuple(op for op in layers(shape, layer) if op not in rotations)

    return operators


def beside_shared_expert(layers: LayerOperators) -> LayerOperators:
    """Layers that add the row of a shared expert, which is beside the block of experts, to the sum
    of the block, and multiply both before they are added to the residual stream. `layers`: those
    to change, of which the sparse ones have the block alone."""

    def operators(shape: LayerShape, layer: int) -> tuple[str, ...]:
        every = layers(shape, layer)
        if layer not in shape.sparse_layers:
            return every
        return (*every[:-1], *_SHARED, "shared_mlp_residual")

    return operators


_GATED = {"q_proj": "gated_q_proj", "q_norm": "gated_q_norm"}
_DELTA_NET = (
    *("qkv_in", "z", "b", "a", "conv", "decay", "beta", "delta", "gated_norm", "out_proj"),
)


def hybrid(layers: LayerOperators) -> LayerOperators:
    """Layers with a gated delta net in place of attention, and layers whose attention has a gate
    for each feature of its output. `layers`: those with norms of heads of q and k to change."""

    def operators(shape: LayerShape, layer: int) -> tuple[str, ...]:
        every = layers(shape, layer)
        if layer in shape.delta_layers:
            end = every.index("attn_residual")
            return (*every[: every.index("q_proj")], *_DELTA_NET, *every[end:])
        at = every.index("o_proj")
        return tuple(_GATED.get(op, op) for op in (*every[:at], "attn_gate", *every[at:]))

    return operators


_STATE_SPACE = ("z", "xbc_in", "dt_in", "conv", "dt", "dt_a", "scan", "mamba_norm", "out_proj")


def state_space(layers: LayerOperators) -> LayerOperators:
    """Layers with a state-space model (Mamba-2) in place of attention, and layers with attention.
    `layers`: those to change."""

    def operators(shape: LayerShape, layer: int) -> tuple[str, ...]:
        every = layers(shape, layer)
        if layer not in shape.delta_layers:
            return every
        at = every.index("q_proj")
        end = next(i for i, op in enumerate(every) if OPERATORS[op].site == "attn_residual")
        return (*every[:at], *_STATE_SPACE, *every[end:])

    return operators


def beside_state_space(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers with a state-space model beside attention, which read one norm and are added together.
    A norm may follow the gate of the scan."""
    every = DENSE(shape, layer)
    replaced = {"out_proj": "parallel_out_proj"}
    replaced |= {} if shape.scan_norm else {"mamba_norm": "mamba_gate"}
    start, end = every.index("q_proj"), every.index("attn_residual")
    beside = (replaced.get(op, op) for op in _STATE_SPACE)
    return (
        *(*every[:start], *beside, *every[start:end]),
        *("two_branch_residual", *every[end + 1 :]),
    )


def one_part(shape: LayerShape, layer: int) -> tuple[str, ...]:
    """Layers with one part each: a state-space model, an attention, of which some do not rotate q
    and k, or an MLP without a gate."""
    every = state_space(partly_rotated())(shape, layer)
    at = every.index("mlp_norm")
    if layer not in shape.mlp_layers:
        return every[:at]
    return tuple("plain_act" if op == "act" else op for op in every[at:] if op != "gate_proj")


_FROM_LATENTS = (
    *("kv_a", "kv_a_norm", "latent_q_rope", "latent_k_rope", "latent_attn", "latent_o_proj"),
)


def latent(layers: LayerOperators) -> LayerOperators:
    """Layers whose keys and values are computed from a latent, but for one rotated key that all
    heads share; the queries from a latent of their own or, if they have none, from the stream.
    `layers`: those to change."""

    def operators(shape: LayerShape, layer: int) -> tuple[str, ...]:
        every = layers(shape, layer)
        start, end = every.index("q_proj"), every.index("attn_residual")
        queries = ("q_a", "q_a_norm", "q_b") if shape.query_latent else ("latent_q_proj",)
        return (*every[:start], *queries, *_FROM_LATENTS, *every[end:])

    return operators
