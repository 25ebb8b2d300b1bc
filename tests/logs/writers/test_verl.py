"""verl's batches, padded and jagged, of the shapes that its trainers make (0.9.1).

The package is no dependency; where it is installed its own DataProto is used.
"""

from typing import Any

import numpy as np
import pytest
import torch
from verl_batches import CONFIG, MASK, PROMPTS, RESPONSES, G, T, jagged, padded

from rlk_align.errors import DumpError
from rlk_align.logs.writers import verl


def tensor_dict() -> Any:
    """The batch as `tq.kv_batch_get` returns it."""
    tensordict = pytest.importorskip("tensordict")
    uid = tensordict.NonTensorStack("p", "q")
    return tensordict.TensorDict(jagged() | {"uid": uid}, batch_size=2)


def data_proto() -> Any:
    """verl's own DataProto, with the samples' prompts."""
    protocol = pytest.importorskip("verl.protocol")
    uid = np.array(["p", "q"], dtype=object)
    return protocol.DataProto.from_dict(tensors=padded(), non_tensors={"uid": uid})


@pytest.mark.parametrize("make", [padded, jagged, tensor_dict, data_proto])
def test_a_batch(imported_step, make) -> None:
    read = imported_step(verl.records(make(), CONFIG, train_version=3))
    assert read.token_ids.tolist() == [*PROMPTS[0], *RESPONSES[0], *PROMPTS[1], *RESPONSES[1]]
    assert read.prompt_lengths.tolist() == [2, 3]
    assert read.scored.tolist() == [0, 0, *MASK[0], 0, 0, 0, *MASK[1]]
    assert read.rollout[read.scored].tolist() == [-0.5, -1.5, -0.25, *G[1]]
    assert read.rollout_missing.sum() == 5 + 1
    assert read.train[~read.train_missing].tolist() == [*T[0], *T[1]]
    assert read.train_versions.tolist() == [3, 3]
    assert read.sampling[0].model_dump() == {
        **{"temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": None},
        "logprobs_mode": "processed_logprobs",
    }
    assert not read.mask_rewritten.any()
    if make is not padded:
        assert list(read.groups) == ["p", "q"]


def test_a_mask_after_rejection_is_told(imported_step) -> None:
    batch = padded() | {"response_mask": torch.tensor([[0] * 5, [1, 1, 1, 0, 0]])}
    read = imported_step(verl.records(batch, CONFIG, mask_rewritten=True))
    assert read.mask_rewritten.all()
    assert (~read.rollout_missing).sum() == 3 + 3


def without(name: str) -> dict[str, torch.Tensor]:
    return {k: v for k, v in padded().items() if k != name}


BYPASS = CONFIG | {"algorithm": {"rollout_correction": {"bypass_mode": True}}}


@pytest.mark.parametrize(
    ("batch", "config", "said", "fix"),
    [
        (padded(), BYPASS, "bypass mode", "bypass_mode=False"),
        (without("rollout_log_probs"), CONFIG, "no rollout_log_probs", "calculate_log_probs=True"),
        (without("old_log_probs"), CONFIG, "no old_log_probs", "after old_log_prob"),
        (without("attention_mask"), CONFIG, "no attention_mask", "padding"),
    ],
)
def test_what_is_refused(batch: Any, config: Any, said: str, fix: str) -> None:
    with pytest.raises(DumpError, match=said) as raised:
        verl.records(batch, config)
    assert fix in raised.value.fix
