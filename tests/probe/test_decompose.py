"""The units of simulated engines, whose outputs are known for all inputs."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import FUSED, INDEX, SITES, Values, graft, run, write

from rlk_align.probe.decompose import decompose
from rlk_align.probe.exact_difference import split_difference
from rlk_align.probe.graft import GraftedEdge
from rlk_align.probe.unit_record import Unit
from rlk_align.trace.values import RecordedRows


def units(edge: GraftedEdge) -> dict[str, Unit]:
    return {u.name: u for u in decompose(edge, lambda *_: None)}


def introducers(found: dict[str, Unit]) -> set[str]:
    return {name for name, u in found.items() if u.label == "introducer"}


def scaled(by: float) -> "partial[torch.Tensor]":
    return partial(torch.mul, torch.tensor(by, dtype=torch.float64))


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    wrong=st.dictionaries(st.sampled_from(list(SITES)), st.sampled_from([0.5, 1.1]), max_size=4),
    data=st.data(),
)
def test_random_units_and_inputs(
    seed: int, dtype: torch.dtype, wrong: dict[str, float], data: st.DataObject, tmp_path_factory
) -> None:
    """The units with a fault are the introducers, whichever side has it, and no others; and at each
    element introduced and inherited add up."""
    sides = {name: data.draw(st.booleans()) for name in wrong}
    faults = [
        {n: scaled(f) for n, f in wrong.items() if sides[n] == side} for side in (True, False)
    ]
    first, second = (lambda given, f=f: run(seed, dtype, f, given) for f in faults)
    edge = graft(tmp_path_factory.mktemp("edge"), first, second)
    by_site = units(edge)
    assert introducers(by_site) == set(wrong)
    assert all(u.label != "undetermined" and not u.orders[0].left_out for u in by_site.values())
    values = [
        RecordedRows(p, INDEX)
        for p in (
            edge.first.captured,
            edge.second.cross_grafted,
            edge.second.captured,
            edge.first.cross_grafted,
        )
    ]
    for name, site in SITES.items():
        rows = np.flatnonzero(INDEX.expected(site, decode=False))
        a_a, b_a, b_b, a_b = (v.values(name, rows) for v in values)
        for one, two, three, sign in ((a_a, b_a, b_b, 1), (b_b, a_b, a_a, -1)):
            introduced, inherited, errors = split_difference(one, two, three)
            assert (errors == 0).all()
            assert torch.equal(introduced + inherited, sign * (a_a.double() - b_b.double()))
        forward, backward = by_site[name].orders
        assert forward.splits[0].introduced.max_abs == float((a_a.double() - b_a).abs().max())
        assert backward.splits[0].inherited.max_abs == float((a_a.double() - a_b).abs().max())


def test_a_fault_that_only_some_inputs_show_is_found_in_the_other_order(tmp_path: Path) -> None:
    """ReLU in place of the identity: A's inputs are all positive, B's are not."""

    def first(given: Values | None) -> Values:
        return run(
            1, torch.float32, {"layers.0.gate_proj": torch.abs, "layers.0.act": torch.relu}, given
        )

    def second(given: Values | None) -> Values:
        return run(1, torch.float32, None, given)

    by_site = units(graft(tmp_path, first, second))
    assert introducers(by_site) == {"layers.0.gate_proj", "layers.0.act"}


def test_an_early_ulp_that_grows_late(tmp_path: Path) -> None:
    """The early unit is the introducer, and the late one, with the largest difference, an
    amplifier."""

    def ulp(x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x.float(), torch.tensor(torch.inf)).double()

    def steep(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(50 * torch.atanh(x.clamp(-0.999, 0.999)))

    late = {"layers.1.up_proj": steep}
    by_site = units(
        graft(
            tmp_path,
            lambda given: run(3, torch.float32, late | {"layers.0.attn_norm": ulp}, given),
            lambda given: run(3, torch.float32, late, given),
        )
    )
    assert introducers(by_site) == {"layers.0.attn_norm"}
    largest = max(by_site.values(), key=lambda u: u.orders[0].splits[0].inherited.rel_l2)
    assert largest.name == "layers.1.up_proj"
    assert largest.label == "amplifier"
    assert largest.gain > 5
    assert by_site["embed"].label == "clean"


def test_a_fault_in_a_region_names_the_region(tmp_path: Path) -> None:
    """B fuses add and norm; the fault is in the norm or in the add."""
    for number, site in enumerate(("layers.0.mlp_norm", "layers.0.attn_residual")):
        by_site = units(
            graft(
                tmp_path / str(number),
                lambda given: run(5, torch.bfloat16, None, given, FUSED),
                lambda given, s=site: run(5, torch.bfloat16, {s: scaled(1.05)}, given, FUSED),
                FUSED,
            )
        )
        assert introducers(by_site) == {"layers.0.attn_residual+mlp_norm"}
        assert by_site["layers.0.attn_residual+mlp_norm"].sites == [
            "layers.0.attn_residual",
            "layers.0.mlp_norm",
        ]


def healthy(folder: Path, **options: object) -> GraftedEdge:
    def engine(given: Values | None) -> Values:
        return run(7, torch.bfloat16, None, given)

    return graft(folder, engine, engine, **options)  # type: ignore[arg-type]


def test_rows_without_values_are_left_out_and_counted(tmp_path: Path) -> None:
    def keep(site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        return ~((site == "layers.0.k_rope") & (sample == 1) & (position == 2)) & (
            site != "layers.1.act"
        )

    by_site = units(healthy(tmp_path, keep=keep))
    order = by_site["layers.0.k_rope"].orders[0]
    assert (order.left_out, order.reason.count("keeps no value of layers.0.k_rope")) == (1, 1)
    # Attention reads every row up to its own: rows 2 to 6 of sample 1.
    assert by_site["layers.0.attn"].orders[0].left_out == 5
    assert by_site["layers.0.attn"].label == "clean"
    for name in ("layers.1.act", "layers.1.down_proj"):
        assert by_site[name].label == "undetermined"
        assert "keeps no value of layers.1.act" in by_site[name].reason
    assert by_site["layers.1.up_proj"].label == "clean"


def test_an_engine_that_does_not_reproduce_itself_proves_nothing(tmp_path: Path) -> None:
    edge = healthy(tmp_path)
    noisy = run(7, torch.bfloat16, {"layers.0.up_proj": scaled(1.01)})
    again = write(tmp_path / "noisy", noisy, None, noisy)
    edge = replace(edge, second=replace(edge.second, self_grafted=again))
    by_site = units(edge)
    unit = by_site["layers.0.up_proj"]
    # The other order is determined.
    assert [o.rows > 0 for o in unit.orders] == [False, True]
    assert "train prefill, grafted with its own inputs, does not reproduce" in unit.orders[0].reason
    assert by_site["layers.0.gate_proj"].orders[0].rows > 0


def test_rows_that_the_engine_did_not_overwrite_are_missed(tmp_path: Path) -> None:
    edge = healthy(tmp_path)
    record = edge.second.cross_grafted.record
    written = record.overwritten | {"layers.0.attn_norm": 3}
    edge.second.cross_grafted.record = record.model_copy(update={"overwritten": written})
    unit = units(edge)["layers.0.q_proj"]
    assert unit.orders[0].rows == 0
    assert "overwrote 3 of 21 rows of layers.0.attn_norm" in unit.orders[0].reason


@pytest.mark.parametrize("wider", [0, 1])
def test_inputs_that_would_be_rounded_determine_nothing(tmp_path: Path, wider: int) -> None:
    dtypes = [torch.bfloat16, torch.bfloat16]
    dtypes[wider] = torch.float32
    first, second = (lambda given, d=d: run(9, d, None, given) for d in dtypes)
    by_site = units(graft(tmp_path, first, second))
    # Only the wider side reads the other's inputs without rounding.
    orders = by_site["layers.0.act"].orders
    assert [o.rows > 0 for o in orders] == ([False, True] if wider == 0 else [True, False])
    assert "which" in orders[wider].reason
    assert "rounds to torch.bfloat16" in orders[wider].reason
    assert by_site["embed"].label == "introducer"


def test_nan_is_introduced(tmp_path: Path) -> None:
    def poison(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[4, 0] = torch.nan
        return x

    by_site = units(
        graft(
            tmp_path,
            lambda given: run(2, torch.float32, None, given),
            lambda given: run(2, torch.float32, {"layers.1.o_proj": poison}, given),
        )
    )
    assert "layers.1.o_proj" in introducers(by_site)
    assert np.isnan(by_site["layers.1.o_proj"].part("introduced").rms)
