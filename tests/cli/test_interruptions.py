"""Real processes that are killed, interrupted, or run out of disk."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import warm
from command import Cli, running_in

ARGS = ("--max-new-tokens", "12", "--edges", "prefill_vs_train")
PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}


def command(few_prompts: Path, *args: object) -> list[str]:
    words = ("compare", "--prompts", few_prompts, *ARGS, *args)
    return [sys.executable, "-m", "rlk_align", *map(str, words)]


START = {
    "warm": None,
    "real": [],
    # as a shell starts what it puts into the background
    "real, SIGINT ignored": ["bash", "-c", 'trap "" INT; exec "$@"', "_"],
}


@pytest.fixture
def waiting(few_prompts: Path, tmp_path: Path, request: pytest.FixtureRequest):
    """A compare whose worker hangs inside the model, the worker's processes, and what was said;
    killed at the end whatever happens."""
    words = command(few_prompts, "--rollout", "hf:patch=patches:wait_forever")
    before = START[getattr(request, "param", "warm")]
    environment = os.environ | PATCHES
    with tempfile.TemporaryFile("w+") as said:
        if before is None:
            words = ["-m", warm.COMMAND, *words[3:]]
            process = warm.start("command", words, environment, said, said, tmp_path)
        else:
            process = subprocess.Popen(
                [*before, *words], cwd=tmp_path, env=environment, stdout=said, stderr=said
            )
        deadline = time.monotonic() + 120
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "the worker did not reach the model"
            time.sleep(0.1)
        workers = [p for p in running_in(tmp_path) if p.pid != process.pid]
        assert workers, "the engine runs in a process of its own"
        yield process, workers, said
        for p in workers:
            if p.is_running():
                p.kill()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("waiting", "number"),
    [
        ("warm", signal.SIGINT),
        ("warm", signal.SIGTERM),
        ("real, SIGINT ignored", signal.SIGINT),
    ],
    indirect=["waiting"],
)
def test_an_interrupted_run_ends_its_worker(waiting, number: signal.Signals) -> None:
    process, workers, said = waiting
    process.send_signal(number)
    code = process.wait(30)
    said.seek(0)
    err = said.read()
    assert code == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not psutil.wait_procs(workers, timeout=10)[1]


@pytest.mark.parametrize("waiting", ["real"], indirect=True)
def test_a_worker_does_not_outlive_its_parent(waiting) -> None:
    process, workers, _ = waiting
    process.kill()
    assert not psutil.wait_procs(workers, timeout=10)[1]


def test_a_killed_worker_loses_nothing_already_captured(
    cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    args = ("compare", "--prompts", few_prompts, *ARGS, "--run-dir", run, "--rollout", "hf")
    train = ("--train", "hf:patch=patches:die_in_prefill")
    (tmp_path / "die").touch()
    killed = cli(*args, *train, env=PATCHES, shared=False)
    assert killed.code == 3, killed.err
    assert "SIGKILL" in killed.err
    assert "worker.log" in killed.err
    assert "Traceback" not in killed.err
    (rollout,) = (run / "captures").glob("rollout-*")
    finished = {p.parent.name: p.stat().st_mtime_ns for p in rollout.glob("*/pass.json")}
    assert set(finished) == {"decode.untapped", "prefill", "prefill.untapped", "prefill.repeat"}
    (tmp_path / "die").unlink()
    again = cli(*args, *train, env=PATCHES, shared=False)
    assert again.code == 0, again.out + again.err
    assert again.err.count("loading hf") == 1, "only the training side is captured again"
    assert finished == {p.parent.name: p.stat().st_mtime_ns for p in rollout.glob("*/pass.json")}


def test_a_full_disk_is_said_and_finished_passes_stay(
    cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the disk: the write itself fails."""
    run = tmp_path / "run"
    words = command(few_prompts, "--rollout", "hf", "--train", "hf", "--run-dir", run)[3:]
    (tmp_path / "sitecustomize.py").write_text(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, resource.RLIM_INFINITY))\n"
    )
    done = cli(*words, env={"PYTHONPATH": str(tmp_path)}, shared=False)
    assert done.code == 3, done.err
    assert "could not be written" in done.err
    assert "a rerun continues from there" in done.err
    assert "Traceback" not in done.err
    (capture,) = (run / "captures").iterdir()
    assert (capture / "decode.untapped/pass.json").exists()
    assert not (capture / "prefill").exists()
    whole = cli(*words, shared=False)
    assert whole.code == 0, whole.out + whole.err


def test_two_runs_in_one_folder(waiting, cli: Cli, few_prompts: Path, tmp_path: Path) -> None:
    (folder,) = (tmp_path / "rlk-runs").glob("compare-*")
    done = cli("compare", "--prompts", few_prompts, *ARGS, "--rollout", "hf", "--run-dir", folder)
    assert done.code == 3
    assert "in use" in done.err
