"""What the command line makes of its words; and that it makes it without an engine."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import warm
from synthetic import compared_run, corrupt, draw

from rlk_align.api.options import (
    CaptureOptions,
    choose_run,
    parse_edges,
    parse_kinds,
    parse_layers,
    parse_size,
    specs,
)
from rlk_align.capture.request import TracePlan
from rlk_align.errors import BadOption
from rlk_align.model.edges import EDGES
from rlk_align.trace.run import Run
from rlk_align.trace.run_folder import RUNS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("500 MB", 500 * 10**6),
        ("1e9", 10**9),
        ("1.5k", 1500),
        ("2T", 2 * 10**12),
        ("7", 7),
        ("7B", 7),
        ("8gb", 8 * 10**9),
        ("1.5e3", 1500),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("unit", ["KiB", "MiB", "GiB", "TiB"])
def test_binary_units_are_binary_or_refused(unit: str) -> None:
    power = "KMGT".index(unit[0]) + 1
    try:
        assert parse_size(f"3{unit}") == 3 * 1024**power
    except BadOption:
        return


@pytest.mark.parametrize(
    "text",
    ["", "0", "0GB", "-1GB", "GB", "8XB", "8 G B", "1e", "inf", "nan", "8GB\n", "1,5GB", "1e999"],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--trace-budget") as error:
        parse_size(text)
    assert "8GB" in error.value.fix


def test_layers() -> None:
    assert parse_layers(None) is None
    assert parse_layers("0-3") == (0, 3)
    assert parse_layers("2") == (2, 2)
    assert parse_layers("5-5") == (5, 5)
    for bad in ("", "3-1", "-1", "1-", "a", "1-2-3", "1,2", "0x1", "1.0", "1 - 2"):
        with pytest.raises(BadOption, match="--layers"):
            parse_layers(bad)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, []),
        ("hf, vllm,megatron", ["hf", "vllm", "megatron"]),
        ("vllm:tp=2,kernels=rlk,hf", ["vllm:tp=2,kernels=rlk", "hf"]),
        ("hf,vllm:tp=2, patch=a.b:c,hf:batch=4", ["hf", "vllm:tp=2,patch=a.b:c", "hf:batch=4"]),
        # An option needs a colon before it, and a name has no equals sign.
        ("hf,tp=2", ["hf", "tp=2"]),
        ("vllm:tp=2,dtype", ["vllm:tp=2", "dtype"]),
    ],
)
def test_a_list_of_engines_has_their_options(text: str | None, found: list[str]) -> None:
    assert specs(text) == found


def test_edges() -> None:
    assert parse_edges(None) == EDGES
    assert parse_edges("prefill_vs_train") == ("prefill_vs_train",)
    assert parse_edges("decode_vs_train, decode_vs_prefill") == (
        "decode_vs_prefill",
        "decode_vs_train",
    )
    for bad in ("", ",", "train_vs_prefill", "prefill_vs_train,x", "production_vs_observed"):
        with pytest.raises(BadOption, match="--edges") as error:
            parse_edges(bad)
        assert "decode_vs_prefill" in error.value.fix


def test_kinds() -> None:
    assert parse_kinds(None) == parse_kinds([]) == ()
    assert parse_kinds(["attributes", "tokens", "tokens"]) == ("tokens", "attributes")
    for bad in ("weight", "", "tokens,weights"):
        with pytest.raises(BadOption, match="--allow-mismatch") as error:
            parse_kinds([bad])
        assert "weights" in error.value.fix


def test_a_plan_holds_what_was_asked_for() -> None:
    assert CaptureOptions().plan == TracePlan()
    narrow = CaptureOptions(trace_budget="1MB", layers="1-2", sites="attn, layers.0.act,")
    assert narrow.plan == TracePlan(budget=10**6, layers=(1, 2), sites=("attn", "layers.0.act"))


def test_runs_are_named_after_their_settings() -> None:
    assert choose_run(Path("x"), "compare", 1).folder == Path("x")
    first = choose_run(None, "compare", "m", 32)
    assert first.folder.parent == RUNS
    assert first.folder == choose_run(None, "compare", "m", 32).folder
    assert first.folder != choose_run(None, "compare", "m", 33).folder
    assert first.folder != choose_run(None, "capture", "m", 32).folder


SPY = """
import json, sys
sys.argv = ["rlk-align", *sys.argv[1:]]
from rlk_align.cli.main import main
try:
    main()
except SystemExit as end:
    code = end.code or 0
else:
    code = 0
