"""The public names: which there are, what they take, and that they do as the command does."""

import inspect
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inprocess import command
from synthetic import CONTRACT, compared_run, corrupt, draw
from typer.main import get_command

import rlk_align
from rlk_align.api import pair, public
from rlk_align.capture.request import TracePlan
from rlk_align.cli.main import app
from rlk_align.errors import BadOption, ContractError, CorruptTrace, UnknownEngine
from rlk_align.trace.run import Run

EDGE = "prefill_vs_train"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run whose sides are equal, and one with a fault in the training side's layers.1.act."""
    monkeypatch.chdir(tmp_path)
    equal, faulty = tmp_path / "equal", tmp_path / "faulty"
    compared_run(equal)
    compared_run(faulty, corrupt(draw(), "layers.1.act", [(1, 4)]))
    return equal, faulty


def test_the_public_names() -> None:
    assert sorted(rlk_align.__all__) == [
        *("LoadedRun", "RegressionVerdict", "RlkError", "Verdict", "__version__"),
        *("capture", "compare", "gate", "load_run"),
    ]
    for name in rlk_align.__all__:
        assert getattr(rlk_align, name) is not None
    assert rlk_align.Verdict.__module__ == "rlk_align.judge.verdict"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rlk_align.nothing


def test_a_function_stays_where_a_package_has_its_name() -> None:
    code = (
        "import rlk_align.capture.capture, rlk_align.compare.measure, rlk_align\n"
        "from rlk_align.api import public\n"
        "assert rlk_align.compare is public.compare, rlk_align.compare\n"
        "assert rlk_align.capture is public.capture, rlk_align.capture\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NOT_FLAGS = {"compare": {"progress", "runs"}, "capture": {"progress"}, "gate": {"progress"}}
NOT_ARGUMENTS = {
    "compare": {
        *("output", "probe", "attribute", "replay_routing", "modules", "runs", "tokens"),
        *("sequences", "steps"),
    },
    "capture": set(),
    "gate": {"output"},
}


@pytest.mark.parametrize("name", NOT_FLAGS)
def test_a_function_takes_what_its_command_takes(name: str) -> None:
    """With the same defaults; a flag that a function lacks is listed above."""
    flags = {p.name: p for p in get_command(app).commands[name].params}  # type: ignore[attr-defined]
    taken = inspect.signature(getattr(public, name)).parameters
    assert taken.keys() - NOT_FLAGS[name] == flags.keys() - NOT_ARGUMENTS[name]
    for key in taken.keys() & flags.keys() - NOT_ARGUMENTS[name]:
        default = taken[key].default
        if default is not inspect.Parameter.empty:
            assert (default or None) == (flags[key].default or None), key


def test_two_runs_are_compared_and_judged_as_the_command_line_does(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    equal, faulty = runs
    options = {"edges": EDGE, "contract": CONTRACT}
    passed = rlk_align.compare(equal, str(equal), run_dir=tmp_path / "one", **options)
    assert (passed.status, passed.exit_code, passed.breaches) == ("pass", 0, [])
    stages: list[str] = []
    failed = rlk_align.compare(
        equal, faulty, run_dir="two", **options, progress=lambda stage, *_: stages.append(stage)
    )
    assert (failed.status, failed.exit_code) == ("fail", 1)
    assert {b.metric for b in failed.breaches} == {"max_abs_dlogp"}
    assert stages
    words = ("--edges", EDGE, "--contract", CONTRACT, "--run-dir", "two")
    assert Run(Path("two")).record.command == [
        *("rlk-align", "compare", str(equal), str(faulty), "--contract", str(CONTRACT)),
        *("--run-dir", "two", "--edges", EDGE),
    ]
    assert command("compare", equal, faulty, *words, "--output", "json=said.json")[0] == 1
    said = json.loads(Path("said.json").read_text())
    assert said == rlk_align.load_run("two", CONTRACT).json()


def test_nothing_is_printed(runs: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    rlk_align.compare(*runs, edges=EDGE, contract=CONTRACT, run_dir="new")
    rlk_align.gate("new", contract=CONTRACT, recompute=True)
    assert capfd.readouterr() == ("", "")


def test_a_run_is_judged_again(runs: tuple[Path, Path]) -> None:
    equal, faulty = runs
    assert rlk_align.gate(equal, contract=CONTRACT).status == "pass"
    verdict = rlk_align.gate(str(faulty), contract="bitwise")
    assert (verdict.status, verdict.exit_code) == ("fail", 1)
    assert "layers.1.act" in {b.site for b in verdict.breaches}
    assert rlk_align.gate(faulty, contract=CONTRACT, recompute=True).status == "fail"
    # 15 sampled tokens are too few for bf16's contract.
    assert rlk_align.gate(equal).exit_code == 4


def test_a_record_that_its_captures_gainsay_is_warned_of(runs: tuple[Path, Path]) -> None:
    equal, _ = runs
    path = equal / "comparison.json"
    path.write_text(path.read_text().replace('"tokens": 15', '"tokens": 14', 1))
    Run(equal).finish()
    with pytest.warns(UserWarning, match="disagrees with its captures"):
        verdict = rlk_align.gate(equal, contract=CONTRACT, recompute=True)
    assert verdict.comparison.tokens == 15
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rlk_align.gate(equal, contract=CONTRACT).comparison.tokens == 14


def test_what_became_worse(runs: tuple[Path, Path], tmp_path: Path) -> None:
    equal, faulty = runs
    contract = tmp_path / "worse.toml"
    contract.write_text(
        Path(CONTRACT).read_text() + '\n[[regressions]]\nid = "mean"\nmetric = "mean_abs_dlogp"\n'
        'why = "a test"\nsource = "derived: a test"\n'
    )
    verdict = rlk_align.gate(equal, faulty, contract=contract)
    assert (verdict.status, verdict.exit_code) == ("fail", 1)
    assert [c.metric for c in verdict.worse] == ["mean_abs_dlogp"]
    assert rlk_align.gate(faulty, equal, contract=contract).status == "pass"
    with pytest.raises(BadOption, match="--recompute takes one run"):
        rlk_align.gate(equal, faulty, recompute=True)  # type: ignore[call-overload]


def test_a_list_is_taken_where_the_command_line_takes_commas(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[pair.Pair] = []

    def prepare(given: pair.Pair, *_: object) -> pair.PreparedPair:
        asked.append(given)
        raise BadOption("nothing is started")

    with monkeypatch.context() as patched:
        patched.setattr(pair, "prepare", prepare)
        for arguments in (
            {
                "edges": ["prefill_vs_train", "decode_vs_train"],
                "sites": ("attn", "embed"),
                "layers": range(1, 4),
                "allow_mismatch": ["weights", "tokens"],
            },
            {"edges": EDGE, "layers": np.int64(2), "allow_mismatch": "weights,tokens"},
        ):
            with pytest.raises(BadOption, match="nothing is started"):
                rlk_align.compare(**arguments)
    first, second = asked
    assert first.edges == "prefill_vs_train,decode_vs_train"
    assert first.plan == TracePlan(layers=(1, 3), sites=("attn", "embed"))
    assert first.allow_mismatch == second.allow_mismatch == ["weights", "tokens"]
    assert (second.edges, second.layers) == (EDGE, "2-2")
    equal, _ = runs
    verdict = rlk_align.compare(equal, equal, edges=[EDGE], contract=CONTRACT, run_dir="listed")
    assert verdict.status == "pass"
    assert Run(Path("listed")).record.command[-2:] == ["--edges", EDGE]


NOT_VALUES: dict[str, dict[str, Any]] = {
    "edges is 3; it must be text, or a list of names": {"edges": 3},
    "edges is an empty list": {"edges": []},
    "sites is [1]": {"sites": [1]},
    "allow_mismatch is {'weights'}": {"allow_mismatch": {"weights"}},
    "layers is [0, 3]; it must be consecutive layers": {"layers": [0, 3]},
    "layers is 1.5": {"layers": 1.5},
    "rollout is ['hf']; it must be text": {"rollout": ["hf"]},
    "model is 3": {"model": 3},
    "contract is ['bf16']": {"contract": ["bf16"]},
    "run_dir is ('a', 'b')": {"run_dir": ("a", "b")},
    "max_new_tokens is '32'; it must be a whole number": {"max_new_tokens": "32"},
    "seed is True": {"seed": True},
    "fresh is 'no'; it must be True or False": {"fresh": "no"},
    "prompts is 5; it must be a file, or a list of prompts": {"prompts": 5},
}


@pytest.mark.parametrize("said", NOT_VALUES)
def test_a_value_of_another_kind_is_refused_by_its_name(said: str) -> None:
    with pytest.raises(BadOption, match=re.escape(said)):
        rlk_align.compare(**NOT_VALUES[said])


def test_a_run_of_another_kind_is_refused_by_its_name() -> None:
    with pytest.raises(BadOption, match="run is 3"):
        rlk_align.load_run(3)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="a run is 4"):
        rlk_align.compare(4, 5)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="recompute is 1"):
        rlk_align.gate("run", recompute=1)  # type: ignore[call-overload]


def test_mistakes_are_the_tools_own_errors(runs: tuple[Path, Path]) -> None:
    equal, _ = runs
    mistakes = {
        "nowhere is not a run": lambda: rlk_align.load_run("nowhere"),
        "'nope' is unknown; choose from deepspeed, fsdp, hf": lambda: rlk_align.compare(
            rollout="nope"
        ),
        "--edges": lambda: rlk_align.compare(edges="sideways"),
        "--allow-mismatch 'weight'": lambda: rlk_align.compare(allow_mismatch="weight"),
        "--max-new-tokens 0": lambda: rlk_align.compare(rollout="hf", max_new_tokens=0),
        "--seed -1": lambda: rlk_align.capture("hf", "new", seed=-1),
        "--trace-budget": lambda: rlk_align.capture("hf", "new", trace_budget="much"),
        "a replay is already a capture": lambda: rlk_align.capture(f"replay:path={equal}", "new"),
        "two runs are compared as they are": lambda: rlk_align.compare(equal, equal, seed=3),
        "would be overwritten": lambda: rlk_align.compare(equal, equal, run_dir=equal),
        "name one run": lambda: rlk_align.capture("hf", equal, tokens=equal),
    }
    for said, mistake in mistakes.items():
        with pytest.raises(rlk_align.RlkError, match=re.escape(said)) as raised:
            mistake()
        assert raised.value.exit_code == 2
        assert isinstance(raised.value, BadOption | UnknownEngine)
    with pytest.raises(ContractError):
        rlk_align.gate(equal, contract="nosuch")
    (equal / "comparison.json").write_text("{")
    with pytest.raises(CorruptTrace):
        rlk_align.load_run(equal)
    assert not Path("new").exists()
