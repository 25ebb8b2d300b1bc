"""Engines that fail, in real processes: the message, the exit code, what is kept, what is left."""

import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import warm
from command import Cli, require_engine, running_in, started

from rlk_align.data import data_path

HERE = Path(__file__).parent
PATCHES = {"PYTHONPATH": str(HERE)}
SPECS = (
    "megatron:tp=2,patch=rank_patches:killed",
    "vllm:tp=2,timeout=8,patch=rank_patches:asleep",
    "fsdp:dp=2,timeout=6,patch=rank_patches:asleep",
    "fsdp:dp=2,timeout=6,patch=rank_patches:stopped",
    "fsdp:dp=2,timeout=6,patch=rank_patches:at_cross_purposes",
    "fsdp:dp=2,patch=rank_patches:out_of_memory",
    "hf:patch=rank_patches:out_of_memory",
    "hf:device=cuda",
    "fsdp:dp=2,device=cuda",
    "megatron:tp=2,device=cuda",
    "vllm:device=cuda",
    "megatron:tp=3",
    "hf:python=/bin/true",
    "hf:python=/bin/ls",
    "hf:python=/etc/passwd",
)
"""These engines run in the background, in this order, while tests look at those that have ended."""
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without a GPU")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    path.write_text("\n".join(sorted(lines, key=len)[2:8]) + "\n", encoding="utf-8")
    return path


class Running:
    """A command line that runs in `folder`; it starts warm, unless `real`."""

    def __init__(
        self, folder: Path, *words: object, real: bool = False, **environment: str
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        words = ("-m", "rlk_align" if real else warm.COMMAND, *map(str, words))
        self.out, self.err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        self.process = started(
            *(None if real else "command", words, {"COLUMNS": "100"} | PATCHES | environment),
            *(self.out, self.err, folder),
        )

    def wait(self) -> "Ended":
        """Its end, after which nothing that it started may run."""
        try:
            self.process.wait(timeout=240)
        finally:
            self.process.kill()
            _, alive = psutil.wait_procs(running_in(self.folder), timeout=5)
            for p in alive:
                p.kill()
        streams = []
        for file in (self.out, self.err):
            file.seek(0)
            streams.append(file.read())
            file.close()
        assert not alive, f"{alive} outlived the command\n{streams[1]}"
        records = self.folder.glob("run/captures/[!r]*/*/pass.json")
        passes = {p.parent.name: p.stat().st_mtime_ns for p in records}
        return Ended(self.process.returncode, *streams, passes)


@dataclass(frozen=True)
class Ended:
    """What a command line left behind."""

    code: int
    out: str
    err: str
    passes: dict[str, int]
    """The finished passes of the failing side, and when they were finished."""


@pytest.fixture(scope="module")
def rollout(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy capture, whose tokens the failing engines score."""
    folder = tmp_path_factory.mktemp("rollout")
    words = ("capture", "--engine", "hf", "-o", "run", "--prompts", prompts, "--max-new-tokens", 4)
    done = Running(folder, *words).wait()
    assert done.code == 0, done.err
    return folder / "run"


def score(
    folder: Path, spec: str, rollout: Path, real: bool = False, **environment: str
) -> Running:
    words = ("capture", "--engine", spec, "--tokens", rollout, "-o", "run")
    return Running(folder, *words, real=real, **environment)


Scored = Callable[[str], Ended]


@pytest.fixture(scope="module")
def scored(rollout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scored]:
    """Returns how an engine of SPECS or another one ended; skips where it is not installed."""
    folder, running = tmp_path_factory.mktemp("scored"), set()

    def run(number: int, spec: str) -> Ended:
        one = score(folder / str(number), spec, rollout)
        running.add(one)
        return one.wait()

    with ThreadPoolExecutor(2) as pool:
        ends = {spec: pool.submit(run, i, spec) for i, spec in enumerate(SPECS)}

        def end(spec: str) -> Ended:
            require_engine(spec.partition(":")[0])
            if spec not in ends:
                ends[spec] = pool.submit(run, len(ends), spec)
            return ends[spec].result()

        yield end
        pool.shutdown(wait=False, cancel_futures=True)
        for one in running:
            one.process.terminate()


def place(text: str, function: str) -> str:
    """The line of this folder's patches at which `text` says that a rank stands."""
    match = re.search(rf"rank_patches\.py:(\d+) in {function}", text)
    assert match, text
    return (HERE / "rank_patches.py").read_text().splitlines()[int(match[1]) - 1].strip()


def assert_error(done: Ended, code: int, *words: str) -> None:
    """One error, in words: a traceback is shown inside it, indented, or not at all."""
    assert done.code == code, done.out + done.err
    assert not re.search(r"^Traceback", done.err, re.MULTILINE), done.err
    assert done.err.count("error: ") == 1, done.err
    for word in words:
        assert word in done.err, done.err


@pytest.mark.parametrize(
    ("engine", "log"),
    [
        ("megatron", "rank1.log"),
        pytest.param("vllm", "(Worker_TP1 pid=", marks=pytest.mark.whole_matrix),
    ],
)
def test_the_killed_rank_is_named_and_not_the_one_that_lost_it(
    scored: Scored, engine: str, log: str
) -> None:
    done = scored(f"{engine}:tp=2,patch=rank_patches:killed")
    named = f"rank 1 of 2 of {engine}:patch=rank_patches:killed,tp=2 was killed by SIGKILL"
    assert_error(done, 3, named, log, "a rerun continues")
    assert "rank 0" not in done.err
    assert set(done.passes) == {"prefill"}


def test_a_rerun_goes_on_after_a_killed_rank(prompts: Path, tmp_path: Path) -> None:
    words = ("compare", "--rollout", "hf", "--train", "fsdp:dp=2,patch=rank_patches:killed")
    words += ("--prompts", prompts, "--run-dir", "run", "--edges", "prefill_vs_train")
    words += ("--max-new-tokens", 8)
    first = Running(tmp_path, *words).wait()
    named = "rank 1 of 2 of fsdp:dp=2,patch=rank_patches:killed was killed by SIGKILL, which"
    assert_error(first, 3, named, "last lines of rank1.log", "Loading weights", "a rerun continues")
    assert set(first.passes) == {"prefill"}
    (tmp_path / "healed").touch()
    again = Running(tmp_path, *words).wait()
    assert again.code == 0, again.out + again.err
    assert "loading hf" not in again.err, "the rollout is not captured again"
    assert set(again.passes) == {"prefill", "prefill.untapped", "prefill.repeat"}
    assert again.passes["prefill"] == first.passes["prefill"]


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.whole_matrix)])
def test_ctrl_c_ends_all_ranks_and_keeps_what_is_finished(
    rollout: Path, tmp_path: Path, real: bool
) -> None:
    run = score(tmp_path, "fsdp:dp=2,patch=rank_patches:asleep", rollout, real=real)
    deadline = time.monotonic() + 120
    while not (tmp_path / "asleep").exists():
        assert run.process.poll() is None, run.wait().err
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(running_in(tmp_path)) == 4, "the command, the launcher and two ranks"
    run.process.send_signal(signal.SIGINT)
    done = run.wait()
    assert_error(done, 130, "interrupted", "the same command continues from there")
    assert set(done.passes) == {"prefill"}


