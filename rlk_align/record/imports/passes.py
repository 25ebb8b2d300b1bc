"""The passes of an imported recording. N = rows."""

from collections import Counter

import numpy as np
import torch

from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites
from rlk_align.record.imports.places import choose, places_of
from rlk_align.record.imports.sequences import Placed, Sequences
from rlk_align.record.imports.source import Forward, Source
from rlk_align.record.imports.values import OtherValues, read_place
from rlk_align.trace.schema import copy_name
from rlk_align.trace.writer import PassWriter

_SHOWN = 4
"""The number of modules that a message names."""


class ImportedPasses:
    """Writes rows, and remembers which sites it has and why it lacks others."""

    def __init__(
        self,
        source: Source,
        sequences: Sequences,
        shape: ModelShape,
        writers: dict[str, PassWriter],
    ) -> None:
        self._source, self._sequences, self._shape = source, sequences, shape
        self._writers = writers
        self._places = places_of(shape)
        self._written: dict[str, set[str]] = {name: set() for name in writers}
        """Pass -> its sites."""
        self._computed = 0
        """The number of log-probs that were computed from logits."""
        self._reasons: dict[str, str] = {}
        self._dtypes: Counter[str] = Counter()

    def add(self, forward: Forward, placed: list[Placed]) -> None:
        """Writes the rows of a forward."""
        chosen = choose(self._places, forward.taps)
        for place in dict.fromkeys(chosen.values()):
            wanted = [site for site in place.sites if chosen.get(site) == place]
            try:
                values = read_place(place, forward, self._shape)
            except OtherValues as error:
                self._reasons |= dict.fromkeys(wanted, str(error))
                continue
            last_only = place.tap in forward.of_last
            for site in wanted:
                named = {site: values[site].rows} | {
                    copy_name(site, rank): copy for rank, copy in values[site].copies.items()
                }
                for name, rows in named.items():
                    for passname in self._writers:
                        of_pass = [each for each in placed if each.passname == passname]
                        found = [self._rows(site, forward, each, last_only) for each in of_pass]
                        self._write(passname, site, name, rows, found)

    def _rows(
        self, site: str, forward: Forward, placed: Placed, last_only: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a segment that a site has, int64 `[N]` each: their numbers in the tap's
        values, their samples and their positions."""
        rows, position = placed.segment.rows[placed.new], placed.position
        if last_only:
            at_end = rows == placed.segment.rows[-1]
            position = position[at_end]
            rows = np.full(len(position), forward.segments.index(placed.segment))
        if self._shape.operator_of(site).row == "sampled token":
            sampled = self._sequences.samples[placed.sample].sampled_positions
            there = (position >= sampled.start) & (position < sampled.stop)
            rows, position = rows[there], position[there]
        return rows, np.full(len(rows), placed.sample), position

    def _write(
        self,
        passname: str,
        site: str,
        name: str,
        values: torch.Tensor,
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> None:
        """`name`: that of the site, or of a rank's copies."""
        if not sum(len(rows) for rows, _, _ in found):
            return
        rows, sample, position = map(np.concatenate, zip(*found, strict=True))
        chosen = values[torch.from_numpy(rows)]
        self._writers[passname](name, chosen, sample, position)
        self._written[passname].add(site)
        self._dtypes[str(values.dtype).removeprefix("torch.")] += len(rows)
        if name == "logits":
            self._add_computed(passname, chosen[:, : self._shape.vocab], sample, position)

    def _add_computed(
        self, passname: str, logits: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        """Writes the log-probs that logits `[N, V]` give, for samples without known ones."""
        unknown = np.array([self._sequences.logprobs[s] is None for s in sample])
        if not unknown.any():
            return
        sample, position = sample[unknown], position[unknown]
        ids = [self._sequences.samples[s].ids[p + 1] for s, p in zip(sample, position, strict=True)]
        logp = torch.log_softmax(logits[torch.from_numpy(unknown)].float(), dim=-1)
        rows = logp.gather(1, torch.tensor(ids).unsqueeze(1))
        self._writers[passname]("logprob", rows, sample, position)
        self._written[passname].add("logprob")
        self._computed += len(rows)

    def add_logprobs(self, passname: str) -> None:
        """Writes the log-probs that are known beside the files."""
        for number, (sample, known) in enumerate(
            zip(self._sequences.samples, self._sequences.logprobs, strict=True)
        ):
            if known is None:
                continue
            position = np.array(sample.sampled_positions)
            value = known[position + 1]
            there = ~np.isnan(value)
            wide = torch.from_numpy(value[there]).unsqueeze(1)
            rows = wide.float() if torch.equal(wide.float().double(), wide) else wide
            if len(rows):
                numbers = np.full(len(rows), number)
                self._writers[passname]("logprob", rows, numbers, position[there])
                self._written[passname].add("logprob")

    @property
    def sites(self) -> list[str]:
        """The sites with a row in any pass."""
        return sorted({site for sites in self._written.values() for site in sites})

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the values."""
        if not self._computed:
            return []
        return [
            f"{self._computed} log-probs are those of the files' logits, in float32, without a "
            "temperature"
        ]

    @property
    def dtype(self) -> str:
        """The dtype of most values."""
        return self._dtypes.most_common(1)[0][0] if self._dtypes else self._shape.dtype

    def unexposed(self, passname: str) -> dict[str, str]:
        """Site -> why a pass has no row of it."""
        nothing = f"the files of {self._source.tool} have no tensor of it"
        return {
            site.name: self._reasons.get(site.name, nothing)
            for site in model_sites(self._shape)
            if site.name not in self._written[passname]
        }

    def unmapped(self) -> str:
        """Why no site was written, or some of the modules that the files have."""
        taps = {tap.module: None for forward in self._source.forwards for tap in forward.taps}
        shown = ", ".join(list(taps)[:_SHOWN])
        return next(iter(self._reasons.values()), f"they have {shown or 'none'}")
