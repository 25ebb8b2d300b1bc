"""A recorded request, from a capture of the tool, and the logits that a pass recorded of it."""

import numpy as np
import torch

from rlk_align.errors import BadOption
from rlk_align.logs.replay.request import MOST_NAMES, RLK, RecordedRequest
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.sites import RowIndex
from rlk_align.model.truncation import truncation
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import request_seed

DECODE, PREFILL = "decode", "prefill"
AGAIN = "capture it again with sampler=rlk among the engine's options"


def sample_of(trace: Trace, name: str) -> int:
    """The number of the sample of a prompt. Raises BadOption if there is no such prompt."""
    names = [sample.prompt_id for sample in trace.tokens.samples]
    if name not in names:
        raise BadOption(
            f"{trace.folder} has no request {name!r}", f"it has {', '.join(names[:MOST_NAMES])}"
        )
    return names.index(name)


def of_capture(trace: Trace, name: str) -> RecordedRequest:
    """The request with the prompt of that id. Raises BadOption if it is not there, or if another
    sampler drew its tokens."""
    record, number = trace.record, sample_of(trace, name)
    if record.options.get("sampler") != RLK:
        raise BadOption(
            f"{trace.folder}: its tokens were not drawn by the kernels' sampler, so they cannot be "
            "drawn again alone",
            AGAIN,
        )
    if record.seed is None:
        raise BadOption(f"{trace.folder} does not say the seed of its responses", AGAIN)
    sample = trace.tokens.samples[number]
    at = np.array([p + 1 for p in sample.sampled_positions], dtype=np.int64)
    if not len(at):
        raise BadOption(f"request {name!r} of {trace.folder} has no sampled token")
    values = recorded(trace, DECODE, "logprob", trace.tokens, number, at)
    return RecordedRequest(
        name=name,
        ids=sample.ids,
        at=at,
        seeds=np.full(len(at), request_seed(record.seed, number)),
        logprobs=np.array([np.nan if x is None else float(x[0]) for x in values]),
        processed=record.options.get("logprobs") == "processed",
        temperature=float(record.options.get("temperature") or 1.0),
        limits=truncation(record.options),
    )


def recorded(
    trace: Trace, name: str, site: str, batch: TokenBatch, sample: int, at: np.ndarray
) -> list[torch.Tensor | None]:
    """The values of a site that speak of the tokens at[N] of a sample, in a pass; None for a token
    without a value."""
    values: list[torch.Tensor | None] = [None] * len(at)
    if not trace.has_pass(name):
        return values
    reader, index = trace.read_pass(name), RowIndex(batch)
    rows = read_rows(reader, site, index)
    if rows is None:
        return values
    here, where = rows.find(index.offsets[sample] + at - 1)
    which = np.flatnonzero(here)
    kept = rows.rows.shard[where] >= 0
    found = reader.values(site, rows.rows, where[kept])
    for n, value in zip(which[kept], found, strict=True):
        values[n] = value
    return values
