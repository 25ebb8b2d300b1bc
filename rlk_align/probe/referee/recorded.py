"""The recorded values of the rows that are recomputed."""

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
import torch

from rlk_align.model.dtypes import DTYPES
from rlk_align.model.sites import RowIndex, Site
from rlk_align.probe.referee.weights import NotRefereed
from rlk_align.trace.values import RecordedRows

_CACHED_SITES = 12
"""The number of sites whose values are cached, which reaches back to the last residual."""
_PRODUCTS = ("linear", "router", "attention", "latent_attention")
"""Formulas whose inputs autocast rounds to its dtype."""
_MOST_CACHED_ENTRIES = 1 << 26
"""The largest number of entries of a cached site; the logits of a large vocabulary have more."""


class RecordedPass:
    """One pass of a trace. Rows are named by their number in the batch."""

    def __init__(
        self, rows: RecordedRows, index: RowIndex, chosen: np.ndarray, device: torch.device
    ) -> None:
        """`chosen`: the numbers of the rows that are recomputed, ascending."""
        self._record, self._index, self._device = rows.reader.record, index, device
        self._rows, self._chosen = rows, chosen
        self._values: OrderedDict[str, tuple[np.ndarray, torch.Tensor]] = OrderedDict()

    @property
    def unexposed(self) -> Collection[str]:
        """The sites that the engine cannot show."""
        return self._record.unexposed

    def comparable(self, site: Site) -> np.ndarray:
        """Returns the chosen rows for which the pass recorded finite values of the site and of all
        its inputs; of rows that are equal bit for bit, one is returned. Raises NotRefereed."""
        for name in (site.name, *site.inputs, *site.prefix_inputs):
            self._check_recorded(name)
        good = self._rows.has_value(site.name).copy()
        for name in site.inputs:
            good &= self._rows.finite(name)
        for name in site.prefix_inputs:
            good &= self._index.prefix_all(self._rows.finite(name))
        valued = self._chosen[good[self._chosen]]
        if not len(valued):
            raise NotRefereed("no row has finite inputs that were all kept")
        _, once = np.unique(self._contents(site, valued), axis=0, return_index=True)
        return valued[np.sort(once)]

    def _check_recorded(self, site: str) -> None:
        if site in self._record.unexposed:
            raise NotRefereed(f"{site}: {self._record.unexposed[site]}")
        if site not in self._record.sites:
            raise NotRefereed(f"{site} was not recorded")

    def _contents(self, site: Site, number: np.ndarray) -> np.ndarray:
        """int64 `[N, K]`: digests of an operator's output and inputs in each row."""
        columns = [self._rows.digests(name)[number] for name in (site.name, *site.inputs)]
        token, position = self._index.token, self._index.position
        read = {"embedding": token, "log_softmax": np.roll(token, -1)}
        read |= dict.fromkeys(("rotary", "attention", "latent_attention"), position)
        read |= dict.fromkeys(("delta_rule", "state_space"), position)
        if site.operator.formula in read:
            columns.append(read[site.operator.formula][number, None])
        for name in site.prefix_inputs:
            up_to, total = self._up_to(number), np.zeros((len(self._index) + 1, 2), dtype=np.int64)
            # Sums of digests from each sequence's first row on; wrapping around does no harm.
            total[up_to + 1] = self._rows.digests(name)[up_to]
            total = total.cumsum(axis=0)
            columns.append(total[number + 1] - total[number - position[number]])
        return np.concatenate(columns, axis=1)

    def same(self, other: "RecordedPass", site: Site, number: np.ndarray) -> bool:
        """Whether the other pass has the same comparable rows, with the same bits of the site and
        of all its inputs."""
        if not np.array_equal(other.comparable(site), number):
            return False
        read = {site.name: number, **dict.fromkeys(site.inputs, number)}
        read |= dict.fromkeys(site.prefix_inputs, self._up_to(number))
        return all(
            np.array_equal(self._rows.digests(name)[rows], other._rows.digests(name)[rows])
            for name, rows in read.items()
        )

    def _up_to(self, number: np.ndarray) -> np.ndarray:
        """The rows of each sequence from its first row to the last of the given ones."""
        sample = self._index.sample[number]
        last = np.append(np.flatnonzero(np.diff(sample)), len(number) - 1)
        starts = self._index.offsets[sample[last]]
        ranges = zip(starts, number[last] + 1, strict=True)
        return np.concatenate([np.arange(start, stop) for start, stop in ranges])

    def values(self, site: str, number: np.ndarray) -> torch.Tensor:
        """Returns the values of chosen rows, float64 `[N, F]`."""
        if site not in self._values:
            valued = self._chosen[self._rows.has_value(site)[self._chosen]]
            if len(valued) * self._record.sites[site].features > _MOST_CACHED_ENTRIES:
                return self.sequence(site, number).double()
            self._values[site] = (valued, self.sequence(site, valued))
            if len(self._values) > _CACHED_SITES:
                self._values.popitem(last=False)
        self._values.move_to_end(site)
        valued, values = self._values[site]
        return values[torch.from_numpy(np.searchsorted(valued, number))].double()

    def operands(self, site: Site, number: np.ndarray, whole: np.ndarray) -> list[torch.Tensor]:
        """float64 inputs of an operator for these rows, and for the rows `whole` of a sequence what
        it reads of every earlier position, as it multiplies them: a product has one dtype, so
        autocast rounds inputs that are wider than the output."""
        inputs = {name: self.values(name, number) for name in site.inputs}
        inputs |= {name: self.sequence(name, whole).double() for name in site.prefix_inputs}
        dtypes = {name: self._record.sites[name].dtype for name in (site.name, *inputs)}
        output = dtypes[site.name]
        if site.operator.formula in _PRODUCTS and DTYPES.get(output, 24) < DTYPES["float32"]:
            for name, x in inputs.items():
                if dtypes[name] == "float32":
                    inputs[name] = x.to(getattr(torch, output)).double()
        return list(inputs.values())

    def sequence(self, site: str, number: np.ndarray) -> torch.Tensor:
        """Returns the values of any rows, `[N, F]`, in the dtype in which they were recorded."""
        return self._rows.values(site, number).to(self._device)
