"""The log-probs of several tokens of a row, as rollout engines report them, from its logits.

N = rows, K = tokens of each row, V = vocabulary.
"""

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.operators import Counted

MOST = 1024
"""The most tokens of a row whose log-probs are computed in one reading of its logits."""


class TokenLogprobs(Counted):
    """Computes log-probs in the place of an engine's functions, and counts the calls."""

    def __call__(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """fp32 [N, K]: the log-probs of logits[N, V] at token_ids[N, K]."""
        self.count()
        first, others = token_ids[:, 0].contiguous(), token_ids[:, 1:]
        if not others.shape[1]:
            return profile.logp(logits, first)[:, None]
        parts = [profile.logp_and_more(logits, first, ids) for ids in others.split(MOST, dim=1)]
        return torch.cat([parts[0][0], *(id_logprobs for _, id_logprobs in parts)], dim=1)
