"""Which values a pass keeps, within the budget and the disk's free space."""

import shutil

import numpy as np

from rlk_align.engines.job import Job
from rlk_align.errors import BadOption, TraceNotWritten
from rlk_align.prompts import TokenBatch
from rlk_align.sites import RowIndex, Site
from rlk_align.trace.writer import KeepValues

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ROW_BYTES = 80
"""What a row's digest and statistics take in rows.parquet, uncompressed."""


def keep_values(job: Job, sites: list[Site], batch: TokenBatch, dtype: str) -> KeepValues:
    """The rule of one pass: sites and layers that were asked for, all of their rows where the
    capture's values fit the budget, else a share of the rows that depends on (sample,
    position) alone, so that both sides keep the same ones. Log-probs are always kept.

    Raises TraceNotWritten where the disk cannot hold the estimate.
    """
    chosen = {s.name for s in sites if _wanted(s, job)}
    rows = RowIndex(_longest(batch, job.max_new_tokens))
    counts = {s.name: int(rows.expected(s, decode=False).sum()) for s in sites}
    item = _ITEM_BYTES.get(dtype, 4)
    value_bytes = sum(counts[s.name] * s.features * item for s in sites if s.name in chosen)
    passes = sum("." not in p for p in job.passes)
    share = min(1.0, job.budget / max(1, value_bytes * passes))
    needed = int(value_bytes * share) + _ROW_BYTES * sum(counts.values())
    free = shutil.disk_usage(job.folder).free
    if needed > free:
        raise TraceNotWritten(
            f"this pass needs about {needed / 1e9:.2f} GB in {job.folder}; "
            f"{free / 1e9:.2f} GB are free",
            "free some space, choose another --run-dir, or lower --trace-budget",
        )

    def keep(site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        if site not in chosen:
            return keep_logprobs(site, sample, position)
        if site == "logprob" or share >= 1.0:
            return np.ones(len(sample), dtype=bool)
        return _uniform(sample, position) < share

    return keep


def keep_logprobs(site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The rule of a control pass: digests, and of the log-probs their values too."""
    return np.full(len(sample), site == "logprob")


def check_selection(job_sites: tuple[str, ...], sites: list[Site]) -> None:
    """Raises BadOption for a --sites entry that names neither a site nor an operator."""
    known = {s.name for s in sites} | {s.op for s in sites}
    for name in job_sites:
        if name not in known:
            ops = ", ".join(dict.fromkeys(s.op for s in sites))
            raise BadOption(f"--sites: {name!r} is no site of this model", f"operators: {ops}")


def _wanted(site: Site, job: Job) -> bool:
    in_layers = (
        job.layers is None or site.layer is None or job.layers[0] <= site.layer <= job.layers[1]
    )
    return in_layers and (not job.sites or site.name in job.sites or site.op in job.sites)


def _longest(batch: TokenBatch, max_new_tokens: int) -> TokenBatch:
    """The batch, with the longest responses that a decode pass may still sample."""
    if batch.sampled_tokens:
        return batch
    return batch.with_responses([[0] * max_new_tokens] * len(batch.samples))


def _uniform(sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each (sample, position), the same in every process: splitmix64."""
    x = sample.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + position.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53
