"""Each engine's table of places, compared with the operators that the kernels' integration replaces
in the live model, because the kernels' package cannot import the tool."""

import os
from pathlib import Path

import pytest
from command import Cli, require_engine

HERE = Path(__file__).parent


@pytest.mark.parametrize("engine", ["hf", "megatron", "vllm"])
def test_the_table_names_what_the_kernels_replace(
    cli: Cli, few_prompts: Path, tmp_path: Path, engine: str
) -> None:
    require_engine(engine)
    found = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    words = ("capture", "--prompts", few_prompts, "--max-new-tokens", 1)
    sampled = tmp_path / "sampled"
    if engine == "megatron":
        assert cli(*words, "--engine", "hf", "-o", sampled).code == 0
        words = ("capture", "--tokens", sampled)
    patch = f"{engine}:patch=places_patches:{engine}"
    done = cli(*words, "--engine", patch, "-o", tmp_path / "run", env={"PYTHONPATH": found})
    assert done.code == 0, done.err
