"""Kernels are compiled before they are launched: in other processes, by threads, and as an engine
starts."""

from pathlib import Path

import pytest
from offline import run

pytest.importorskip("triton")

NAMES = ["_attention_hopper_kernel", "_rms_norm_fwd_kernel", "_swiglu_fwd_kernel"]


def test_the_asking_process_finds_what_a_server_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, lines = run("compiled_elsewhere.py")
    assert lines == {"tried:": ["3"], "found:": NAMES, "compiled:": []}


@pytest.mark.parametrize("when", ["--dies", "--later"])
def test_without_its_server_a_process_compiles_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, lines = run("compiled_elsewhere.py", when)
    assert lines == {"tried:": ["2"], "found:": [], "compiled:": NAMES[1:]}


def test_what_triton_compiles_without_waiting_is_awaited_by_its_launch_or_at_the_end() -> None:
    status, lines = run("compiled_behind.py")
    assert status == 0, lines
    assert lines["submitted:"] == ["2"]
    assert lines["early:"] == []
    assert lines["done:"] == ["2"]


def test_an_engine_compiles_what_it_serves_with_while_it_starts() -> None:
    status, lines = run("served_ahead.py")
    assert lines["late:"] == []
    assert status == 0
    assert int(lines["compiled:"][0]) > 60
    # With its own cache and tables the engine launches what was expected.
    assert int(lines["expected:"][0]) > 20
    assert lines["unexpected:"] == ["0"]
    assert int(lines["latents:"][0]) > 10
    # By the tiles of both products and by sizes of groups, not by numbers of tokens.
    assert 10 < int(lines["sparse:"][0]) < 24


def test_what_was_not_compiled_while_it_started_is_noticed() -> None:
    status, lines = run("served_ahead.py", "--fault")
    assert status == 1
    assert {"_merge_kernel", "_pieces_hopper_kernel", "_grouped_kernel"} <= set(lines["late:"])
    assert "slots_kernel" in lines["late:"]
