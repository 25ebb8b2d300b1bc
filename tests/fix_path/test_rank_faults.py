"""Faults in a Megatron whose ranks divide weights, sequences or layers are first seen at the site
that each fault names, on all ranks or on the one rank that has it, with and without sequence
parallelism. Through the command line: `test_ranks.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import require_engine, said_by
from pair_models import SPARSE

from rlk_align.data import data_path
from rlk_align.selftest.faults.catalogue import FAULTS, faults_of

HERE = Path(__file__).parent
LAYOUTS = {"tp": "tp=2", "sp": "tp=2,sp=1", "cp": "cp=2", "pp": "pp=2"}
EXPERTS: dict[str, list[Any] | None] = {
    # With tokens of both ranks, and an expert of the first rank.
    "expert-missing": ["layers.2.moe_out", [0]],
    "expert-missing@rank0": ["layers.2.moe_out", [0]],
    "expert-missing@rank1": None,
    # On the rank of the token.
    "expert-flipped": ["layers.2.experts", [0, 1]],
    "expert-flipped@rank1": ["layers.2.experts", [1]],
    "expert-weights-unnormalised@rank0": ["layers.2.routing_weights", [0]],
    "experts-shuffled": ["layers.2.gate_proj", [0]],
}
"""Where each is seen in a sparse model with experts on two ranks, and on which ranks."""
FEW = ("norm-eps", "attn-scale", "residual-fp8")
"""A value of which each rank has all rows or, with sequence parallelism, some rows; and heads."""
CLASSES_OF = {
    name: fault
    for name, fault in faults_of("megatron").items()
    if fault.kind in ("computation", "weights")
    and not fault.needs
    and not fault.sparse
    and not fault.both
    and fault.engines[-1] == "megatron"
}
"""Layouts that need no options."""

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Found]:
    """The findings of two ranks for these faults in each layout, on both ranks and on the
    second."""
    known: dict[tuple[str, ...], Found] = {}

    def run(faults: tuple[str, ...]) -> Found:
        if faults not in known:
            require_engine("megatron")
            folder = tmp_path_factory.mktemp("faults")
            names = [n for f in faults for n in (f, *_of_rank_1(f))]
            cases = [_case(n, data_path("model"), o, names) for n, o in LAYOUTS.items()]
            cases.append(_case("ep", SPARSE, "ep=2", [*EXPERTS]))
            (path := folder / "cases.json").write_text(json.dumps(cases))
            words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
            words += [str(HERE / "rank_faults_run.py"), str(path), str(folder / "found.json")]
            said_by("megatron", words, timeout=570)
            known[faults] = json.loads((folder / "found.json").read_text())
        return known[faults]

    return run


def _case(name: str, model: Path, options: str, faults: list[str]) -> dict[str, Any]:
    return {"name": name, "model": str(model), "options": options, "faults": faults}


def _of_rank_1(fault: str) -> tuple[str, ...]:
    """The same fault only on the second rank, if one rank can have it."""
    return () if FAULTS[fault].site == "logprob" else (f"{fault}@rank1",)


def _check(found: Found, faults: tuple[str, ...]) -> None:
    for fault, expected in EXPERTS.items():
        assert found["ep"][fault] == expected, fault
    for layout, seen in found.items():
        assert seen["after"] is None, (layout, "something is left of a fault")
        for fault in faults if layout != "ep" else ():
            site = FAULTS[fault].site
            assert seen[fault] is not None, (layout, fault)
            assert seen[fault][0] == site, (layout, fault, seen[fault])
            for alone in _of_rank_1(fault):
                if seen[fault][1] != [0]:
                    assert seen[alone] == [site, [1]], (layout, alone, seen[alone])
                elif layout == "pp":
                    assert f"stage 0 of pp=2 computes {site}" in seen[alone], alone
                else:
                    # A rank without any part of the faulty value has no fault.
                    assert seen[alone] is None, (layout, alone, seen[alone])


def test_a_fault_of_one_rank_is_named_with_it(found: Callable[[tuple[str, ...]], Found]) -> None:
    _check(found(FEW), FEW)
    for layout, seen in found(FEW).items():
        if layout == "ep":
            continue
        assert all(seen[f"{fault}@rank1"] for fault in FEW)


@pytest.mark.whole_matrix
def test_every_fault_is_named_with_its_rank(found: Callable[[tuple[str, ...]], Found]) -> None:
    assert len(CLASSES_OF) > 60
    _check(found(tuple(CLASSES_OF)), tuple(CLASSES_OF))
