"""On a GPU, the real vLLM with the kernels: what it says of a sequence does not depend on who else
asks, nor on whether it decodes or scores, nor on whether it is compiled or replays CUDA graphs.

The model: the folder that RLK_TEST_MODEL names, else the embedded one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("ask_vllm.py")
GRAPHS: dict[str, Any] = {}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "graphs": GRAPHS,
    "chunks of 128": {"max_num_batched_tokens": 128, "enable_prefix_caching": False},
}
"""Mode -> the LLM's options. Prefixes are cached but in the last."""


def _there() -> bool:
    try:
        import vllm  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


pytestmark = pytest.mark.skipif(not _there(), reason="needs vLLM and an NVIDIA GPU")


def _model() -> str:
    from rlk_align.data import data_path

    return os.environ.get("RLK_TEST_MODEL") or str(data_path("model"))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each mode said, and vLLM's own kernels; all at once, each in a process."""
    folder = tmp_path_factory.mktemp("said")
    cases = {name: {"kernels": "on", "options": options} for name, options in MODES.items()}
    cases["own kernels"] = {"kernels": "off", "options": GRAPHS}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        )
    }
    running = {}
    for name, case in cases.items():
        at = folder / name.replace(" ", "-")
        at.mkdir()
        (at / "case.json").write_text(json.dumps(case | {"model": _model()}))
        running[name] = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(at / "case.json"), str(at / "found.json")],
            env=environment | {"VLLM_CACHE_ROOT": str(at / "cache")},
            stdout=(at / "log").open("w"),
            stderr=subprocess.STDOUT,
        )
    answers = {}
    for name, process in running.items():
        at = folder / name.replace(" ", "-")
        assert process.wait(timeout=500) == 0, (at / "log").read_text()[-6000:]
        answers[name] = json.loads((at / "found.json").read_text())
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_a_needle_is_the_same_alone_and_in_any_batch(said: Any, mode: str) -> None:
    alone, *in_batches = said[mode]["needle"]
    assert len(in_batches) == 4
    assert all(answers == alone for answers in in_batches)


@pytest.mark.parametrize("mode", MODES)
def test_one_at_a_time_is_all_at_once(said: Any, mode: str) -> None:
    answers = said[mode]
    assert len(answers["together"]) == 40
    assert answers["alone"] == answers["together"]


@pytest.mark.parametrize("mode", MODES)
def test_decoding_is_scoring(said: Any, mode: str) -> None:
    answers = said[mode]
    assert len(answers["decode"]) == 40
    assert answers["decode"] == answers["prefill"] == answers["scored alone"]


@pytest.mark.parametrize("mode", MODES)
def test_asking_for_more_tokens_changes_none(said: Any, mode: str) -> None:
    assert said[mode]["top"] == said[mode]["together"]


def test_modes_agree(said: Any) -> None:
    first = {k: v for k, v in said["eager"].items() if k != "replaced"}
    for mode in MODES:
        assert {k: said[mode][k] for k in first} == first, mode


def test_every_operator_is_replaced(said: Any) -> None:
    config = json.loads((Path(_model()) / "config.json").read_text())
    assert said["eager"]["replaced"] == 4 + 15 * config["num_hidden_layers"]


def test_without_the_kernels_bits_move(said: Any) -> None:
    """The control: these questions tell."""
    stock = said["own kernels"]
    assert stock["decode"] != stock["prefill"]
