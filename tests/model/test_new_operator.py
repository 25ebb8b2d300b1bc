"""An imaginary operator in an imaginary family needs one record and one entry."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from synthetic import Values, compared, write_trace
from tiny import BATCH, Engine, checkpoint, live_weights

from rlk_align.judge.verdict import Verdict, judge_by, over_budget
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.families import FAMILIES
from rlk_align.model.family import Family
from rlk_align.model.layers import dense
from rlk_align.model.operators import OPERATORS, WHOLE, Operator
from rlk_align.model.shape import ModelShape, read_shape
from rlk_align.model.sites import model_sites
from rlk_align.probe.referee.referee import referee

NEW = "layers.1.branch_norm"


def sandwich(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """A dense layer that, from the second layer on, norms the attention's branch."""
    operators = dense()(shape, layer)
    at = operators.index("attn_residual")
    return (*operators[:at], *(("branch_norm",) if layer else ()), *operators[at:])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    record = Operator(
        *("branch_norm", "reduction", "rms_norm", "attn", ("branch",), "branch", "hidden", WHOLE),
        weight=("hidden",),
        module="self_attn.branch_norm",
    )
    monkeypatch.setitem(OPERATORS, record.name, record)
    monkeypatch.setitem(FAMILIES, "sandwich", Family(layer=sandwich))
    monkeypatch.setitem(tiny.CONFIGS, "sandwich", {"model_type": "sandwich"})
    return checkpoint(tmp_path / "model", "sandwich")


Compare = Callable[[Values, Values], Verdict]


@pytest.fixture
def compare(model: Path, tmp_path: Path) -> Compare:
    def run(*sides: Values) -> Verdict:
        record = {
            "model": str(model),
            "shape": read_shape(model),
            "attributes": {"temperature": 1.0},
        }
        traces = [
            write_trace(
                tmp_path / side,
                values,
                record=record,
                batch=BATCH,
                sites=Engine(model).sites,
                controls=("untapped",),
                weights=live_weights(model),
            )
            for side, values in zip(("rollout", "train"), sides, strict=True)
        ]
        comparison = compared(*traces, allowed=("attributes",))
        units = referee(comparison, *traces, lambda *_: None)
        return judge_by(comparison.model_copy(update={"referee": units}), "bf16")

    return run


def test_it_stands_in_the_graph_of_the_layers_that_have_it(model: Path) -> None:
    sites = {s.name: s for s in model_sites(read_shape(model))}
    assert "layers.0.branch_norm" not in sites
    assert (sites[NEW].inputs, sites[NEW].features) == (("layers.1.o_proj",), 40)
    assert sites["layers.0.attn_residual"].inputs == ("embed", "layers.0.o_proj")
    assert sites["layers.1.attn_residual"].inputs == ("layers.0.mlp_residual", NEW)
    assert tensor_name(NEW) == "model.layers.1.self_attn.branch_norm.weight"
    assert tensor_name(NEW) in {f"model.{name}" for name in Engine(model).weights}


def test_two_healthy_engines_pass(model: Path, compare: Compare) -> None:
    verdict = compare(Engine(model).values(), Engine(model, norm_twice=True).values())
    edge, *_ = verdict.comparison.edges
    assert over_budget(verdict, edge) == []
    assert edge.paired_rows == edge.expected_rows > 0
    assert {u.side for u in verdict.comparison.referee if u.site == NEW and u.errors} == {
        *("rollout", "train")
    }


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_a_fault_in_it_is_named(model: Path, compare: Compare, side: str) -> None:
    def scaled(exact: np.ndarray, _seen: object) -> np.ndarray:
        return exact * 1.02

    healthy, faulty = Engine(model).values(), Engine(model).values({NEW: scaled})
    verdict = compare(*((faulty, healthy) if side == "rollout" else (healthy, faulty)))
    edge, *_ = verdict.comparison.edges
    (found,) = over_budget(verdict, edge)
    assert (found.unit.site, found.side) == (NEW, side)
    # The built-in contract has no budget for the operator, so that of its class applies.
    (limit,) = {b.limit for b in verdict.breaches if b.site == NEW and "rounding" in b.metric}
    assert limit == "rounding-norms"
