"""Live models that compute with stale copies of their weights, which the precheck names with their
modules: the head's beside its parameter, and a projection's."""

import os
from pathlib import Path

import pytest
import sglang_env
from command import Cli, require_engine, write_few_prompts

pytestmark = [pytest.mark.whole_matrix, pytest.mark.timeout(600)]
LINEAR = ("layers.1.o_proj", "model.layers.1.self_attn.o_proj")
STALE = "has the other side's values: the copy is stale"


@pytest.mark.parametrize(
    ("patch", "parameter", "module", "kept"),
    [
        ("vllm_head", "lm_head", "lm_head", STALE),
        ("vllm_linear", *LINEAR, "is empty"),
        # SGLang's tied head is the embedding's module.
        pytest.param("sglang_head", "lm_head", "lm_head", STALE, marks=sglang_env.needed),
        pytest.param("sglang_linear", *LINEAR, STALE, marks=sglang_env.needed),
    ],
)
def test_a_stale_copy_is_named(
    cli: Cli, tmp_path: Path, patch: str, parameter: str, module: str, kept: str
) -> None:
    require_engine("vllm")
    engine = "vllm:" if patch.startswith("vllm") else f"{sglang_env.sglang()},"
    done = cli(
        *("compare", "--rollout", f"{engine}patch=copy_patches:{patch}", "--train", "hf"),
        *("--prompts", write_few_prompts(tmp_path / "few.jsonl"), "--max-new-tokens", 8),
        *("--run-dir", tmp_path / "run"),
        env={"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), _path()))},
    )
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    (mismatch,) = done.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == ("weights", parameter)
    assert mismatch["derived_copy"] == {"rollout": module}
    assert mismatch["detail"] == (
        f"derived copy: the rollout computes with a copy in {module}, whose parameter {kept}; "
        "columns 5 differ"
    )
    assert f"weights {parameter}, derived copy in {module} of the rollout" in done.out


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")
