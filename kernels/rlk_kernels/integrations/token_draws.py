"""Tokens that rollout engines draw by `rlk_kernels.sample`, from a step's logits.

N = rows, V = vocabulary
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import rlk_kernels
from rlk_kernels.errors import KernelError
from rlk_kernels.integrations.operators import Counted

NO_TOKEN = -1
"""The id that a GPU gives to a row without a distribution."""


class NoDistribution(KernelError, ValueError):
    """A request whose logits have no distribution: NaN, +inf, or nothing above -inf."""

    def __init__(self, requests: Sequence[str]) -> None:
        more = f", and of {len(requests) - 1} more requests" if len(requests) > 1 else ""
        super().__init__(
            f"the logits of request {requests[0]}{more} have NaN, +inf or nothing above -inf, so "
            "no token can be drawn; look at the weights, the cache's dtype and the request's bans"
        )


def refuse_marked(requests: Sequence[str], marks: Sequence[bool]) -> None:
    """Raises NoDistribution if a request has a mark."""
    if wrong := [request for request, mark in zip(requests, marks, strict=True) if mark]:
        raise NoDistribution(wrong)


class TokenDraws(Counted):
    """Draws in the place of an engine's functions, and counts the calls."""

    def __call__(
        self, logits: Tensor, keys: Tensor, positions: Tensor, settings: Mapping[str, Any],
        requests: Sequence[str] = (),
    ) -> Tensor:  # fmt: skip
        """int64 [N]. On a CPU, raises NoDistribution for a row without a distribution, if the
        rows' requests are given; a GPU, which nothing waits for, gives the row the id -1."""
        self.count()
        if requests and not logits.is_cuda:
            without = ~logits.float().amax(-1).isfinite()
            refuse_marked(requests, without.tolist())
        return rlk_kernels.sample(logits, keys, positions, **settings).ids


def processed(logits: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """fp32 [N, V]: the logits over the temperature, -inf for tokens that are not kept. At
    temperature 0 they are the logits."""
    heat = settings["temperature"]
    greedy = heat == 0
    kept = rlk_kernels.kept_tokens(logits, **settings) | greedy[:, None]
    z = logits.float() / torch.where(greedy, 1.0, heat)[:, None]
    return z.masked_fill_(~kept, -torch.inf)


def key_of(seed: int | None, engine_seed: int, request: str) -> int:
    """The key of a request, as a signed number of 64 bits: its seed, or without one a hash of the
    engine's seed and the request's id."""
    if seed is None:
        name = f"{engine_seed} {request}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), signed=True)
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
