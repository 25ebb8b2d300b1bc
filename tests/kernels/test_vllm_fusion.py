"""What of a compiled model's graph becomes `norm_rope`, and what does not."""

import operator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.vllm import fusion

RLK = torch.ops.rlk
HEADS = {"q": 4, "k": 2}


def graph_of(**change: Any) -> torch.fx.Graph:
    """q and k[3, H, 8] normed, seen as rows and as heads again, and rotated; `change`: what is
    otherwise."""
    graph, rotated, traced = torch.fx.Graph(), [], []
    turns = [graph.placeholder(name) for name in ("positions", "inv_freq", "scaling")]
    for name, heads in HEADS.items():
        x, weight = graph.placeholder(name), graph.placeholder(f"{name}_weight")
        x.meta["val"] = torch.empty(3, heads, 8)
        residual = x if change.get("residual") == name else None
        eps = change.get(f"{name}_eps", 1e-6)
        norm = graph.call_function(
            RLK.rms_norm.default, (x, residual, weight, eps, False, change.get("backend", "torch"))
        )
        norm.meta["eager_input_vals"] = ((f"traced {name}", None, "w", eps, False, "torch"), {})
        y = graph.call_function(operator.getitem, (norm, 0))
        if change.get("read") == name:
            traced.append(y)
        y = graph.call_function(torch.ops.aten.view.default, (y, [3, heads * 8]))
        y = graph.call_function(torch.ops.aten.view.default, (y, [3, heads, 8]))
        y.meta["val"] = torch.empty(3, heads, 8)
        rotated.append(y)
    sign = change.get("sign", 1.0)
    rest = (0.0, 8, sign, torch.float32, False, "torch")
    rope = graph.call_function(RLK.rope.default, (*rotated, *turns, *rest))
    rope.meta["eager_input_vals"] = (("q'", "k'", "p", "f", "s", *rest), {})
    graph.output((graph.call_function(operator.getitem, (rope, 0)), *traced))
    return graph


def targets(graph: torch.fx.Graph) -> set[Any]:
    graph.eliminate_dead_code()
    return {node.target for node in graph.nodes if node.op == "call_function"}


def test_norms_and_rotation_become_one_operator_with_the_arguments_of_all() -> None:
    graph = graph_of()
    fusion.NormRopePass()(graph)
    assert targets(graph) == {RLK.norm_rope.default, operator.getitem}
    (node,) = graph.find_nodes(op="call_function", target=RLK.norm_rope.default)
    names = [str(x) for x in node.args[:7]]
    assert names == ["q", "k", "q_weight", "k_weight", "positions", "inv_freq", "scaling"]
    assert node.args[7:] == (1e-6, False, 0.0, 8, torch.float32, False, "torch")
    traced, _ = node.meta["eager_input_vals"]
    assert traced[:7] == ("traced q", "traced k", "w", "w", "p", "f", "s")
    assert len(traced) == len(node.args)


@pytest.mark.parametrize(
    "change",
    [{"read": "q"}, {"residual": "k"}, {"k_eps": 1e-5}, {"sign": -1.0}, {"backend": "triton"}],
    ids=lambda change: next(iter(change)),
)
def test_what_another_reads_or_computes_otherwise_stays(change: dict[str, Any]) -> None:
    graph = graph_of(**change)
    fusion.NormRopePass()(graph)
    assert RLK.rope.default in targets(graph)
    assert RLK.norm_rope.default not in targets(graph)


def test_a_pass_of_the_users_own_is_not_put_aside() -> None:
    config: dict[str, Any] = {}
    fusion.add_pass(config)
    fusion.add_pass(config)
    config[fusion.KEY] = print
    with pytest.raises(NotSupported, match="post_grad_custom_post_pass"):
        fusion.add_pass(config)
