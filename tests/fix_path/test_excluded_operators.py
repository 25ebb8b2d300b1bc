"""Each operator is excluded once, so that the engine's own kernel computes it. It is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command import Cli, capture_of, require_engine, write_few_prompts
from engine_pairs import FACTS
from rlk_kernels.integrations.operators import OPERATORS

from rlk_align.data import data_path
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites

pytestmark = pytest.mark.whole_matrix
OF_MODEL = {site.op for site in model_sites(read_shape(data_path("model")))}
ENGINES = ("hf", "megatron", "vllm")
RARE = {("megatron", op) for op in ("q_norm", "k_norm", "final_norm")}
"""(engine, operator) whose rounding differs in so few rows that only all prompts show it."""


@pytest.mark.parametrize(
    ("engine", "op"),
    [
        (engine, op)
        for engine in ENGINES
        for op in OPERATORS
        if op in OF_MODEL and op not in FACTS[engine].together
    ],
)
def test_the_excluded_operator_is_named(
    compare: Cli, folder: Path, sampled: Callable[..., str], engine: str, op: str
) -> None:
    require_engine(engine)
    rollout = sampled("bfloat16", few=(engine, op) not in RARE)
    done = compare(
        *("--rollout", rollout, "--run-dir", folder / "left"),
        *("--train", f"{engine}:kernels=rlk,except={op}", "--edges", "prefill_vs_train"),
        # Values are not needed to name the operator.
        *("--sites", "logprob"),
    )
    if op in FACTS[engine].alike:
        assert done.code == 0, done.out
        assert done.first is None
    else:
        assert done.code == 1
        assert done.first is not None, "nothing differs"
        assert done.first.rpartition(".")[2] == op
    own = [s for s, kind in capture_of(folder / "left", "train").record.kernels.items()
           if kind == "own"]  # fmt: skip
    assert op in {s.rpartition(".")[2] for s in own}


def test_a_product_of_ranks_that_is_left_to_the_engine_is_named(compare: Cli, folder: Path) -> None:
    """Ranks add up rounded partial sums of one operator."""
    require_engine("megatron")
    prompts = write_few_prompts(folder / "few.jsonl")
    done = compare(
        *("--rollout", "hf:kernels=rlk", "--train", "megatron:tp=2,kernels=rlk,except=down_proj"),
        *("--prompts", prompts, "--max-new-tokens", 8, "--run-dir", folder / "ranks"),
    )
    assert done.code == 1, done.out + done.err
    assert done.first == "layers.0.down_proj"
