"""The command line as the tests run it, and what a run of it left behind."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import captures
import numpy as np
import psutil
import pytest
import torch
import warm

from rlk_align.data import data_path
from rlk_align.engines.registry import engine_info
from rlk_align.trace.reader import Trace

REQUIRED = set(filter(None, os.environ.get("RLK_REQUIRE_ENGINES", "").split(",")))
INTERPRETERS = {
    "sglang": Path(
        os.environ.get("RLK_SGLANG_PYTHON", Path(__file__).parents[2] / ".venv-sglang/bin/python")
    )
}
"""The Python of each engine that has an environment of its own."""


def require_engine(name: str) -> None:
    """Skips where the engine is not installed, and fails instead where it is required."""
    here = INTERPRETERS.get(name)
    if not (engine_info(name).installed if here is None else here.exists()):
        assert name not in REQUIRED, f"{name} is required by RLK_REQUIRE_ENGINES and missing"
        pytest.skip(f"{name} is not installed")


def spec_here(spec: str) -> str:
    """An engine's spec with the interpreter that the engine needs."""
    name, colon, options = spec.partition(":")
    if name not in INTERPRETERS:
        return spec
    return f"{name}:python={INTERPRETERS[name]}{',' if colon else ''}{options}"


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line left behind."""

    code: int
    out: str
    err: str
    verdict: dict[str, Any] | None

    @property
    def first(self) -> str | None:
        """The first bitwise introducer."""
        assert self.verdict is not None, self.err
        first = self.verdict["divergence"]["first_bitwise"]
        return None if first is None else first["site"]


Cli = Callable[..., Outcome]


def started(
    kind: str | None,
    words: Sequence[str],
    environment: Mapping[str, str],
    out: IO[str],
    err: IO[str],
    cwd: Path | None = None,
    python: Path = Path(sys.executable),
) -> warm.WarmProcess | subprocess.Popen:
    """Starts `python WORDS` with these variables beside this process's.

    `kind`: of the warm process, as `warm.start` takes it, or None for one that starts cold, of the
    interpreter `python`.
    """
    variables = os.environ | environment
    if kind is not None:
        return warm.start(kind, words, variables, out, err, cwd)
    return subprocess.Popen([str(python), *words], stdout=out, stderr=err, cwd=cwd, env=variables)


def ended(
    kind: str | None,
    words: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    timeout: float = 300,
    python: Path = Path(sys.executable),
) -> tuple[int, str, str]:
    """The exit code, the output and the errors of a process that is `started` like this."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = started(kind, words, environment, out, err, cwd, python)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def command_line(folder: Path, kind: str = "command") -> Cli:
    """What runs `rlk-align ARGS` in that directory, in a process of its own that starts warm.

    `shared`: whether it may take captures that other tests have made; `real`: start it, and the
    engines' workers, as users do.
    """

    def run(
        *args: object,
        env: dict[str, str] | None = None,
        cwd: Path = folder,
        shared: bool = True,
        real: bool = False,
    ) -> Outcome:
        output = folder / "verdict.json"
        output.unlink(missing_ok=True)
        words = ["-m", "rlk_align" if real else warm.COMMAND, *map(str, args)]
        if args and args[0] in ("compare", "probe", "gate", "explain"):
            words += ["--output", f"json={output}"]
        environment = {"COLUMNS": "100"} | (env or {})
        if shared:
            environment[captures.FOLDER] = str(Path(os.environ[warm.FOLDER]) / "captures")
        said = ended(None if real else kind, words, environment, cwd)
        verdict = json.loads(output.read_text()) if output.exists() else None
        return Outcome(*said, verdict)

    return run


def said_by(
    kind: str | None,
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300,
    python: Path = Path(sys.executable),
) -> str:
    """What `python WORDS` says; raises AssertionError where its exit code is not 0. The arguments
    are those of `ended`."""
    code, out, err = ended(kind, words, environment or {}, cwd, timeout, python)
    assert code == 0, (out + err)[-8000:]
    return out + err


def write_prompts_with_a_prefix(path: Path) -> Path:
    """Four prompts of up to 90 tokens that begin with the same 66 ones."""
    rows = [{"id": f"p{n}", "ids": [*range(4, 70), *range(n, 90)]} for n in range(80, 84)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_few_prompts(path: Path) -> Path:
    """Six prompts of the embedded set: short ones, and one of middle length."""
    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    by_length = sorted(lines, key=len)
    path.write_text("\n".join([*by_length[2:7], by_length[30]]) + "\n", encoding="utf-8")
    return path


def write_prompts_that_begin_alike(path: Path) -> Path:
    """Six prompts of token ids, of which the first 40 are common."""
    made = ({"id": f"p{n}", "ids": [*range(6, 46), *range(60, 61 + n)]} for n in range(6))
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in made), encoding="utf-8")
    return path


def capture_of(run: Path, role: str) -> Trace:
    """A side's trace in a run."""
    names = json.loads((run / "run.json").read_text())["captures"]
    return Trace(run / names[role])


def values(run: Path, role: str, site: str) -> torch.Tensor:
    """All values of a site in the prefill pass, in the order of (sample, position)."""
    reader = capture_of(run, role).read_pass("prefill")
    rows = reader.rows(site)
    assert rows is not None
    return reader.values(site, rows, np.lexsort((rows.position, rows.sample)))


def running_in(folder: Path) -> list[psutil.Process]:
    """The processes whose working directory is `folder`."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()) == folder:
                processes.append(process)
    return processes
