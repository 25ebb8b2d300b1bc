"""All embedded prompts with sampled continuations, every site and every log-prob, bit for bit:
vLLM's decode, its re-prefill, HF, FSDP2 and Megatron; and requests that no pair of `test_pairs.py`
makes. `make demo` compares as many tokens with Megatron.

`make test-fix-path` runs this folder, because it takes minutes.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from bit_equal import assert_equal
from command import Cli, capture_of, require_engine, write_few_prompts

TOKENS = 1500
"""About 1,800 are sampled."""


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("train", "dtype"), product(("hf", "fsdp:dp=2", "megatron"), ("bfloat16", "float32"))
)
def test_rollout_is_training(
    compare: Cli, folder: Path, sampled: Callable[..., str], train: str, dtype: str
) -> None:
    require_engine(train.partition(":")[0])
    spec = f"{train}{',' if ':' in train else ':'}dtype={dtype},kernels=rlk"
    done = compare("--rollout", sampled(dtype), "--train", spec, "--run-dir", folder / "run")
    assert_equal(done, TOKENS)
    for role in ("rollout", "train"):
        kernels = capture_of(folder / "run", role).record.kernels
        assert set(kernels.values()) == {"torch"}
        # All sites except the residual additions, which are the same in every engine.
        assert len(kernels) == 4 * 15 + 4


@pytest.mark.parametrize("train", ["hf", "megatron"])
def test_processed_logprobs_are_those_at_the_temperature(
    compare: Cli, folder: Path, train: str
) -> None:
    """As RL frameworks sample: log-probs of vLLM are those of the logits that it drew from."""
    require_engine("vllm")
    prompts = write_few_prompts(folder / "few.jsonl")
    done = compare(
        *("--rollout", "vllm:kernels=rlk,temperature=0.7,logprobs=processed"),
        *("--train", f"{train}:kernels=rlk,temperature=0.7", "--edges", "decode_vs_train"),
        *("--prompts", prompts, "--max-new-tokens", 8, "--run-dir", folder / "processed"),
    )
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    edge = done.verdict["edges"]["decode_vs_train"]
    assert edge["tokens"] == done.verdict["tokens"] > 30
    assert edge["bit_mismatches"] == 0


def test_a_rank_without_a_sample_computes_no_logprob(compare: Cli, folder: Path) -> None:
    """One prompt for two ranks: the second rank has no call, which is not an error."""
    (one := folder / "one.jsonl").write_text('{"id": "p", "prompt": "Once upon a time"}\n')
    done = compare(
        *("--rollout", "hf:kernels=rlk", "--train", "fsdp:dp=2,kernels=rlk"),
        *("--prompts", one, "--max-new-tokens", 4, "--run-dir", folder / "one"),
    )
    assert_equal(done, 1)
