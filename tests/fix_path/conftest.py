"""The real engines with the kernels: vLLM samples once for each file, and the other engines are
compared with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bit_equal import Bits
from command import Cli, Outcome, command_line, require_engine, said_by, write_few_prompts

from rlk_align.data import data_path
from rlk_align.model.prompts import load_prompts
from rlk_align.model.tokenise import tokenise

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the runs of a module; later tests use the captures of earlier ones."""
    return tmp_path_factory.mktemp("fix-path")


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


@pytest.fixture(scope="module")
def compare(cli: Cli) -> Cli:
    def run(*args: object) -> Outcome:
        model = ("--model", data_path("model"))
        return cli("compare", *model, *args, "--contract", "bitwise", shared=False)

    return run


@pytest.fixture(scope="module")
def sampled(folder: Path, cli: Cli) -> Callable[..., str]:
    """A spec of the run in which vLLM sampled with the kernels, for all embedded prompts or a
    few."""

    def capture(dtype: str, few: bool = False) -> str:
        require_engine("vllm")
        run = folder / f"sampled-{dtype}-{'few' if few else 'all'}"
        if not run.exists():
            prompts = ("--prompts", write_few_prompts(folder / "few.jsonl")) if few else ()
            engine = f"vllm:dtype={dtype},kernels=rlk"
            done = cli("capture", "--engine", engine, *prompts, "-o", run, shared=False)
            assert done.code == 0, done.err
        return f"replay:path={run}"

    return capture


@pytest.fixture(scope="session")
def vllm_bits(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """What `vllm_bits.py` says of cases, in a process of its own; of each `step`-th prompt.

    The process starts warm, and does not compile; with `cold` it starts as a user's process does.
    """
    return _vllm_script("vllm_bits.py", tmp_path_factory)


@pytest.fixture(scope="session")
def vllm_draws(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """What `vllm_draws.py` says of cases, likewise."""
    return _vllm_script("vllm_draws.py", tmp_path_factory)


def _vllm_script(name: str, tmp_path_factory: pytest.TempPathFactory) -> Bits:
    require_engine("vllm")
    prompts = load_prompts(data_path("prompts.jsonl"))
    every = sorted(tokenise(data_path("model"), prompts).values(), key=len)

    def run(
        cases: list[dict[str, Any]], step: int = 1, cold: bool = False, **environment: str
    ) -> Any:
        folder = tmp_path_factory.mktemp("bits")
        common = {"model": str(data_path("model")), "prompts": every[::step], "new_tokens": 6}
        asked, answers = folder / "cases.json", folder / "answers.json"
        asked.write_text(json.dumps([common | case for case in cases]))
        words = [str(Path(__file__).with_name(name)), str(asked), str(answers)]
        variables = {"PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1"} | environment
        said_by(None if cold else "vllm", words, variables, timeout=500)
        return json.loads(answers.read_text())

    return run
