"""What the tests of the tool share: the embedded model, changed copies of it, and the CLI."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import captures
import numpy as np
import psutil
import pytest
import torch
import warm
from hypothesis import settings

from rlk_align.data import data_path
from rlk_align.engines.registry import engine_info
from rlk_align.trace.reader import Trace

# A busy machine is no fault of a test.
settings.register_profile("rlk", deadline=None)
settings.load_profile("rlk")

# An import of TRL silences vLLM where nothing is said of this, and engines inherit it.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

_server: list[warm.Server] = []


def pytest_configure(config: pytest.Config) -> None:
    """One server of warm processes for the whole session, all workers of pytest together."""
    if not hasattr(config, "workerinput"):
        _server.append(warm.Server())


SLOWEST = (
    "tests/fix_path/test_engines.py",
    "tests/real_runs/test_ranks.py",
    "tests/fix_path/test_vllm_batches.py",
    "tests/fix_path/test_layouts.py",
    "tests/fix_path/test_vllm_alone.py",
    "tests/real_runs/test_training_engines.py",
    "tests/cli/test_compare_hf.py",
    "tests/compiled/test_compile.py",
    "tests/compiled/test_cuda_product.py",
    "tests/compiled/test_replayed_launches.py",
    "tests/mutation/test_guards.py",
    "tests/fix_path/test_examples.py",
    "tests/real_runs/test_sparse.py",
    "tests/cli/test_kernels.py",
    "tests/cli/test_traces.py",
    "tests/fix_path/test_weight_update.py",
    "tests/probe/test_selftest.py",
    "tests/cli/test_vllm.py",
    "tests/cli/test_interruptions.py",
    "tests/real_runs/test_planted_training.py",
    "tests/engines/test_families.py",
    "tests/engines/test_megatron.py",
    "tests/kernels/ops/linear_logp/test_operator.py",
    "tests/kernels/ops/linear_logp/test_workspace.py",
    "tests/real_runs/test_graft_passes.py",
    "tests/real_runs/test_corrected_mixture.py",
    "tests/real_runs/test_processors.py",
)
"""What goes first, so that short files fill up the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


def pytest_unconfigure() -> None:
    while _server:
        _server.pop().end()


REQUIRED = set(filter(None, os.environ.get("RLK_REQUIRE_ENGINES", "").split(",")))


def require_engine(name: str) -> None:
    """Skips where the engine is not installed, and fails instead where it is required."""
    if not engine_info(name).installed:
        assert name not in REQUIRED, f"{name} is required by RLK_REQUIRE_ENGINES and missing"
        pytest.skip(f"{name} is not installed")


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
        words = [str(a) for a in args]
        if words and words[0] in ("compare", "probe", "gate", "explain"):
            words += ["--output", f"json={output}"]
        environment = os.environ | {"COLUMNS": "100"} | (env or {})
        if shared:
            environment[captures.FOLDER] = str(Path(os.environ[warm.FOLDER]) / "captures")
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process: warm.WarmProcess | subprocess.Popen
            if real:
                command = [sys.executable, "-m", "rlk_align", *words]
                process = subprocess.Popen(
                    command, stdout=out, stderr=err, cwd=cwd, env=environment
                )
            else:
                words = ["-m", warm.COMMAND, *words]
                process = warm.start(kind, words, environment, out, err, cwd)
            try:
                code = process.wait(timeout=300)
            finally:
                process.kill()
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read())
        verdict = json.loads(output.read_text()) if output.exists() else None
        return Outcome(code, *said, verdict)

    return run


def write_few_prompts(path: Path) -> Path:
    """Six prompts of the embedded set: short ones, and one of middle length."""
    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    by_length = sorted(lines, key=len)
    path.write_text("\n".join([*by_length[2:7], by_length[30]]) + "\n", encoding="utf-8")
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


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `rlk-align ARGS` in an empty directory of its own."""
    return command_line(tmp_path)


@pytest.fixture
def few_prompts(tmp_path: Path) -> Path:
    """Six prompts of the embedded set."""
    return write_few_prompts(tmp_path / "few.jsonl")


@pytest.fixture
def model_copy(tmp_path: Path) -> Callable[..., Path]:
    """Copies the embedded model, with changes to its config and its weights."""

    def copy(
        name: str = "changed",
        config: dict[str, Any] | None = None,
        weights: Callable[[dict[str, Any]], None] | None = None,
    ) -> Path:
        from safetensors.torch import load_file, save_file

        folder = tmp_path / name
        shutil.copytree(data_path("model"), folder)
        if config:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config), encoding="utf-8")
        if weights is not None:
            path = folder / "model.safetensors"
            tensors = load_file(path)
            weights(tensors)
            save_file(tensors, path, metadata={"format": "pt"})
        return folder

    return copy


def running_in(folder: Path) -> list[psutil.Process]:
    """The processes whose working directory is `folder`."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()) == folder:
                processes.append(process)
    return processes
