"""The zig-zag slices of context parallelism: rank r of n has chunks r and 2n−1−r of 2n."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def response_tokens(
    total: int, response: int, rank: int, ranks: int, padded: int | None = None
) -> NDArray[np.int64]:
    """Returns the tokens of the response that a rank scores, ascending.

    The logits are sliced, and the logit at position p scores token p + 1. `padded` is the length to
    which all sequences of a batch were padded; None if they are packed.
    """
    chunk = -(-(total if padded is None else padded) // (2 * ranks))
    prompt = total - response
    tokens = []
    for part in (rank, 2 * ranks - 1 - rank):
        start = max(part * chunk, prompt - 1)
        end = min((part + 1) * chunk, total - 1)
        tokens.append(np.arange(start, max(start, end)) + 1 - prompt)
    return np.concatenate(tokens)


def ranks_of_slices(
    lengths: Sequence[Sequence[int]], totals: Sequence[int], responses: Sequence[int]
) -> list[int] | None:
    """Returns the rank of each file by the lengths of its slices; None if these are ambiguous.

    lengths: for each file, the length of each sample's slice.
    """
    count = len(lengths)
    expected = [
        [len(response_tokens(t, r, rank, count)) for t, r in zip(totals, responses, strict=True)]
        for rank in range(count)
    ]
    ranks = [
        [rank for rank in range(count) if list(slices) == expected[rank]] for slices in lengths
    ]
    if any(len(candidates) != 1 for candidates in ranks):
        return None
    flat = [candidates[0] for candidates in ranks]
    return flat if sorted(flat) == list(range(count)) else None