heavy = ("torch", "transformers", "tokenizers", "vllm", "triton", "pyarrow", "jinja2")
print("SPY", json.dumps([code, [name for name in heavy if name in sys.modules]]), file=sys.stderr)
"""


def spied(*args: str, cwd: Path, kind: str | None = None) -> tuple[int, list[str], str, float]:
    """Exit code, heavy modules that were imported, output, and processor seconds.

    `kind`: of a warm process, whose seconds nobody counts; None starts an interpreter.
    """
    words = ["-c", SPY, *args]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as said:
        if kind is None:
            command = [sys.executable, *words]
            subprocess.run(command, stdout=said, stderr=said, cwd=cwd, env=environment, timeout=60)
        else:
            warm.start(kind, words, environment, said, said, cwd).wait(60)
        said.seek(0)
        out = said.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in out.splitlines() if line.startswith("SPY")]
    assert lines, out
    code, heavy = json.loads(lines[0].removeprefix("SPY "))
    seconds = sum(getattr(after, f) - getattr(before, f) for f in ("ru_utime", "ru_stime"))
    return code, heavy, out, seconds


FLAGS = {
    "": "compare capture gate doctor",
    "doctor": "doctor",
    "compare": (
        "--model --rollout --train --prompts --contract --max-new-tokens --seed --run-dir --output "
        "--allow-mismatch --fresh --layers --sites --edges --production --no-production "
        "--trace-budget"
    ),
    "capture": (
        "--engine -o --tokens --model --prompts --max-new-tokens --seed --fresh --layers --sites "
        "--trace-budget"
    ),
    "gate": "--contract --output",
}


@pytest.mark.parametrize("command", FLAGS)
def test_help_is_light_quick_and_names_the_published_flags(command: str, tmp_path: Path) -> None:
    code, heavy, out, seconds = spied(*filter(None, [command, "--help"]), cwd=tmp_path)
    assert code == 0
    assert heavy == []
    assert "Usage" in out
    for flag in FLAGS[command].split(" "):
        assert flag in out, flag
    # Of processor time: the machine may be shared.
    assert seconds < 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compared run with a fault in layers.1.act."""
    faulty = corrupt(draw(), "layers.1.act", [(1, 4)])
    return compared_run(tmp_path_factory.mktemp("made") / "run", faulty).folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, in a folder of its own and the last one there."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path / "run")
    saved = Run(tmp_path / "run")
    saved.save(saved.record)
    return saved.folder


def test_gate_needs_no_engine(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "verdict.json"
    code, heavy, out, _ = spied(
        "gate", str(run), "--contract", "bitwise", "--output", f"json={output}", cwd=tmp_path
    )
    assert code == 1, out
    assert heavy == []
    assert "layers.1.act" in out
    verdict = json.loads(output.read_text())
    assert verdict["divergence"]["first_bitwise"]["site"] == "layers.1.act"
    assert verdict["exit_code"] == 1
    # 15 sampled tokens are too few for bf16's contract; @last names this run.
    code, heavy, out, _ = spied("gate", "@last", cwd=tmp_path)
    assert (code, heavy) == (4, []), out
    code, heavy, out, _ = spied("contract", "check", "bf16", cwd=tmp_path)
    assert (code, heavy) == (0, []), out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["gate", "nowhere"], 2, "nowhere"),
        (["gate", "run", "--contract", "nope"], 2, "nope"),
        (["gate", "run", "--output", "yaml=x"], 2, "yaml"),
        (["compare", "a", "b", "c"], 2, "RUN_A RUN_B"),
        (["compare", "a", "b", "--model", "m"], 2, "RUN_A RUN_B"),
        (["compare", "--train", "hf:x=1"], 2, "'x'"),
        (["capture", "--engine", "replay:path=run", "-o", "x"], 2, "replay"),
        (["capture", "--engine", "hf"], 2, "out"),
        (["capture", "--engine", "hf", "-o", "x", "--tokens", "nowhere"], 2, "nowhere"),
        (["serve"], 2, "serve"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistakes_are_named_without_a_traceback(
    run: Path, tmp_path: Path, args: list[str], code: int, says: str
) -> None:
    found, heavy, out, _ = spied(*args, cwd=tmp_path, kind="light")
    assert found == code, out
    assert heavy == []
    assert says in out
    assert "Traceback" not in out
    assert "bug in rlk-align" not in out


WORDS = ("--edges", "prefill_vs_train", "--contract", "bitwise", "--run-dir", "new")


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    code, _, out, _ = spied("compare", "run", "run", *WORDS, cwd=tmp_path, kind="command")
    assert code == 1, out
    assert "layers.1.act" in out
    code, heavy, out, _ = spied("gate", "new", "--contract", "bitwise", cwd=tmp_path, kind="light")
    assert (code, heavy) == (1, []), out


def test_a_run_may_have_a_comma_in_its_name(run: Path, tmp_path: Path) -> None:
    run.rename(tmp_path / "a,b")
    code, _, out, _ = spied("compare", "a,b", "a,b", *WORDS, cwd=tmp_path, kind="command")
    assert code == 1, out
    assert "layers.1.act" in out
