"""The rank that is blamed for a failure, its error, and errors before anything starts."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlk_align.engines.process import interpreter
from rlk_align.engines.process.job import Events, error_of, failed
from rlk_align.engines.process.launch import children_watched, death, first_failure, launch
from rlk_align.engines.process.ranks import check_device, join
from rlk_align.engines.process.versions import versions
from rlk_align.engines.registry import engine_info
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, EngineFailed, MissingDependency, RlkError


def reported(folder: Path, *errors: tuple[int | None, RlkError]) -> list[dict]:
    """Errors by rank, after a round trip through the file of events."""
    events = Events(folder)
    for rank, error in errors:
        events.send_error(error, rank)
    return Events(folder).unread()


def blamed(folder: Path, codes: dict[int, int], *errors: tuple[int | None, RlkError]) -> RlkError:
    return first_failure(codes, reported(folder, *errors), EngineSpec.parse("fsdp:dp=3"), folder)


LOST = EngineFailed("lost its peer", "")


def test_a_killed_rank_goes_before_one_that_lost_it(tmp_path: Path) -> None:
    (tmp_path / "rank2.log").write_text("the last words\n")
    error = blamed(tmp_path, {0: 3, 2: -9}, (0, LOST))
    assert "rank 2 of 3 of fsdp:dp=3 was killed by SIGKILL" in error.message
    assert "  the last words" in error.message
    assert "rank2.log" in error.fix


def test_a_rank_that_ends_without_a_word_goes_before_one_that_lost_it(tmp_path: Path) -> None:
    assert "rank 1 of 3 of fsdp:dp=3 ended with code 7" in str(
        blamed(tmp_path, {0: 3, 1: 7}, (0, LOST))
    )


def test_the_first_of_several_reports_counts(tmp_path: Path) -> None:
    first = BadOption("attn=nonsense is unknown", "choose another")
    error = blamed(tmp_path, {0: 3, 1: 2, 2: -signal.SIGTERM}, (1, first), (0, LOST))
    assert isinstance(error, BadOption)
    assert (error.message, error.fix) == (first.message, first.fix)


def test_ranks_that_torchrun_ended_are_not_to_blame(tmp_path: Path) -> None:
    assert "rank 1" in str(blamed(tmp_path, {0: -signal.SIGTERM, 1: -signal.SIGSEGV}))
    assert "SIGTERM" in str(blamed(tmp_path, {0: -signal.SIGTERM}))


@pytest.mark.parametrize("first", [0, 1])
def test_of_ranks_that_were_killed_the_first_is_to_blame(tmp_path: Path, first: int) -> None:
    """An engine that loses a rank may kill the remaining ranks."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=time.sleep, args=[60], name=f"Worker-{i}") for i in range(2)]
    for rank in ranks:
        rank.start()

    def lose() -> None:
        with children_watched(EngineSpec.parse("vllm:tp=2"), tmp_path):
            for rank in (ranks[first], ranks[1 - first]):
                assert rank.pid
                os.kill(rank.pid, signal.SIGKILL)
                time.sleep(0.5)
            raise RuntimeError("lost a rank")

    with pytest.raises(EngineFailed, match=f"Worker-{first} of 2 of vllm:tp=2 was killed by SIG"):
        lose()


def test_an_error_with_every_rank_alive_is_the_engine_s_own(tmp_path: Path) -> None:
    rank = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
    rank.start()
    try:
        with (
            pytest.raises(ValueError, match="of its own"),
            children_watched(EngineSpec.parse("vllm:tp=2"), tmp_path),
        ):
            raise ValueError("of its own")
    finally:
        rank.terminate()


