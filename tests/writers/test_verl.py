"""verl's batches, padded and jagged, of the shapes that its trainers make (0.9.1).

The package is no dependency; where it is installed its own DataProto is used.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlk_align.errors import DumpError
from rlk_align.writers import verl

PROMPTS = [[11, 12], [21, 22, 23]]
RESPONSES = [[31, 32, 33, 34], [41, 42, 43]]
MASK = [[1, 1, 0, 1], [1, 1, 1]]
"""A tool gave the third token of the first response."""
G = [[-0.5, -1.5, 0.0, -0.25], [-2.0, -0.75, -0.125]]
T = [[-0.625, -1.25, -3.0, -0.5], [-2.25, -0.5, -0.25]]
CONFIG = {
    "algorithm": {"rollout_correction": None},
    "actor_rollout_ref": {
        "rollout": {
            "temperature": 0.8,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs_mode": "processed_logprobs",
            "dtype": "bfloat16",
        }
    },
}


def padded() -> dict[str, torch.Tensor]:
    """As its earlier trainer has them: prompts on the right of 4 columns, responses on the left of
    5."""
    both = [[0] * (4 - len(p)) + [1] * len(p) for p in PROMPTS]
    there = [p + [1] * len(r) + [0] * (5 - len(r)) for p, r in zip(both, RESPONSES, strict=True)]

    def right(rows: list[list[Any]]) -> torch.Tensor:
        return torch.tensor([row + [0] * (5 - len(row)) for row in rows])

    return {
        "prompts": torch.tensor([[0] * (4 - len(p)) + p for p in PROMPTS]),
        "responses": right(RESPONSES),
        "attention_mask": torch.tensor(there),
        "response_mask": right(MASK),
        "rollout_log_probs": right(G),
        "old_log_probs": right(T),
    }


def jagged() -> dict[str, Any]:
    """As the V1 trainer has them."""
    rows = dict(zip(verl.FIELDS, (PROMPTS, RESPONSES, MASK, G, T), strict=True))
    tensors = {
        name: torch.nested.as_nested_tensor([torch.tensor(r) for r in values], layout=torch.jagged)
        for name, values in rows.items()
    }
    return tensors | {"uid": ["p", "q"]}


def tensor_dict() -> Any:
    """As `tq.kv_batch_get` gives them to it."""
    tensordict = pytest.importorskip("tensordict")
    uid = tensordict.NonTensorStack("p", "q")
    return tensordict.TensorDict(jagged() | {"uid": uid}, batch_size=2)


def data_proto() -> Any:
    """verl's own, with the samples' prompts."""
    protocol = pytest.importorskip("verl.protocol")
    uid = np.array(["p", "q"], dtype=object)
    return protocol.DataProto.from_dict(tensors=padded(), non_tensors={"uid": uid})


@pytest.mark.parametrize("make", [padded, jagged, tensor_dict, data_proto])
def test_a_batch(tmp_path: Path, imported_folder, make) -> None:
    path = verl.write(tmp_path, 3, make(), CONFIG)
    assert path.name == "step_000003_rank_0_of_1.jsonl"
    read = imported_folder(tmp_path)
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


def test_a_mask_after_rejection_is_told(tmp_path: Path, imported_folder) -> None:
    batch = padded() | {"response_mask": torch.tensor([[0] * 5, [1, 1, 1, 0, 0]])}
    verl.write(tmp_path, 0, batch, CONFIG, mask_rewritten=True)
    read = imported_folder(tmp_path)
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
def test_what_is_refused(tmp_path: Path, batch: Any, config: Any, said: str, fix: str) -> None:
    with pytest.raises(DumpError, match=said) as raised:
        verl.write(tmp_path, 0, batch, config)
    assert fix in raised.value.fix
    assert not list(tmp_path.iterdir())
