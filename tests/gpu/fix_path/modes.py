"""Runs `ask_vllm.py` in several modes at once, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def runs() -> bool:
    """Whether vLLM and a GPU are there."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


def environment() -> dict[str, str]:
    """In which a process imports this checkout."""
    paths = (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def ask_all(folder: Path, model: str) -> dict[str, dict[str, Any]]:
    """What each mode said with the kernels, and "own kernels" without."""
    cases = {name: {"kernels": "on", "options": options} for name, options in MODES.items()}
    cases["own kernels"] = {"kernels": "off", "options": GRAPHS}
    running = {}
    for name, case in cases.items():
        at = folder / name.replace(" ", "-")
        at.mkdir()
        (at / "case.json").write_text(json.dumps(case | {"model": model}))
        running[name] = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(at / "case.json"), str(at / "found.json")],
            env=environment() | {"VLLM_CACHE_ROOT": str(at / "cache")},
            stdout=(at / "log").open("w"),
            stderr=subprocess.STDOUT,
        )
    answers = {}
    for name, process in running.items():
        at = folder / name.replace(" ", "-")
        assert process.wait(timeout=500) == 0, (at / "log").read_text()[-6000:]
        answers[name] = json.loads((at / "found.json").read_text())
    return answers
