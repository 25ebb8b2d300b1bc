"""How far a choice of experts deviates from the scores on which it is based.

N = rows, E = experts, K = experts of a row, G = groups of experts
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from safetensors import SafetensorError

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import Site
from rlk_align.model.stored import stored_tensors


@dataclass(frozen=True, slots=True)
class Routers:
    """How the routers of a checkpoint choose."""

    model: Path
    shape: ModelShape

    def scores(self, choice: Site, logits: torch.Tensor) -> torch.Tensor | None:
        """Returns the `scores` of a router's logits; `choice` is the site of its experts. Returns
        None where the checkpoint's correction cannot be read."""
        if not choice.operator.weight:
            return scores(logits, None)
        modules = self.shape.family.modules
        try:
            stored = stored_tensors(self.model, modules)[tensor_name(choice.parameter, modules)]
            return scores(logits, stored.load(), self.shape.family.sigmoid)
        except (ModelError, KeyError, OSError, SafetensorError):
            return None  # A recorded run may have been moved away from its checkpoint.


def scores(
    logits: torch.Tensor, correction: torch.Tensor | None, sigmoid: bool = True
) -> torch.Tensor:
    """Returns the scores by which the experts of a row are chosen, float64 `[N, E]`: the logits or,
    where a family corrects its scores, their sigmoid or softmax plus the correction, `[E]` or
    `[1, E]`."""
    exact = logits.double()
    if correction is None:
        return exact
    return (exact.sigmoid() if sigmoid else exact.softmax(dim=1)) + correction.double()


def beyond_choice(
    scores_NE: torch.Tensor, chosen_NK: torch.Tensor, shape: ModelShape
) -> torch.Tensor:
    """Returns by how much the best omitted expert exceeds the worst chosen one, float64 `[N, 1]`: 0
    where the k best experts are chosen, infinite where an id is chosen twice or names no expert.

    Where experts are chosen from selected groups alone, the selection is not known: any groups that
    contain the chosen experts may have been selected. For each such selection the result is the
    larger of two excesses: of an omitted expert of these groups over a chosen one, and of an
    omitted group over a selected one. The smallest result of all selections counts.
    """
    ordered = chosen_NK.sort(dim=1).values
    wrong = ((ordered[:, 1:] == ordered[:, :-1]).any(1)) | (ordered[:, 0] < 0)
    wrong |= ordered[:, -1] >= scores_NE.shape[1]
    at = chosen_NK.clamp(0, scores_NE.shape[1] - 1)
    least = scores_NE.gather(1, at).amin(dim=1)
    left_out = scores_NE.scatter(1, at, -torch.inf)
    if shape.top_groups == shape.groups:
        beyond = left_out.amax(dim=1) - least
    else:
        beyond = _beyond_groups(scores_NE, at, left_out, least, shape)
    return beyond.clamp(min=0).where(~wrong, torch.inf)[:, None]


def _beyond_groups(
    scores_NE: torch.Tensor,
    chosen_NK: torch.Tensor,
    left_out_NE: torch.Tensor,
    least_N: torch.Tensor,
    shape: ModelShape,
) -> torch.Tensor:
    groups = shape.groups
    group_NG = scores_NE.unflatten(1, (groups, -1)).topk(2, dim=2).values.sum(dim=2)
    best_NG = left_out_NE.unflatten(1, (groups, -1)).amax(dim=2)
    used_NG = torch.zeros_like(group_NG, dtype=torch.bool)
    used_NG.scatter_(1, chosen_NK * groups // scores_NE.shape[1], True)
    beyond = torch.full_like(least_N, torch.inf)
    for selected in combinations(range(groups), shape.top_groups):
        inside = torch.zeros(groups, dtype=torch.bool, device=scores_NE.device)
        inside[list(selected)] = True
        of_experts = best_NG[:, inside].amax(dim=1) - least_N
        of_groups = group_NG[:, ~inside].amax(dim=1) - group_NG[:, inside].amin(dim=1)
        fits = ~(used_NG & ~inside).any(dim=1)
        beyond = torch.minimum(beyond, torch.maximum(of_experts, of_groups).where(fits, torch.inf))
    return beyond
