"""Fuses norms with the operators around them in a compiled model.

vLLM's layers call each operator by itself, which a tap sees without compilation. A pass over the
compiler's graph, through vLLM's own extension point, replaces some of them by operators that have
the same bits and fewer launches; a step beyond the largest CUDA graph has hundreds of launches.

    rope(rms_norm(q), rms_norm(k))                norm_rope
    rms_norm(rms_norm(x), residual=residual)      norm_add_norm
"""

import operator
from collections.abc import Callable

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.sources import sources_digest

KEY = "post_grad_custom_post_pass"
"""The key of the pass in `inductor_compile_config`."""
TRACED = "eager_input_vals"
"""The key of an operator's traced arguments in a node's meta."""
RLK = torch.ops.rlk
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
}


class NormFusionPass(InductorPass):
    """Fuses a norm with its only reader: a rotation of q and k, or the norm of its sum with a
    residual."""

    def __call__(self, graph: fx.Graph) -> None:
        for rope in graph.find_nodes(op="call_function", target=RLK.rope.default):
            fuse_rope(graph, rope)
        for norm in graph.find_nodes(op="call_function", target=RLK.rms_norm.default):
            fuse_norm(graph, norm)

    def uuid(self) -> str:
        """The key of compiled graphs, which depend on the functions and operators here too."""
        return sources_digest()


def fuse_rope(graph: fx.Graph, rope: fx.Node) -> bool:
    """Fuses a rotation with the norms before it; returns False if that is impossible."""
    q, k, *_, sign, _table, _interleaved, backend = rope.args
    q_norm, k_norm = _norm_of(q), _norm_of(k)
    if q_norm is None or k_norm is None or sign != 1.0:
        return False
    how = q_norm.args[3:]
    if k_norm.args[3:] != how or how[-1] != backend:
        return False
    _replace(graph, RLK.norm_rope.default, (q_norm, k_norm, rope), _norm_rope_arguments)
    return True


def fuse_norm(graph: fx.Graph, norm: fx.Node) -> bool:
    """Fuses the norm of a sum with the norm of its first term; returns False if that is
    impossible."""
    x, residual, _, *how = norm.args
    branch = None if residual is None else _norm_of(x)
    if branch is None or list(branch.args[3:]) != how:
        return False
    _replace(graph, RLK.norm_add_norm.default, (branch, norm), _norm_add_norm_arguments)
    return True


def _norm_rope_arguments(q_norm: tuple, k_norm: tuple, rope: tuple) -> tuple:
    """The arguments of norm_rope, from the arguments of the two norms and the rotation."""
    _, _, positions, inv_freq, scaling, theta, rotary_dim, _sign, *rest = rope
    q, _, q_weight, eps, hf, one_plus, _backend = q_norm
    k, _, k_weight, *_ = k_norm
    turns = positions, inv_freq, scaling
    return q, k, q_weight, k_weight, *turns, eps, hf, one_plus, theta, rotary_dim, *rest


def _norm_add_norm_arguments(branch: tuple, norm: tuple) -> tuple:
    """The arguments of norm_add_norm, from the arguments of the two norms."""
    x, _, branch_weight, *_ = branch
    _, residual, weight, *how = norm
    return x, residual, branch_weight, weight, *how


def _replace(
    graph: fx.Graph, target: Callable, nodes: tuple[fx.Node, ...], arguments: Callable
) -> None:
    """Replaces the last of the nodes by a call of `target`, which computes them all. `arguments`:
    the arguments of `target`, from those of each node."""
    last = nodes[-1]
    with graph.inserting_before(last):
        fused = graph.call_function(target, arguments(*(node.args for node in nodes)))
    fused.meta = dict(last.meta)
    # From the traced arguments the compiler knows the strides that the operator requires.
    traced = [fused.meta.pop(TRACED, None), *(node.meta.get(TRACED) for node in nodes)]
    if None not in traced:
        fused.meta[TRACED] = (arguments(*(args for args, _ in traced[1:])), {})
    last.replace_all_uses_with(fused)
    graph.erase_node(last)


def _norm_of(x: fx.Node) -> fx.Node | None:
    """The norm without a residual that computes x, in x's shape; None if there is none, or if x has
    another reader."""
    y = x
    while y.target in _VIEWS and len(y.users) == 1:
        y = y.args[0]
    if y.target is not operator.getitem or y.args[1] != 0 or len(y.users) != 1:
        return None
    norm = y.args[0]
    if norm.target != RLK.rms_norm.default or norm.args[1] is not None:
        return None
    return norm if _shape(norm.args[0]) == _shape(x) else None


def _shape(x: fx.Node) -> tuple[str, ...]:
    return tuple(map(str, x.meta["val"].shape))


def add_pass(inductor_config: dict) -> None:
    """Makes the compiler run the pass. Raises NotSupported if another pass is set."""
    if not isinstance(inductor_config.get(KEY), NormFusionPass | None):
        raise NotSupported(
            f"inductor_compile_config already has a {KEY}, which the kernels need to set"
        )
    inductor_config[KEY] = NormFusionPass()
