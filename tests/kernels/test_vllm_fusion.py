"""What of a compiled model's graph becomes `norm_rope` or `norm_add_norm`, and what does not."""

import operator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.vllm import fusion
from rlk_kernels.sources import sources_digest

RLK = torch.ops.rlk
HEADS = {"q": 4, "k": 2}
VIEW = torch.ops.aten.view.default


def normed(graph: torch.fx.Graph, name: str, x: Any, residual: Any, /, **change: Any) -> Any:
    """The node of a norm of x, and the traced arguments of which the compiler knows strides."""
    weight, eps = graph.placeholder(f"{name}_weight"), change.get(f"{name}_eps", 1e-6)
    how = eps, False, change.get(f"{name}_one_plus", True), change.get("backend", "torch")
    norm = graph.call_function(RLK.rms_norm.default, (x, residual, weight, *how))
    traced = None if residual is None else "traced residual"
    norm.meta["eager_input_vals"] = ((f"traced {name}", traced, f"w {name}", *how), {})
    return norm


def first_of(graph: torch.fx.Graph, node: Any, *shape: int) -> Any:
    """The node of the first result, of a shape."""
    y = graph.call_function(operator.getitem, (node, 0))
    y.meta["val"] = torch.empty(shape)
    return y


def seen_as(graph: torch.fx.Graph, x: Any, *shape: int) -> Any:
    y = graph.call_function(VIEW, (x, list(shape)))
    y.meta["val"] = torch.empty(shape)
    return y


def given(graph: torch.fx.Graph, name: str, *shape: int) -> Any:
    x = graph.placeholder(name)
    x.meta["val"] = torch.empty(shape)
    return x


def rotated_graph(**change: Any) -> torch.fx.Graph:
    """q and k[3, H, 8] normed, seen as rows and as heads again, and rotated; `change`: what is
    otherwise."""
    graph, rotated, read = torch.fx.Graph(), [], []
    turns = [graph.placeholder(name) for name in ("positions", "inv_freq", "scaling")]
    for name, heads in HEADS.items():
        x = given(graph, name, 3, heads, 8)
        residual = x if change.get("residual") == name else None
        y = first_of(graph, normed(graph, name, x, residual, **change), 3, heads, 8)
        if change.get("read") == name:
            read.append(y)
        rotated.append(seen_as(graph, seen_as(graph, y, 3, heads * 8), 3, heads, 8))
    sign = change.get("sign", 1.0)
    rest = (0.0, 8, sign, torch.float32, False, "torch")
    rope = graph.call_function(RLK.rope.default, (*rotated, *turns, *rest))
    rope.meta["eager_input_vals"] = (("q'", "k'", "p", "f", "s", *rest), {})
    graph.output((graph.call_function(operator.getitem, (rope, 0)), *read))
    return graph


def branch_graph(**change: Any) -> torch.fx.Graph:
    """x[3, 8] normed, added to a residual and normed; `change`: what is otherwise."""
    graph = torch.fx.Graph()
    x = given(graph, "x", *change.get("shape", (3, 8)))
    stream = given(graph, "stream", 3, 8)
    before = stream if change.get("before") else None
    y = first_of(graph, normed(graph, "branch", x, before, **change), *x.meta["val"].shape)
    rows = seen_as(graph, y, 3, 8)
    residual = None if change.get("residual") == "none" else stream
    how = {**change, "backend": change.get("other_backend", "torch")}
    norm = normed(graph, "norm", rows, residual, **how)
    outputs = [graph.call_function(operator.getitem, (norm, i)) for i in range(2)]
    graph.output((*outputs, *([y] if change.get("read") else [])))
    return graph


def targets(graph: torch.fx.Graph) -> set[Any]:
    graph.eliminate_dead_code()
    return {node.target for node in graph.nodes if node.op == "call_function"}


