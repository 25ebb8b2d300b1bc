"""The plan of a capture: which values it keeps, and how much it writes."""

import shutil
from dataclasses import dataclass

import numpy as np

from rlk_align.engines.process.job import Job
from rlk_align.errors import TraceNotWritten
from rlk_align.model.checkpoint import weight_files
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.sites import RowIndex, Site
from rlk_align.model.stored import file_tensors

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ROW_BYTES = 80
"""The size of a row's digest and statistics in rows.parquet, uncompressed."""
PREFIX_SHARE = 0.25
"""The share of an exhausted budget that keys and values of whole sequences get. Attention can be
recomputed only if the keys and values at every earlier position are known."""
_NO_POSITION = 1 << 40


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Which rows keep their values; log-probs always do. The choice depends only on (sample,
    position), so that all sides keep the same rows."""

    chosen: frozenset[str] | None = frozenset()
    """The sites that keep values; None for every site."""
    share: float = 1.0
    """The share of their rows that is kept."""
    prefix_sites: frozenset[str] = frozenset()
    """Those of the chosen sites of which another site reads every row up to its own."""
    prefixes: tuple[int, ...] = ()
    """For each sample, the number of first rows that these sites keep in addition."""

    def __call__(self, site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Bool `[N]` over rows at (sample, position), int `[N]` each."""
        if site == "logprob":
            return np.ones(len(sample), dtype=bool)
        if self.chosen is not None and site not in self.chosen:
            return np.zeros(len(sample), dtype=bool)
        if self.share >= 1.0:
            return np.ones(len(sample), dtype=bool)
        chosen = _uniform(sample, position) < self.share
        if site in self.prefix_sites:
            chosen |= position < np.array(self.prefixes, dtype=np.int64)[sample]
        return chosen


KEEP_LOGPROBS = KeepRule()
"""The rule of a control pass, which keeps only the values of log-probs."""


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """The plan of one capture."""

    keep: KeepRule
    value_bytes: int
    """Bytes of the kept values of all passes."""
    row_bytes: int
    """Bytes of the digests and statistics of all passes."""

    def __str__(self) -> str:
        share = f", values of {self.keep.share:.1%} of the rows" if self.keep.share < 1 else ""
        total = _size(self.value_bytes + self.row_bytes)
        return f"trace of up to {total}: values {_size(self.value_bytes)}{share}"


def plan_capture(job: Job, sites: list[Site], batch: TokenBatch, dtype: str) -> CapturePlan:
    """The plan of a job. The observed passes keep the values of the job's sites and layers: all
    rows if they fit the budget, otherwise a share of them and the keys and values of some
    sequences.

    Raises TraceNotWritten if the disk has too little free space.
    """
    chosen = frozenset(s.name for s in sites if _wanted(s, job))
    index = RowIndex(_longest(batch, job.max_new_tokens))
    read_before = {name for s in sites for name in s.prefix_inputs}
    value_bytes = prefix_bytes = row_bytes = 0
    for name in job.passes:
        kind, _, variant = name.partition(".")
        for site in sites:
            intervention = job.interventions.get(name)
            valued = not variant or (intervention is not None and intervention.observed)
            if not valued and variant != "repeat" and site.op != "logprob":
                continue
            rows = int(index.expected(site, decode=kind == "decode").sum())
            row_bytes += _ROW_BYTES * rows
            if valued and site.name in chosen:
                size = rows * site.features * _ITEM_BYTES.get(dtype, 4)
                value_bytes += size
                prefix_bytes += size if site.name in read_before else 0
    rule, kept_bytes = KeepRule(chosen), value_bytes
    if value_bytes > job.budget:
        prefix_share = min(1.0, PREFIX_SHARE * job.budget / max(1, prefix_bytes))
        share = (job.budget - prefix_share * prefix_bytes) / value_bytes
        prefixes = _prefixes(index, prefix_share)
        rule, kept_bytes = KeepRule(chosen, share, chosen & read_before, prefixes), job.budget
    plan = CapturePlan(rule, kept_bytes, row_bytes)
    _check_space(job, plan)
    return plan


def plan_modules(job: Job, batch: TokenBatch, dtype: str) -> CapturePlan:
    """The plan of a job whose sites are the inputs and outputs of modules. Their sizes are those of
    the checkpoint's tensors: a product reads one dimension of its weight and writes the other."""
    tensors = [t for path in weight_files(job.model) for t in file_tensors(path)]
    features = sum(sum(t.shape[-2:]) if len(t.shape) > 1 else 2 * sum(t.shape) for t in tensors)
    rows = len(RowIndex(batch))
    observed = sum("." not in name for name in job.passes)
    needed = observed * rows * features * _ITEM_BYTES.get(dtype, 4)
    share = min(1.0, job.budget / max(1, needed))
    row_bytes = 2 * len(job.passes) * rows * len(tensors) * _ROW_BYTES
    plan = CapturePlan(KeepRule(None, share), int(share * needed), row_bytes)
    _check_space(job, plan)
    return plan


def _check_space(job: Job, plan: CapturePlan) -> None:
    """Raises TraceNotWritten if the disk has too little free space for a capture."""
    needed = plan.value_bytes + plan.row_bytes
    free = shutil.disk_usage(job.folder).free
    if needed > free:
        raise TraceNotWritten(
            f"this capture needs about {_size(needed)} in {job.folder}; {_size(free)} are free",
            "free some space, choose another --run-dir, or lower --trace-budget",
        )


def _prefixes(index: RowIndex, share: float) -> tuple[int, ...]:
    """The number of first rows of each sample that are kept, which add up to `share` of all rows:
    whole samples in a pseudorandom order, and the beginning of one more."""
    lengths = np.diff(index.offsets)
    order = np.argsort(_uniform(np.arange(len(lengths)), np.full(len(lengths), _NO_POSITION)))
    before = np.cumsum(lengths[order]) - lengths[order]
    counts = np.zeros(len(lengths), dtype=np.int64)
    counts[order] = np.clip(int(share * len(index)) - before, 0, lengths[order])
    return tuple(counts.tolist())


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _wanted(site: Site, job: Job) -> bool:
    in_layers = (
        job.layers is None or site.layer is None or job.layers[0] <= site.layer <= job.layers[1]
    )
    return in_layers and (not job.sites or site.name in job.sites or site.op in job.sites)


def _longest(batch: TokenBatch, max_new_tokens: int) -> TokenBatch:
    """The batch with the longest responses that a decode pass may sample."""
    if batch.sampled_tokens:
        return batch
    return batch.with_responses([[0] * max_new_tokens] * len(batch.samples))


def _uniform(sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each (sample, position), equal in every process: splitmix64."""
    x = sample.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + position.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53
