"""Each operator in turn is excluded, so that the engine's own kernel computes it: it is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command import Cli, capture_of, require_engine
from rlk_kernels.integrations.operators import OPERATORS

pytestmark = pytest.mark.whole_matrix
TOGETHER = {
    # Left to an engine with the first of those that it computes by one product or one function.
    "hf": {"k_rope"},
    "megatron": {"k_proj", "v_proj", "up_proj", "k_rope"},
    "vllm": {"k_proj", "v_proj", "up_proj", "k_rope"},
}
ALIKE = {
    # What an engine's own computes as the profile says anyway: a copy, and on CPUs vLLM's rotation.
    "hf": {"embed"},
    "megatron": {"embed"},
    "vllm": {"embed", "q_rope"},
}
RARE = {("megatron", op) for op in ("q_norm", "k_norm", "final_norm")}
"""Whose own rounds otherwise in so few rows that it takes all prompts to see one."""


@pytest.mark.parametrize(
    ("engine", "op"),
    [(e, op) for e in TOGETHER for op in OPERATORS if op not in TOGETHER[e]],
)
def test_the_excluded_operator_is_named(
    compare: Cli, folder: Path, sampled: Callable[..., str], engine: str, op: str
) -> None:
    require_engine(engine)
    rollout = sampled("bfloat16", few=(engine, op) not in RARE)
    done = compare(
        *("--rollout", rollout, "--run-dir", folder / "left"),
        *("--train", f"{engine}:kernels=rlk,except={op}", "--edges", "prefill_vs_train"),
        # Values are not needed to name it.
        *("--sites", "logprob"),
    )
    if op in ALIKE[engine]:
        assert done.code == 0, done.out
        assert done.first is None
    else:
        assert done.code == 1
        assert done.first is not None, "nothing differs"
        assert done.first.rpartition(".")[2] == op
    own = [s for s, kind in capture_of(folder / "left", "train").record.kernels.items()
           if kind == "own"]  # fmt: skip
    assert op in {s.rpartition(".")[2] for s in own}
