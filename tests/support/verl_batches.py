"""Two samples as verl's trainers have them (0.9.1)."""

from typing import Any

import torch

from rlk_align.logs.writers import verl

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
            **{"temperature": 0.8, "top_p": 1.0, "top_k": -1, "dtype": "bfloat16"},
            "logprobs_mode": "processed_logprobs",
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
