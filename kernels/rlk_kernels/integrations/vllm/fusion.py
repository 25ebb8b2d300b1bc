"""Fuses the norms of queries and keys and their rotation into one operator in a compiled model.

vLLM's layers call three operators, which a tap sees without compilation. A pass over the compiler's
graph, through vLLM's own extension point, replaces them by `norm_rope`, which has the same bits and
fewer launches; a step beyond the largest CUDA graph has hundreds of launches.
"""

import operator

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

from rlk_kernels.integrations.errors import NotSupported

KEY = "post_grad_custom_post_pass"
"""The key of the pass in `inductor_compile_config`."""
TRACED = "eager_input_vals"
"""The key of an operator's traced arguments in a node's meta."""
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
}


class NormRopePass(InductorPass):
    """Fuses rope(rms_norm(q), rms_norm(k)) if no other operator reads the norms."""

    def __call__(self, graph: fx.Graph) -> None:
        for rope in graph.find_nodes(op="call_function", target=torch.ops.rlk.rope.default):
            fuse(graph, rope)


def fuse(graph: fx.Graph, rope: fx.Node) -> bool:
    """Fuses a rotation with the norms before it; returns False if that is impossible."""
    q, k, *_, sign, _table, _interleaved, backend = rope.args
    norms = [norm for x in (q, k) if (norm := _norm_of(x)) is not None]
    if len(norms) < 2 or sign != 1.0:
        return False
    (x_q, _, _, *q_how), (x_k, _, _, *k_how) = (norm.args for norm in norms)
    if q_how != k_how or q_how[-1] != backend:
        return False
    if any(_shape(a) != _shape(b) for a, b in ((x_q, q), (x_k, k))):
        return False
    with graph.inserting_before(rope):
        both = graph.call_function(
            torch.ops.rlk.norm_rope.default, _arguments(*(n.args for n in (*norms, rope)))
        )
    both.meta = dict(rope.meta)
    # From the traced arguments the compiler knows the strides that the operator requires.
    traced = [n.meta.get(TRACED) for n in (*norms, rope)]
    if None not in traced:
        both.meta[TRACED] = (_arguments(*(args for args, _ in traced)), {})
    rope.replace_all_uses_with(both)
    graph.erase_node(rope)
    return True


def _arguments(q_norm: tuple, k_norm: tuple, rope: tuple) -> tuple:
    """The arguments of norm_rope, from the arguments of the two norms and the rotation."""
    _, _, positions, inv_freq, scaling, theta, rotary_dim, _sign, *rest = rope
    q, _, q_weight, eps, hf, _backend = q_norm
    k, _, k_weight, *_ = k_norm
    turns = positions, inv_freq, scaling
    return q, k, q_weight, k_weight, *turns, eps, hf, theta, rotary_dim, *rest


def _norm_of(x: fx.Node) -> fx.Node | None:
    """The norm without a residual that computes x; None if there is none, or if x has another
    reader."""
    while x.target in _VIEWS and len(x.users) == 1:
        x = x.args[0]
    if x.target is not operator.getitem or x.args[1] != 0 or len(x.users) != 1:
        return None
    norm = x.args[0]
    return norm if norm.target == torch.ops.rlk.rms_norm.default and norm.args[1] is None else None


def _shape(x: fx.Node) -> tuple[str, ...]:
    return tuple(map(str, x.meta["val"].shape))


def add_pass(inductor_config: dict) -> None:
    """Makes the compiler run the pass. Raises NotSupported if another pass is set."""
    if not isinstance(inductor_config.get(KEY), NormRopePass | None):
        raise NotSupported(
            f"inductor_compile_config already has a {KEY}, which the kernels need to set"
        )
    inductor_config[KEY] = NormRopePass()