def test_norms_and_rotation_become_one_operator_with_the_arguments_of_all() -> None:
    graph = rotated_graph()
    fusion.NormFusionPass()(graph)
    assert targets(graph) == {RLK.norm_rope.default, operator.getitem}
    (node,) = graph.find_nodes(op="call_function", target=RLK.norm_rope.default)
    names = [str(x) for x in node.args[:7]]
    assert names == ["q", "k", "q_weight", "k_weight", "positions", "inv_freq", "scaling"]
    assert node.args[7:] == (1e-6, False, True, 0.0, 8, torch.float32, False, "torch")
    traced, _ = node.meta["eager_input_vals"]
    assert traced[:7] == ("traced q", "traced k", "w q", "w k", "p", "f", "s")
    assert len(traced) == len(node.args)


@pytest.mark.parametrize(
    "change",
    [
        {"read": "q"}, {"residual": "k"}, {"k_eps": 1e-5}, {"sign": -1.0}, {"backend": "triton"},
        {"q_one_plus": False},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_another_reads_or_computes_otherwise_stays(change: dict[str, Any]) -> None:
    graph = rotated_graph(**change)
    fusion.NormFusionPass()(graph)
    assert RLK.rope.default in targets(graph)
    assert RLK.norm_rope.default not in targets(graph)


def test_norms_around_a_residual_become_one_operator_with_the_arguments_of_both() -> None:
    graph = branch_graph()
    fusion.NormFusionPass()(graph)
    assert targets(graph) == {RLK.norm_add_norm.default, operator.getitem}
    (node,) = graph.find_nodes(op="call_function", target=RLK.norm_add_norm.default)
    assert [str(x) for x in node.args[:4]] == ["x", "stream", "branch_weight", "norm_weight"]
    assert node.args[4:] == (1e-6, False, True, "torch")
    traced, _ = node.meta["eager_input_vals"]
    assert traced == ("traced branch", "traced residual", "w branch", "w norm", *node.args[4:])


def test_strides_are_left_to_the_compiler_where_a_norm_was_not_traced() -> None:
    graph = branch_graph()
    branch, _ = graph.find_nodes(op="call_function", target=RLK.rms_norm.default)
    del branch.meta["eager_input_vals"]
    fusion.NormFusionPass()(graph)
    (node,) = graph.find_nodes(op="call_function", target=RLK.norm_add_norm.default)
    assert "eager_input_vals" not in node.meta


@pytest.mark.parametrize(
    "change",
    [
        {"read": True}, {"residual": "none"}, {"before": True}, {"branch_eps": 1e-5},
        {"branch_one_plus": False}, {"other_backend": "triton"}, {"shape": (3, 2, 4)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_norms_stay_where_they_are_not_around_one_residual(change: dict[str, Any]) -> None:
    graph = branch_graph(**change)
    fusion.NormFusionPass()(graph)
    assert RLK.norm_add_norm.default not in targets(graph)
    assert len(graph.find_nodes(op="call_function", target=RLK.rms_norm.default)) == 2


def test_norms_of_several_branches_each_become_one_operator() -> None:
    """The sum of one is the residual of the next."""
    graph = torch.fx.Graph()
    x, stream = given(graph, "x", 3, 8), given(graph, "stream", 3, 8)
    for layer in "abc":
        branch = first_of(graph, normed(graph, f"{layer}_branch", x, None), 3, 8)
        norm = normed(graph, layer, branch, stream)
        x, stream = (graph.call_function(operator.getitem, (norm, i)) for i in range(2))
        x.meta["val"] = stream.meta["val"] = torch.empty(3, 8)
    graph.output((x, stream))
    fusion.NormFusionPass()(graph)
    assert targets(graph) == {RLK.norm_add_norm.default, operator.getitem}
    first, second, third = graph.find_nodes(op="call_function", target=RLK.norm_add_norm.default)
    assert [node.args[1].args for node in (second, third)] == [(first, 1), (second, 1)]


def test_compiled_code_is_loaded_for_the_same_sources_alone() -> None:
    assert fusion.NormFusionPass().uuid() == sources_digest()


def test_a_pass_of_the_users_own_is_not_put_aside() -> None:
    config: dict[str, Any] = {}
    fusion.add_pass(config)
    fusion.add_pass(config)
    config[fusion.KEY] = print
    with pytest.raises(NotSupported, match="post_grad_custom_post_pass"):
        fusion.add_pass(config)
