"""The log-probs of a pass for each token of the batch."""

import numpy as np
import torch

from rlk_align.errors import CorruptTrace
from rlk_align.model.sites import RowIndex
from rlk_align.trace.numbered import NumberedRows, blocks, read_rows
from rlk_align.trace.reader import PassReader, Trace

_ELEMENTS = 1 << 22
"""The number of logits that are converted to float64 at once."""


def token_logprobs(
    trace: Trace, index: RowIndex, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log softmax(logits / temperature)[token] of the prefill pass, float64 `[N]` over the
    tokens of the batch, and the mask of the tokens without one, bool `[N]`.

    At temperature 1 these are the log-probs that the engine reports. Otherwise they are computed in
    float64 from the logits whose values were recorded. Raises CorruptTrace.
    """
    if not index.same_tokens(trace.tokens).all():
        raise CorruptTrace(f"{trace.folder} has other tokens than the request")
    reader = trace.read_pass("prefill")
    site = "logprob" if temperature == 1.0 else "logits"
    out, missing = np.full(len(index), np.nan), np.ones(len(index), dtype=bool)
    rows = read_rows(reader, site, index)
    if rows is None:
        return out, missing
    recorded = rows.rows.shard[rows.at] >= 0
    number, at = rows.number[recorded], rows.at[recorded]
    missing[number + 1] = False
    if temperature == 1.0:
        out[number + 1] = reader.values(site, rows.rows, at)[:, 0].double().numpy()
        return out, missing
    features = reader.record.sites[site].features
    for block in blocks(np.arange(len(number)), features, _ELEMENTS):
        target = index.token[number[block] + 1]
        out[number[block] + 1] = _scaled(reader, rows, at[block], target, temperature)
    return out, missing


def _scaled(
    reader: PassReader, rows: NumberedRows, at: np.ndarray, target: np.ndarray, temperature: float
) -> np.ndarray:
    logits = reader.values("logits", rows.rows, at).double() / temperature
    chosen = logits.gather(-1, torch.from_numpy(target)[:, None])[:, 0]
    return (chosen - logits.logsumexp(-1)).numpy()
