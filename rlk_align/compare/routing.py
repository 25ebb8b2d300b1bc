"""Sparse layers on an edge: which tokens the sides send to different experts, whether the router
causes that, and which rows of experts can be compared at all.

A token diverges *at the router* where its router has equal inputs on both sides and chooses
different experts. Where the inputs differ already, the flip is an effect, which may amplify its
cause. N = rows, E = experts, K = experts of a token
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from rlk_align.compare.expert_choice import Routers, beyond_choice
from rlk_align.compare.metrics import edge_metrics
from rlk_align.compare.pairing import PairedSite
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import RowIndex, Site
from rlk_align.results import EdgeRouting, LayerRouting
from rlk_align.trace.reader import PassReader


@dataclass(frozen=True, slots=True)
class Flips:
    """The rows of one layer that the two sides send to different experts."""

    flipped: np.ndarray
    """A mask over the batch's rows."""
    number: np.ndarray
    """The numbers of the flipped rows whose ids both sides keep, ascending."""
    a: torch.Tensor
    b: torch.Tensor
    """Their ids, int64 `[n, K]`."""

    def common(self) -> torch.Tensor:
        """Whether the second side chose each expert of the first too, bool `[n, K]`."""
        return (self.a[:, :, None] == self.b[:, None]).any(dim=2)

    def aligned(
        self, number: np.ndarray, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rows `[N, K · F]` of both sides. Flipped rows are reduced to the experts that
        both sides chose, in the first side's slots; all other slots are zero."""
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
        """Which of these rows have an expert that both sides are known to share, bool `[N]`; true
        for rows that are not flipped."""
        sharing = self.number[self.common().any(dim=1).numpy()]
        return ~self.flipped[number] | np.isin(number, sharing)


@dataclass(slots=True)
class Routing:
    """The flips and the sparse layers of an edge, collected while its sites are compared."""

    flips: dict[str, Flips] = field(default_factory=dict)
    """Site of the choice -> its flips."""
    layers: list[LayerRouting] = field(default_factory=list)
    _router: PairedSite | None = None

    def see_router(self, paired: PairedSite) -> None:
        """Keeps a layer's router until `see_choice` is called."""
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
        """Adds a layer's choice. `inputs_equal`: rows of the batch at which both routers have equal
        inputs. Without `routers` no gaps are measured."""
        site = paired.site
        flipped = np.zeros(len(index), dtype=bool)
        flipped[paired.number[~paired.equal]] = True
        valued = paired.valued & ~paired.equal
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
        """Returns for each flip at the router by how many roundings a side prefers its own experts:
        the larger of both sides, or 0 where either side's scores tie."""
        router = self._router
        if router is None or routers is None:
            return np.zeros(0)
        at_hand = router.valued & np.isin(router.number, flips.number) & at_router[router.number]
        logits = _values(a, b, router, at_hand)
        of = np.searchsorted(flips.number, router.number[at_hand])
        gaps = []
        for x, mine, other in zip(logits, (flips.a, flips.b), (flips.b, flips.a), strict=True):
            scores = routers.scores(choice, x)
            if scores is None:
                return np.zeros(0)
            gaps.append(_preference(x, scores, mine[of], other[of], routers.shape))
        # A gap below 0 means that a side chose against its own scores.
        tied = (gaps[0] == 0) | (gaps[1] == 0)
        return np.where(tied, 0.0, np.maximum(*np.abs(gaps)))

    def flipped(self, rows: int) -> np.ndarray:
        """Which of the batch's rows are sent to other experts in any layer, bool `[rows]`."""
        of_layers = [f.flipped for f in self.flips.values()]
        return np.logical_or.reduce([np.zeros(rows, dtype=bool), *of_layers])

    def result(
        self, logp: tuple[np.ndarray, np.ndarray, np.ndarray], index: RowIndex
    ) -> EdgeRouting | None:
        """Returns the result of the edge; None for a dense model. `logp`: rows of the batch, and
        both sides' log-probs at them."""
        if not self.layers:
            return None
        number, first, second = logp
        anywhere = self.flipped(len(index))
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


def _values(
    a: PassReader, b: PassReader, paired: PairedSite, mask: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both sides' values of these rows, `[n, F]`."""
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
    """Returns by how many roundings a side's scores `[n, E]` prefer its own experts to the other
    side's, `[n]`: the worst score among experts that only this side chose, less the best among
    experts that only the other side chose. The rounding is that of a difference of two scores."""
    match = mine[:, :, None] == other[:, None]
    own = scores_NE.gather(1, mine).masked_fill(match.any(dim=2), torch.inf).amin(dim=1)
    left = scores_NE.gather(1, other).masked_fill(match.any(dim=1), -torch.inf).amax(dim=1)
    if shape.top_groups == shape.groups:
        gap = own - left
    else:
        # The selected groups decide which experts may be chosen.
        gap = (beyond_choice(scores_NE, x, shape)[:, 0] for x in (other, mine))
        gap = torch.sub(*gap)
    dtype = str(logits.dtype).removeprefix("torch.")
    rounding = _ulp(torch.maximum(own.abs(), left.abs()), dtype) / 12**0.5
    if shape.family.corrected:
        # Unrounded logits depend on the order of their sums: each term is off by a rounding. The
        # slope of a sigmoid is at most 1/4, and so is that of a softmax.
        rows = torch.arange(len(logits))[:, None]
        largest = logits.double()[rows, torch.cat([mine, other], dim=1)].abs().amax(dim=1)
        of_sum = _ulp(largest, dtype) * (shape.hidden / 12) ** 0.5
        rounding = torch.hypot(rounding, of_sum / 4)
    # A NaN among the logits is beyond all rounding.
    return (gap / (2**0.5 * rounding)).nan_to_num(nan=torch.inf, posinf=torch.inf).numpy()


def _ulp(magnitude: torch.Tensor, dtype: str) -> torch.Tensor:
    return 2.0 ** (torch.frexp(magnitude).exponent - DTYPES[dtype])
