"""`--output FMT=PATH` and `report`: the same formats, checked before any work, and no change of the
exit code."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from inprocess import command
from report_runs import report_run
from synthetic import CONTRACT, compared_run

from rlk_align.cli.outputs import OutputTarget, parse_outputs, takes_stdout
from rlk_align.errors import BadOption
from rlk_align.report.formats import FORMATS, renderer
from rlk_align.report.github import SUMMARY
from rlk_align.trace.run import Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that passes, and one that fails."""
    folder = tmp_path_factory.mktemp("made")
    return {
        "pass": report_run(folder / "pass").folder,
        "fail": report_run(folder / "fail", over=["layers.1.act"]).folder,
    }


@pytest.fixture
def run(made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The failing one, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SUMMARY, raising=False)
    shutil.copytree(made["fail"], tmp_path / "run")
    return Path("run")


def test_outputs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_outputs(None) == []
    outputs = parse_outputs(["json=a.json", f"junit={tmp_path}/b=c.xml", "github=-", "markdown=-"])
    assert outputs == [
        OutputTarget("json", Path("a.json")),
        OutputTarget("junit", tmp_path / "b=c.xml"),
        OutputTarget("github", None),
        OutputTarget("markdown", None),
    ]
    assert takes_stdout(outputs)
    assert not takes_stdout(outputs[:3])


@pytest.mark.parametrize(
    "bad",
    [
        *("a.json", "json", "json=", "=a.json", "yaml=a", "JSON=a", "json=none/a.json", "junit=."),
        f"markdown={'x' * 300}",
    ],
    ids=lambda bad: bad[:20],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOption, match="--output"):
        parse_outputs([bad])
    # Before the run is looked for.
    code, said = command("gate", "nowhere", "--output", bad)
    assert code == 2
    assert "nowhere" not in said


def test_one_place_takes_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for twice in (["json=a", "junit=./a"], ["json=-", "markdown=-"]):
        with pytest.raises(BadOption, match="goes there already"):
            parse_outputs(twice)
    assert len(parse_outputs(["json=/dev/null", "junit=/dev/null", "github=-"])) == 3


def test_a_path_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BadOption, match="no file can be written"):
        parse_outputs([f"json={tmp_path}/a"])


def test_an_unwritable_summary_of_github_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUMMARY, str(tmp_path / "none" / "summary.md"))
    with pytest.raises(BadOption, match=r"summary\.md"):
        parse_outputs(["github=-"])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_there(name: str) -> None:
    assert callable(renderer(name))


CODES = {"pass": 0, "fail": 1, "inconclusive": 4}


