"""The real engines with the kernels in them: vLLM samples once for a file, and all are held against
it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cli, Outcome, command_line, require_engine, write_few_prompts

from rlk_align.data import data_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of a module's runs lie: what one captured, the next takes."""
    return tmp_path_factory.mktemp("fix-path")


@pytest.fixture(scope="module")
def compare(folder: Path) -> Cli:
    inner = command_line(folder)

    def run(*args: object) -> Outcome:
        model = ("--model", data_path("model"))
        return inner("compare", *model, *args, "--contract", "bitwise", shared=False)

    return run


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Callable[..., str]:
    """The run in which vLLM sampled with the kernels, as a spec: all embedded prompts, or a few."""
    inner = command_line(folder, "command")

    def capture(dtype: str, few: bool = False) -> str:
        require_engine("vllm")
        run = folder / f"sampled-{dtype}-{'few' if few else 'all'}"
        if not run.exists():
            prompts = ("--prompts", write_few_prompts(folder / "few.jsonl")) if few else ()
            engine = f"vllm:dtype={dtype},kernels=rlk"
            done = inner("capture", "--engine", engine, *prompts, "-o", run, shared=False)
            assert done.code == 0, done.err
        return f"replay:path={run}"

    return capture
