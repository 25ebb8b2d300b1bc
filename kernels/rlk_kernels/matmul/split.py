"""Split accumulation: how a long sum of 16-bit products keeps its digits where the result is fp32.

A tensor core adds 16 products to a sum and rounds that toward zero: after K products a large sum
has lost about K / 32 units of its last place, all in one direction. After rounding to 16 bits that
does not show; an fp32 logit near 50 is off by 3e-4 at K = 4096. So for fp32 results K is split
into segments of at most LONGEST_SEGMENT (the last one of up to SEGMENT_UNIT more). Between two
segments the accumulator is split into a high and a low part, and the next segment goes on with the
low part, which is small:

    s = high + low                       rounded to nearest, once a segment
    high = s, its lower 16 bits cleared;  low = s - high                       both exact

and the result is high + low. A high part has 16 bits, so two of them share a register
(`hopper/split.py`). The segments follow from K alone: nothing about the batch or the tile can reach
them. A sum that is infinite where a segment ends is NaN.

K = length of the sum
"""

import torch

LONGEST_SEGMENT = 768
"""Products of a segment at most; the last one may have SEGMENT_UNIT more."""
SEGMENT_UNIT = 256
"""Segments are multiples of it, which every tile's step of K divides, and the last one has more
than that: more than four steps of 64, as the kernel for Hopper needs (`pipeline.lead_steps`)."""


def segments(k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[int, int]:
    """(length of a segment, where the last one begins), or (0, 0) where the sum is not split."""
    if out_dtype.itemsize < 4 or dtype.itemsize != 2 or k <= LONGEST_SEGMENT:
        return 0, 0
    steps, count = -(-k // SEGMENT_UNIT), -(-k // LONGEST_SEGMENT)
    length = -(-steps // count) * SEGMENT_UNIT
    return length, (k - SEGMENT_UNIT - 1) // length * length