def test_memory_is_mentioned_for_sigkill_alone() -> None:
    assert "memory" in death(-signal.SIGKILL)
    assert death(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert death(4) == "ended with code 4"


def test_an_error_of_a_kind_of_its_own_keeps_its_exit_code(tmp_path: Path) -> None:
    class NoLicence(MissingDependency):
        """An error of a third-party engine."""

    (event,) = reported(tmp_path, (None, NoLicence("no licence", "buy one")))
    error = error_of(event)
    assert type(error) is MissingDependency
    assert (error.message, error.fix, error.exit_code) == ("no licence", "buy one", 2)


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    events, path = Events(tmp_path), tmp_path / "events.jsonl"
    assert events.unread() == []
    path.write_bytes(b'{"stage": "a\xc3\xa9"}\n{"stage"')
    assert events.unread() == [{"stage": "aé"}]
    path.write_bytes(path.read_bytes() + b': "b"}\n')
    assert events.unread() == [{"stage": "b"}]
    assert events.unread() == []


def test_the_lines_of_one_process_of_a_shared_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    assert "(no output)" in str(failed("x", log))
    log.write_text("(W0 pid=1) one\n\n(W1 pid=12) two\n(W0 pid=1) three\n" + "y" * 9000)
    assert "two" not in str(failed("x", log, pid=1))
    assert "(W0 pid=1) one\n  (W0 pid=1) three" in str(failed("x", log, pid=1))
    whole = str(failed("x", log, pid=3))
    assert "two" in whole
    assert len(whole) < 1000


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("hf", ("the engine",)),
        ("fsdp", ("the engine",)),
        ("megatron:tp=2", ("rank 0", "rank 1")),
        ("vllm:tp=2", ("rank 0", "rank 1")),
        ("vllm", ("the engine",)),
    ],
)
def test_the_processes_of_an_engine(spec: str, names: tuple[str, ...]) -> None:
    assert EngineSpec.parse(spec).processes == names


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1", "meta"])
def test_an_unknown_device(device: str) -> None:
    with pytest.raises(BadOption, match="is unknown"):
        check_device(device)


def test_a_device_that_is_not_there() -> None:
    check_device(None)
    check_device("cpu")
    with pytest.raises(MissingDependency, match=r"sees \d+ GPUs"):
        check_device(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda:0")]
)
def test_a_backend_that_torch_lacks(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    """`join` with a torch that was built without the backend."""
    for name in ("gloo", "nccl"):
        monkeypatch.setattr(dist, f"is_{name}_available", lambda name=name: name != backend)
    with pytest.raises(MissingDependency, match=f"has no {backend}"):
        join(device, 10.0)


def test_another_interpreter_sees_rlk_align_and_nothing_beside_it(tmp_path: Path) -> None:
    """An installed rlk-align is beside a torch that the other interpreter must not import."""
    package = tmp_path / "site-packages/rlk_align"
    for folder in (package, package.parent / "torch"):
        folder.mkdir(parents=True)
    for _ in range(2):
        alone = interpreter.package_path(tmp_path, package)
        assert [p.name for p in alone.iterdir()] == ["rlk_align"]
        assert (alone / "rlk_align").resolve() == package


def test_what_a_worker_needs_is_what_the_project_declares() -> None:
    names = {r.name for r in interpreter.requirements()}
    assert {"torch", "transformers", "numpy", "pyarrow", "pydantic", "safetensors"} <= names
    assert not names & {"typer", "rich", "jinja2", "vllm", "megatron-core", "pytest"}
    assert not names & {"rlk-kernels"}, "only some specs need it"


def test_an_engine_that_pins_an_older_package_than_rlk_align_needs(tmp_path: Path) -> None:
    installed = versions([r.name for r in interpreter.requirements()])
    python = tmp_path / "python"
    answer = {"python": "3.12.3", "versions": installed | {"transformers": "5.12.1"}}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    with pytest.raises(MissingDependency, match=r"transformers.*\(has 5\.12\.1\)"):
        interpreter.examine(str(python), "vllm")
    needs = engine_info("sglang").worker_needs
    assert interpreter.examine(str(python), "sglang", needs)["transformers"] == "5.12.1"
    answer["versions"]["transformers"] = "5.12.0"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    with pytest.raises(MissingDependency, match=r"transformers.*\(has 5\.12\.0\)"):
        interpreter.examine(str(python), "sglang", needs)


def test_a_python_that_is_too_old_and_one_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3.8.1"}\'\n')
    python.chmod(0o755)
    with pytest.raises(MissingDependency, match=r"is Python 3\.8\.1; rlk-align needs >=3\.11"):
        interpreter.examine(str(python), "vllm")
    python.write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(interpreter, "_TIMEOUT", 0.5)
    with pytest.raises(BadOption, match="no answer"):
        interpreter.examine(str(python), "vllm")


def test_a_port_that_is_none_is_the_users_mistake(tmp_path: Path) -> None:
    spec = EngineSpec.parse("fsdp:dp=2,port=99999")
    with pytest.raises(BadOption, match="port=99999 is not a port"):
        launch(tmp_path / "job.json", spec, Events(tmp_path))
