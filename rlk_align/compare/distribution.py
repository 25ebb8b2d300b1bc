"""The distributions of two passes over the whole vocabulary, compared where both keep the logits.

The log-prob of a sampled token cannot show a fault that touches other tokens alone, e.g. a wrong
row of the LM head. All in float64, block by block: nothing of the size of all logits is in memory.

N = rows, V = tokens of the vocabulary; p and q are the distributions of the first and the second
pass, Δ = log q − log p.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlk_align.compare.pairing import PairedSite
from rlk_align.model.sites import RowIndex
from rlk_align.results import Distribution
from rlk_align.trace.numbered import blocks
from rlk_align.trace.reader import PassReader

TOP = 20
_ELEMENTS = 1 << 18
"""Logits of a side that are compared at a time."""
_SMALL = 0.5
"""The |Δ| below which expm1(Δ) − Δ is exact enough."""


@dataclass(slots=True)
class Distributions:
    """Sums over the rows that were added."""

    temperatures: tuple[float, float]
    """Of both passes: logits are divided by it."""
    kl: list[np.ndarray] = field(default_factory=list)
    """KL(p ‖ q) of each row whose bits differ."""
    reverse_kl: list[np.ndarray] = field(default_factory=list)
    variation: list[np.ndarray] = field(default_factory=list)
    """The total variation of each such row."""
    equal: int = 0
    """Rows whose bits are equal."""
    top: float = 0.0
    """Differing rows with the same most probable token."""
    top_20: float = 0.0
    """Of the differing rows, the shares of common tokens among the 20 most probable, summed."""
    largest: float = 0.0
    at: tuple[int, int] | None = None
    """(row of the batch, token) of the largest |Δ|."""
    by_token: Tensor | None = None
    """Σ|Δ| of each token, float64[V]."""

    def add(self, number: np.ndarray, first_NV: Tensor, second_NV: Tensor) -> None:
        """Adds the logits of both passes at these rows of the batch, of any float dtypes."""
        first_NV, second_NV = (
            x.double() / t for x, t in zip((first_NV, second_NV), self.temperatures, strict=True)
        )
        log_p, log_q = first_NV.log_softmax(dim=1), second_NV.log_softmax(dim=1)
        delta, p, q = log_q - log_p, log_p.exp(), log_q.exp()
        size = delta.abs()
        self.kl.append(_divergence(p, q, delta).numpy())
        self.reverse_kl.append(_divergence(q, p, -delta).numpy())
        self.variation.append((q - p).abs().sum(dim=1).div(2).numpy())
        top_p, top_q = (x == x.amax(dim=1, keepdim=True) for x in (first_NV, second_NV))
        self.top += float((top_p & top_q).any(dim=1).sum())
        self.top_20 += float(_common(first_NV, second_NV).sum())
        self.by_token = size.sum(dim=0) + (0 if self.by_token is None else self.by_token)
        # argmax finds a NaN first.
        flat = int(size.argmax())
        row, token = divmod(flat, size.shape[1])
        value = float(size[row, token])
        if not value <= self.largest and not np.isnan(self.largest):
            self.largest, self.at = value, (int(number[row]), token)

    def result(self, index: RowIndex, wanted: int, vocabulary: int) -> Distribution:
        """The figures. wanted: the number of rows that should have logits on both sides."""
        kl, reverse, variation = (
            np.concatenate([*rows, np.zeros(self.equal)])
            for rows in (self.kl, self.reverse_kl, self.variation)
        )
        count = len(kl)
        if not count:
            return Distribution.empty(wanted, vocabulary)
        by_token = torch.zeros(vocabulary, dtype=torch.float64)
        by_token = by_token if self.by_token is None else self.by_token / count
        worst = int(by_token.argmax())
        row, token = self.at or (None, None)
        return Distribution(
            positions=count,
            missing=wanted - count,
            vocabulary=vocabulary,
            kl=float(kl.mean()),
            kl_error=float(kl.std() / count**0.5),
            kl_max=float(kl.max()),
            reverse_kl=float(reverse.mean()),
            reverse_kl_max=float(reverse.max()),
            total_variation=float(variation.mean()),
            total_variation_max=float(variation.max()),
            max_abs_dlogp=self.largest,
            largest=None if row is None or token is None else (*index.locate(row), token),
            top1_agreement=(self.top + self.equal) / count,
            top20_agreement=(self.top_20 + self.equal) / count,
            typical_token=float(by_token.median()),
            worst_token=float(by_token[worst]),
            worst_token_id=worst,
        )


def _divergence(p: Tensor, q: Tensor, delta: Tensor) -> Tensor:
    """KL(p ‖ q) of each row, [N], as Σ p (expm1(Δ) − Δ): no term is negative."""
    small = p * (delta.expm1() - delta)
    return torch.where(delta.abs() < _SMALL, small, q - p - p * delta).sum(dim=1)


def _common(first_NV: Tensor, second_NV: Tensor) -> Tensor:
    """The share of the most probable tokens of each pass that are among those of the other, the
    mean of both, [N]. A token that ties with the last of them is among them."""
    top = min(TOP, first_NV.shape[1])
    shares = []
    for x, y in ((first_NV, second_NV), (second_NV, first_NV)):
        least = y.topk(top, dim=1).values[:, -1:]
        shares.append((y.gather(1, x.topk(top, dim=1).indices) >= least).double().mean(dim=1))
    return (shares[0] + shares[1]) / 2


def compare_distributions(
    a: PassReader,
    b: PassReader,
    paired: PairedSite,
    equal: np.ndarray,
    wanted: np.ndarray,
    temperatures: tuple[float, float],
    index: RowIndex,
) -> Distribution:
    """Compares the logits of two passes. equal: which of the paired rows have equal values, bool
    `[N]`; wanted: the rows of the batch that count, a mask over the batch."""
    site, features = paired.site.name, a.record.sites[paired.site.name].features
    sums = Distributions(temperatures)
    if b.record.sites[site].features == features:
        here = wanted[paired.number]
        # An infinite logit of both sides is as far from a number as one of either.
        same = here & equal & (paired.nonfinite == 0) & (temperatures[0] == temperatures[1])
        sums.equal = int(same.sum())
        for part in blocks(np.flatnonzero(here & ~same & paired.valued), features, _ELEMENTS):
            first = a.values(site, paired.a, paired.a_at[part])
            second = b.values(site, paired.b, paired.b_at[part])
            sums.add(paired.number[part], first, second)
    return sums.result(index, int(wanted.sum()), features)
