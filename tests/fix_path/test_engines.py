"""All embedded prompts with sampled continuations, every site and every log-prob, bit for bit:
vLLM's decode, its re-prefill, HF, FSDP2 and Megatron.

Apart from `make test` because it takes minutes: `make test-fix-path`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from bit_equal import assert_equal
from command import Cli, capture_of, require_engine

DEFAULT = ("hf", "megatron")
TRAINING = [
    pytest.param(
        train, dtype,
        marks=() if dtype == "bfloat16" and train in DEFAULT else pytest.mark.whole_matrix,
    )
    for dtype in ("bfloat16", "float32")
    for train in ("hf", "fsdp:dp=2", "megatron")
]  # fmt: skip
"""FSDP2, whose numbers are HF's, and in fp32 all trainers score a few prompts by default
(`test_layouts.py`), and vLLM half of them (`test_vllm_batches.py`)."""
ONE_OPTION = ("max_num_seqs=7", "max_num_batched_tokens=64", "enable_prefix_caching=1")
SCORING = (",".join(ONE_OPTION), *ONE_OPTION)
"""By default such batches are of a few prompts at every site (`test_layouts.py`), and of all of
them at the log-probs (`test_vllm_batches.py`)."""
TOKENS = 1500
"""Some 1,800 are sampled."""


@pytest.mark.parametrize(("train", "dtype"), TRAINING)
def test_rollout_is_training(
    compare: Cli, folder: Path, sampled: Callable[..., str], train: str, dtype: str
) -> None:
    require_engine(train.partition(":")[0])
    spec = f"{train}{',' if ':' in train else ':'}dtype={dtype},kernels=rlk"
    done = compare("--rollout", sampled(dtype), "--train", spec, "--run-dir", folder / "run")
    assert_equal(done, TOKENS)
    for role in ("rollout", "train"):
        assert set(capture_of(folder / "run", role).record.kernels.values()) == {"torch"}


@pytest.mark.whole_matrix
@pytest.mark.parametrize("options", SCORING)
def test_vllm_scores_the_same_in_every_batch(
    compare: Cli, folder: Path, sampled: Callable[..., str], options: str
) -> None:
    done = compare(
        *("--rollout", sampled("bfloat16"), "--run-dir", folder / "scored"),
        *("--train", f"vllm:dtype=bfloat16,kernels=rlk,{options}"),
        *("--edges", "prefill_vs_train,decode_vs_train"),
    )
    assert_equal(done, TOKENS, {"prefill_vs_train", "decode_vs_train"})


@pytest.mark.whole_matrix
def test_without_the_kernels_there_is_drift(compare: Cli, folder: Path) -> None:
    """The control group: the same command. Of few prompts and each trainer it is in
    `tests/cli/test_kernels.py`."""
    require_engine("vllm")
    require_engine("megatron")
    done = compare("--rollout", "vllm", "--train", "megatron", "--run-dir", folder / "off")
    assert done.code == 1
    assert done.verdict is not None
    edges = done.verdict["edges"]
    assert edges["decode_vs_train"]["bit_mismatches"] > 1000
    assert edges["decode_vs_train"]["max_abs_dlogp"] > 1e-3
    assert done.first is not None