def test_a_port_that_is_taken(rollout: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = score(tmp_path, f"fsdp:dp=2,port={port}", rollout).wait()
    assert_error(done, 3, f"port {port}", "is in use", "leave `port` out")


def test_a_torch_without_gloo(rollout: Path, tmp_path: Path) -> None:
    """A torch that says that it was built without it; only workers are told so, all of them."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'rlk_align.engines.worker' in sys.orig_argv:\n"
        "    import torch.distributed\n"
        "    torch.distributed.is_gloo_available = lambda: False\n"
    )
    done = score(tmp_path, "fsdp:dp=2", rollout, PYTHONPATH=str(tmp_path)).wait()
    assert_error(done, 2, f"torch {torch.__version__} has no gloo", "install a torch with gloo")


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of its own that finds this one's packages."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, symlinks=True)
    packages = [p for p in sys.path if p.endswith("site-packages")]
    (site_packages(folder) / "other.pth").write_text("\n".join(packages) + "\n")
    return folder


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python3*/site-packages"))


def test_two_versions_of_torch_are_noted(cli: Cli, prompts: Path, other_python: Path) -> None:
    (site_packages(other_python) / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'rlk_align.engines.worker' in sys.orig_argv:\n"
        "    import torch\n"
        "    torch.__version__ = '2.99.0+other'\n"
    )
    other = f"hf:python={other_python}/bin/python"
    words = ("compare", "--prompts", prompts, "--run-dir", "run", "--max-new-tokens", 8)
    done = cli(*words, "--rollout", other, "--train", "hf", "--edges", "prefill_vs_train")
    assert done.code == 0, done.out + done.err
    (note,) = [note for note in done.verdict["notes"] if "torch" in note]
    assert f"rollout 2.99.0+other, train {torch.__version__}" in note
    engines = done.verdict["engines"]
    assert engines["rollout"]["environment"]["torch"] == "2.99.0+other"
    assert engines["rollout"]["options"]["python"] == f"{other_python}/bin/python"


def test_a_torch_that_is_too_old(rollout: Path, tmp_path: Path, other_python: Path) -> None:
    old = tmp_path / "environment"
    shutil.copytree(other_python, old, symlinks=True)
    record = site_packages(old) / "torch-2.4.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    python = old / "bin/python"
    done = score(tmp_path, f"hf:python={python}", rollout).wait()
    install = f"{python} -m pip install 'torch"
    assert_error(done, 2, f"python={python} lacks", ">=2.11 (has 2.4.0)", install)


def test_an_interpreter_without_what_is_needed(rollout: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    done = score(tmp_path, "hf:python=bare/bin/python", rollout).wait()
    assert_error(done, 2, "lacks", ">=2.11", "pyarrow", "bare/bin/python -m pip install")


@pytest.mark.parametrize(
    ("engine", "seconds", "log"),
    [("fsdp:dp=2", 6, "rank1.log"), ("vllm:tp=2", 8, "(Worker_TP1 pid=")],
)
def test_a_rank_that_sleeps_is_named_and_not_the_one_that_waits(
    scored: Scored, engine: str, seconds: int, log: str
) -> None:
    done = scored(f"{engine},timeout={seconds},patch=rank_patches:asleep")
    named = f"has made no progress for {seconds} s: rank 1 (process"
    assert_error(done, 3, named, log, "timeout=SECONDS")
    assert place(done.err, "nap") == "time.sleep(1000)"
    assert "rank 0" not in done.err
    assert set(done.passes) == {"prefill"}


def test_a_stopped_rank_is_named(scored: Scored) -> None:
    done = scored("fsdp:dp=2,timeout=6,patch=rank_patches:stopped")
    assert_error(
        done, 3, "has made no progress for 6 s: rank 1 (process", "is stopped", "rank1.log"
    )
    assert "rank 0" not in done.err


def test_ranks_that_wait_for_each_other_are_both_named(scored: Scored) -> None:
    done = scored("fsdp:dp=2,timeout=6,patch=rank_patches:at_cross_purposes")
    assert_error(done, 3, "rank 0 (process", "; rank 1 (process", "waits for others")
    assert place(done.err, "receive") == "dist.recv(torch.zeros(4), src=1)"
    assert place(done.err, "meet") == "dist.barrier()"


@pytest.mark.parametrize(
    ("engine", "who"),
    [("hf:", "the worker of hf"), ("fsdp:dp=2,", "rank 1 of 2 of fsdp:dp=2")],
    ids=["hf", "fsdp"],
)
def test_memory_that_runs_out(scored: Scored, engine: str, who: str) -> None:
    done = scored(f"{engine}patch=rank_patches:out_of_memory")
    assert_error(done, 3, who, "ran out of memory", "DefaultCPUAllocator", "fewer or shorter")
    assert re.search(r"^  .*rank_patches.py.* in <lambda>", done.err, re.MULTILINE), "its log"
    assert set(done.passes) == {"prefill"}


@NO_GPU
@pytest.mark.parametrize("engine", ["hf:", "fsdp:dp=2,", "megatron:tp=2,", "vllm:"])
def test_a_device_that_is_not_there(scored: Scored, engine: str) -> None:
    done = scored(f"{engine}device=cuda")
    assert_error(done, 2, f"device=cuda: torch {torch.__version__} sees 0 GPUs", "device=cpu")


def test_an_error_that_all_ranks_raise_is_said_once(scored: Scored) -> None:
    done = scored("megatron:tp=3")
    assert_error(done, 2, "tp=3: 8 heads cannot be divided among 3 ranks", "tp=1|2|4")


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/bin/true", "printed 'nothing'"),
        ("/bin/ls", "cannot access"),
        ("/etc/passwd", "cannot be started"),
    ],
)
def test_what_is_no_interpreter(scored: Scored, python: str, said: str) -> None:
    assert_error(scored(f"hf:python={python}"), 2, f"python={python}", said)