@pytest.mark.parametrize("status", CODES)
def test_outputs_change_no_exit_code(
    made: dict[str, Path], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    shutil.copytree(made["fail" if status == "fail" else "pass"], folder)
    contract = ["--contract", many_tokens(tmp_path)] if status == "inconclusive" else []
    outputs = [f"--output={name}=out.{name}" for name in FORMATS]
    code, said = command("gate", folder, *contract, *outputs)
    assert code == CODES[status], said
    assert json.loads(Path("out.json").read_text())["status"] == status
    assert Path("out.markdown").read_text().startswith(f"## rlk-align: {status.upper()}\n")
    root = ElementTree.parse("out.junit").getroot()
    counts = {n: int(root.get(n, "")) for n in ("failures", "errors")}
    assert bool(counts["failures"]) == (status == "fail")
    assert bool(counts["errors"]) == (status == "inconclusive")
    assert Path("out.github").read_bytes() == Path("out.markdown").read_bytes()
    assert ("\n::error " in f"\n{said}") == (status != "pass")
    assert Path("out.html").read_text().startswith("<!DOCTYPE html>")


def many_tokens(folder: Path) -> Path:
    """bf16's contract, which wants more tokens than there are."""
    from rlk_align.data import data_path

    text = (data_path("contracts") / "bf16.toml").read_text(encoding="utf-8")
    path = folder / "many.toml"
    path.write_text(
        text.replace("min_tokens = ", "min_tokens = 9999").replace('id = "bf16"', 'id = "many"', 1)
    )
    return path


def test_the_same_run_gives_the_same_bytes(run: Path) -> None:
    written = []
    for seed in ("1", "2"):
        outputs = [f"--output={name}={seed}.{name}" for name in FORMATS]
        words = [sys.executable, "-m", "rlk_align", "gate", str(run), *outputs]
        done = subprocess.run(words, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
        assert done.returncode == 1, done.stderr
        written.append([Path(f"{seed}.{name}").read_bytes() for name in FORMATS])
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["json", "markdown", "junit"])
def test_stdout_is_for_the_program_that_reads_it(run: Path, name: str) -> None:
    words = [sys.executable, "-m", "rlk_align"]
    gate = subprocess.run([*words, "gate", run, f"--output={name}=-"], capture_output=True)
    assert gate.returncode == 1
    assert " FAIL " in gate.stderr.decode()
    command("gate", run, f"--output={name}=file")
    assert gate.stdout == Path("file").read_bytes()
    if name != "json":
        report = subprocess.run([*words, "report", name, run], capture_output=True)
        assert (report.returncode, report.stdout) == (0, gate.stdout)


def test_a_reader_who_leaves_changes_no_exit_code(run: Path) -> None:
    gate = f"{sys.executable} -m rlk_align gate run --output json=-"
    words = ["bash", "-c", f"{gate} | true; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_summary_is_added_to_the_one_of_the_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("summary.md").write_text("before\n")
    monkeypatch.setenv(SUMMARY, str(Path("summary.md").absolute()))
    code, said = command("gate", run, "--output", "github=-")
    assert code == 1
    assert "\n::error file=engine/layers.py,line=12," in said
    text = Path("summary.md").read_text()
    assert text.startswith("before\n## rlk-align: FAIL\n")
    code, said = command("report", "github", run, "-o", "own.md")
    assert code == 0
    assert said.startswith("::error ")
    assert Path("own.md").read_text() == text.removeprefix("before\n")


def test_a_file_of_the_run_is_no_output(run: Path) -> None:
    for words in (("gate", run, "--output=junit=run/run.json"), ("report", "junit", run)):
        extra = ["-o", "run/verdict.json"] if words[0] == "report" else []
        code, said = command(*words, *extra)
        assert code == 2
        assert "a file of the run itself" in said


@pytest.mark.parametrize("name", ["comparison.json", "comparison.parquet", "checksums.json"])
def test_a_damaged_run_is_a_failure_of_the_tool(run: Path, name: str) -> None:
    (run / name).write_bytes((run / name).read_bytes()[:-30])
    for words in (
        ("gate", run, "--output=junit=out.xml"),
        ("report", "markdown", run),
        ("report", "html", run, "-o", "out.html"),
    ):
        code, said = command(*words)
        assert code == 3, said
        assert said.count("error: ") == 1
        assert name in said
        assert "Traceback" not in said
    assert not list(Path().glob("out.*"))


def test_a_full_disk_is_said(run: Path) -> None:
    code, said = command("gate", run, "--output", "markdown=/dev/full")
    assert code == 3
    assert "/dev/full could not be written" in said


def test_of_two_runs_there_is_no_page(run: Path) -> None:
    code, said = command("gate", run, run, "--output", "html=a.html")
    assert code == 2
    assert "FMT is one of json, markdown, junit, github\n" in said


SPY = """
import json, sys
from rlk_align.cli.main import main
sys.argv[0] = "rlk-align"
try:
    main()
finally:
    print("SPY", json.dumps(sorted({m.split(".")[0] for m in sys.modules})), file=sys.stderr)
"""
LIGHT = {"pydantic", "pydantic_core", "typer", "rich", "rlk_align"}
"""What the gate reads contracts, runs and flags with."""
HEAVY = {*("torch", "transformers", "vllm", "megatron", "triton", "safetensors", "tokenizers")}
HEAVY |= {"numpy", "pyarrow", "jinja2"}


def test_the_gate_imports_next_to_nothing_and_is_quick(run: Path) -> None:
    """The comparison of the size of the embedded model's."""
    report_run(Path("large"), layers=4, samples=64, length=113, over=["layers.1.act"])
    outputs = [f"--output={name}=out.{name}" for name in FORMATS if name != "html"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", SPY, "gate", "large", *outputs], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1, done.stderr
    loaded = set(json.loads(done.stderr.split("SPY ")[1]))
    assert loaded >= LIGHT
    assert not loaded & HEAVY
    # Of processor time: the machine may be shared.
    seconds = sum(getattr(after, f) - getattr(before, f) for f in ("ru_utime", "ru_stime"))
    assert seconds < 2


def test_a_capture_that_is_there_is_compared_whole(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run")
    [path, *_] = sorted((run.folder / "captures").rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert command("gate", run.folder, "--contract", CONTRACT)[0] == 3
    path.write_bytes(data[:-1])
    assert command("gate", run.folder, "--contract", CONTRACT)[0] == 3
    assert Run.open(str(run.folder)).comparison.tokens
