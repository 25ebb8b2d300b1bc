"""What the tests of the tool share: the embedded model, changed copies of it, and the CLI."""

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from command import Cli, command_line, write_few_prompts
from hypothesis import settings
from long_tests import mark_long

from rlk_align.data import data_path

# A busy machine must not fail a test.
settings.register_profile("rlk", deadline=None)
settings.load_profile("rlk")

# An import of TRL silences vLLM where nothing is said of this, and engines inherit it.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

_server: list[warm.Server] = []


def pytest_configure(config: pytest.Config) -> None:
    """One server of warm processes for the whole session, all workers of pytest together."""
    # An import makes objects that stay: to look for garbage among them takes a sixth of it.
    gc.disable()
    if not hasattr(config, "workerinput"):
        _server.append(warm.Server())


SLOWEST = (
    "tests/fix_path/test_pairs.py",
    "tests/fix_path/test_engines.py",
    "tests/real_runs/test_deepspeed.py",
    "tests/real_runs/test_production.py",
    "tests/real_runs/test_trl_loop.py",
    "tests/real_runs/test_healthy_pairs.py",
    "tests/real_runs/test_ranks.py",
    "tests/fix_path/test_vllm_batches.py",
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
    "tests/real_runs/test_selftest.py",
    "tests/cli/test_vllm.py",
    "tests/cli/test_interruptions.py",
    "tests/real_runs/test_planted_training.py",
    "tests/engines/test_families.py",
    "tests/engines/test_megatron.py",
    "tests/kernels/ops/linear_logp/test_operator.py",
    "tests/kernels/ops/linear_logp/test_workspace.py",
    "tests/real_runs/test_graft_passes.py",
    "tests/real_runs/test_corrected_mixture.py",
    "tests/real_runs/test_cold_starts.py",
)
"""Files that run first, so that short files fill up the end."""


@pytest.hookimpl(tryfirst=True)  # before those with the marker are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_long(items)
    ranks = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    while _server:
        _server.pop().end()


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
