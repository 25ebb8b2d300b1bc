"""Chains: how a long sum of 16-bit products keeps its digits where it is asked for in fp32.

A tensor core adds 16 products to a sum and rounds that toward zero: after K products a large sum
has lost some K / 32 units of its last place, all of them in one direction. Rounded to 16 bits
nobody sees that; an fp32 logit near 50 is off by 3e-4 at K = 4096. So for fp32 results K is taken
in chains of at most LONGEST (the last one of up to STEP more). Between two chains the upper half of
each sum is put aside, and the next chain goes on with the rest, which is small:

    s = aside + rest                      rounded to nearest, once a chain
    aside = s, its lower 16 bits cleared;  rest = s - aside                    both exact

and the result is aside + rest. What is put aside has 16 bits, so two numbers can share a register
(`chains_hopper.py`). The chains follow from K alone: nothing about the batch or the tile can reach
them. A sum that is infinite where a chain ends is NaN.

K = length of the sum
"""

import torch
import triton
import triton.language as tl

LONGEST = 768
"""Products of a chain at most; the last one may have STEP more."""
STEP = 256
"""Chains have multiples of it, which every tile's step of K divides, and the last one has more than
that: more than four steps of 64, as the kernel for Hopper needs (`hopper.ends`)."""


def chains(k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[int, int]:
    """(length of a chain, where the last one begins), or (0, 0) where the sum is one chain."""
    if out_dtype.itemsize < 4 or dtype.itemsize != 2 or k <= LONGEST:
        return 0, 0
    length = triton.cdiv(triton.cdiv(k, STEP), triton.cdiv(k, LONGEST)) * STEP
    return length, (k - STEP - 1) // length * length


@triton.jit
def begins(k, CHAIN: tl.constexpr, last):
    """Whether a chain but the first begins at product k."""
    return (k % CHAIN == 0) & (k > 0) & (k <= last)


@triton.jit
def put_aside(rest, aside):
    """(rest, aside) for the next chain."""
    s = rest + aside
    aside = (s.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return s - aside, aside
