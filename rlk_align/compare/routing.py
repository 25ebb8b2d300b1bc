"""Sparse layers on an edge: which tokens were sent to other experts, was that the router's doing,
and which rows of experts can be compared at all.

A token whose router was given equal inputs on both sides, and chose another set of experts,
diverges *at the router*. Where the inputs differ already, its flip is an effect, which may amplify
what it follows from. N = rows, E = experts, K = experts of a token"""

from dataclasses import dataclass, field

import numpy as np
import torch

from rlk_align.compare.choice import Routers, beyond_choice
from rlk_align.compare.metrics import edge_metrics
from rlk_align.compare.pairing import PairedSite
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.families import ModelShape
from rlk_align.model.sites import RowIndex, Site
from rlk_align.results import EdgeRouting, LayerRouting
from rlk_align.trace.reader import PassReader


@dataclass(frozen=True, slots=True)
class Flips:
    """The rows of one layer that are sent to other experts on the two sides."""

    flipped: np.ndarray
    """A mask over the batch's rows."""
    number: np.ndarray
    """The numbers of the flipped rows whose ids both sides keep, ascending."""
    a: torch.Tensor
    b: torch.Tensor
    """Their ids, int64 `[n, K]`."""

    def common(self) -> torch.Tensor:
        """Whether each expert of the first side is also the second's, bool `[n, K]`."""
        return (self.a[:, :, None] == self.b[:, None]).any(dim=2)

    def aligned(
        self, number: np.ndarray, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[N, K · F]` of both sides, where flipped reduced to the experts that both have:
        these in the first side's slots, and zeros in all others."""
        here = np.flatnonzero(np.isin(number, self.number))
        if not len(here):
            return a, b
        of = torch.from_numpy(np.searchsorted(self.number, number[here]))
        match = self.a[of][:, :, None] == self.b[of][:, None]
        common, slot = match.any(dim=2), match.int().argmax(dim=2)
        k = self.a.shape[1]
        parts = [x[here].reshape(len(here), k, -1) for x in (a, b)]
        parts[1] = parts[1].gather(1, slot[..., None].expand_as(parts[1]))
        a, b = a.clone(), b.clone()
        for whole, part in zip((a, b), parts, strict=True):
            whole[here] = (part * common[..., None]).reshape(len(here), -1)
        return a, b

    def comparable(self, number: np.ndarray) -> np.ndarray:
        """Which of these rows have an expert that both sides know them to share, bool `[N]`; rows
        that are not flipped do."""
        sharing = self.number[self.common().any(dim=1).numpy()]
        return ~self.flipped[number] | np.isin(number, sharing)


@dataclass(slots=True)
class Routing:
    """What the walk along an edge's sites has found of its sparse layers."""

    flips: dict[str, Flips] = field(default_factory=dict)
    """The flips, by the site of the choice."""
    layers: list[LayerRouting] = field(default_factory=list)
    _router: PairedSite | None = None

    def see_router(self, paired: PairedSite) -> None:
        """Keeps a layer's router until its choice is seen."""
        self._router = paired

    def see_choice(
        self,
        a: PassReader,
        b: PassReader,
        paired: PairedSite,
        inputs_equal: np.ndarray,
        index: RowIndex,
        routers: Routers | None,
    ) -> None:
        """A layer's choice. `inputs_equal`: rows of the batch at which the router reads the same on
        both sides; `routers`: without them no gaps are measured."""
        site = paired.site
        flipped = np.zeros(len(index), dtype=bool)
        flipped[paired.number[~paired.equal]] = True
        valued = _valued(paired) & ~paired.equal
        number, ids = paired.number[valued], _values(a, b, paired, valued)
        flips = Flips(flipped, number, *(x.long() for x in ids))
        self.flips[site.name] = flips
        at_router = flipped & inputs_equal
        gaps = self._gaps(a, b, site, flips, at_router, routers)
        beyond = gaps[gaps != 0]
        first = np.flatnonzero(at_router)
        self.layers.append(
            LayerRouting(
                site=site.name,
                layer=site.layer or 0,
                rows=len(paired.number),
                flipped=int(flipped.sum()),
                at_router=int(at_router.sum()),
                ties=int((gaps == 0).sum()),
                measured=len(gaps),
                largest_gap=float(beyond.max()) if len(beyond) else 0.0,
                first_at_router=index.locate(int(first[0])) if len(first) else None,
            )
        )

    def _gaps(
        self,
        a: PassReader,
        b: PassReader,
        choice: Site,
        flips: Flips,
        at_router: np.ndarray,
        routers: Routers | None,
    ) -> np.ndarray:
        """By how many roundings each side prefers its own experts to the other's, of flips at the
        router: the larger of both sides, and 0 where either side's scores tie."""
        router = self._router
        if router is None or routers is None:
            return np.zeros(0)
        held = _valued(router) & np.isin(router.number, flips.number) & at_router[router.number]
        logits = _values(a, b, router, held)
        of = np.searchsorted(flips.number, router.number[held])
        gaps = []
        for x, mine, other in zip(logits, (flips.a, flips.b), (flips.b, flips.a), strict=True):
            scores = routers.scores(choice, x)
            if scores is None:
                return np.zeros(0)
            gaps.append(_preference(x, scores, mine[of], other[of], routers.shape))
        # Below 0 a side chose against its own scores.
        tied = (gaps[0] == 0) | (gaps[1] == 0)
        return np.where(tied, 0.0, np.maximum(*np.abs(gaps)))

    def result(
        self, logp: tuple[np.ndarray, np.ndarray, np.ndarray], index: RowIndex
    ) -> EdgeRouting | None:
        """`logp`: rows of the batch, and both sides' log-probs at them. None for a dense model."""
        if not self.layers:
            return None
        number, first, second = logp
        anywhere = np.logical_or.reduce([f.flipped for f in self.flips.values()])
        delta, flipped = np.abs(second.astype(np.float64) - first), anywhere[number]
        with_flip, total = delta[flipped].sum(), delta.sum()
        same = ~flipped
        unflipped = (first[same], second[same], index.sample[number[same]])
        return EdgeRouting(
            layers=self.layers,
            tokens=max(layer.rows for layer in self.layers),
            flipped_tokens=int(anywhere.sum()),
            sampled=len(number),
            flipped_sampled=int(flipped.sum()),
            share_of_dlogp=float(with_flip / total) if total > 0 else 0.0,
            mean_abs_dlogp_flipped=float(delta[flipped].mean()) if flipped.any() else 0.0,
            mean_abs_dlogp_other=float(delta[same].mean()) if same.any() else 0.0,
            unflipped=edge_metrics(*unflipped) if same.any() else None,
        )


def _valued(paired: PairedSite) -> np.ndarray:
    return (paired.a.shard[paired.a_at] >= 0) & (paired.b.shard[paired.b_at] >= 0)


def _values(
    a: PassReader, b: PassReader, paired: PairedSite, mask: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides' values of these rows, `[n, F]`."""
    name, rows = paired.site.name, np.flatnonzero(mask)
    if not len(rows):
        features = a.record.sites[name].features
        return torch.zeros(0, features), torch.zeros(0, features)
    return (
        a.values(name, paired.a, paired.a_at[rows]),
        b.values(name, paired.b, paired.b_at[rows]),
    )


def _preference(
    logits: torch.Tensor,
    scores_NE: torch.Tensor,
    mine: torch.Tensor,
    other: torch.Tensor,
    shape: ModelShape,
) -> np.ndarray:
    """By how many roundings a side's scores `[n, E]` prefer its own experts to the other side's,
    `[n]`: the worst score of those that only this side chose against the best of those that only
    the other did. A rounding is that of a difference of two scores."""
    match = mine[:, :, None] == other[:, None]
    own = scores_NE.gather(1, mine).masked_fill(match.any(dim=2), torch.inf).amin(dim=1)
    left = scores_NE.gather(1, other).masked_fill(match.any(dim=1), -torch.inf).amax(dim=1)
    if shape.top_groups == shape.groups:
        gap = own - left
    else:
        # Which experts may be chosen follows from the groups that are.
        gap = (beyond_choice(scores_NE, x, shape)[:, 0] for x in (other, mine))
        gap = torch.sub(*gap)
    dtype = str(logits.dtype).removeprefix("torch.")
    rounding = _ulp(torch.maximum(own.abs(), left.abs()), dtype) / 12**0.5
    if shape.family.sigmoid:
        # Logits that are not rounded are sums in some order: each term is off by a rounding. The
        # slope of a sigmoid is 1/4 at most.
        rows = torch.arange(len(logits))[:, None]
        largest = logits.double()[rows, torch.cat([mine, other], dim=1)].abs().amax(dim=1)
        of_sum = _ulp(largest, dtype) * (shape.hidden / 12) ** 0.5
        rounding = torch.hypot(rounding, of_sum / 4)
    # A NaN among the logits is beyond all rounding.
    return (gap / (2**0.5 * rounding)).nan_to_num(nan=torch.inf, posinf=torch.inf).numpy()


def _ulp(magnitude: torch.Tensor, dtype: str) -> torch.Tensor:
    return 2.0 ** (torch.frexp(magnitude).exponent - DTYPES[dtype])
