"""Split accumulation: how a long sum of 16-bit products keeps its digits where the result is fp32.

A tensor core adds 16 products to a sum and rounds the result toward zero. After K products a large
sum has lost about K / 32 units in its last place, all in one direction. Rounding to 16 bits hides
this error, but an fp32 logit near 50 is off by 3e-4 at K = 4096. So for fp32 results K is split
into segments of at most LONGEST_SEGMENT (the last one of up to SEGMENT_UNIT more). Between two
segments the accumulator is split into a high and a low part, and the next segment continues with
the low part, which is small:

    s = high + low                       rounded to nearest, once a segment
    high = s, its lower 16 bits cleared;  low = s - high                       both exact

The result is high + low. A high part has 16 bits, so two of them share a register
(`hopper/split.py`). The segments depend on K alone, and on neither the batch nor the tile. A sum
that is infinite at the end of a segment becomes NaN.

K = length of the sum
"""

import torch

LONGEST_SEGMENT = 768
"""The most products of a segment; the last segment may have SEGMENT_UNIT more."""
SEGMENT_UNIT = 256
"""Segments are multiples of this unit, which every tile's step of K divides. The last segment is
longer than the unit, because the kernel for Hopper needs more than four steps of 64
(`pipeline.lead_steps`)."""


def segments(k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[int, int]:
    """(length of a segment, where the last one begins), or (0, 0) where the sum is not split."""
    if out_dtype.itemsize < 4 or dtype.itemsize != 2 or k <= LONGEST_SEGMENT:
        return 0, 0
    steps, count = -(-k // SEGMENT_UNIT), -(-k // LONGEST_SEGMENT)
    length = -(-steps // count) * SEGMENT_UNIT
    return length, (k - SEGMENT_UNIT - 1) // length * length
