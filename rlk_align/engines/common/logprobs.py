"""The log-prob of a given token, as the engines that leave it to us compute it."""

import numpy as np
import torch


def token_logprobs(
    logits: torch.Tensor, target: torch.Tensor, temperature: float = 1.0
) -> np.ndarray:
    """log softmax(logits / temperature)[target] in float32: `[N, V]`, `[N]` -> `[N]`."""
    logits = logits.detach()
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    logprob = torch.log_softmax(scaled, dim=-1)
    return logprob.gather(-1, target[:, None]).squeeze(-1).cpu().numpy()
