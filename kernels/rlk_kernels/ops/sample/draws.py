"""Philox-4x32-10 in PyTorch, and the numbers of `sample`'s walk down the tree.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3.
SC 2011.
"""

import torch
from torch import Tensor

DRAWS = 0x53414D50
"""The fourth word of the counter, so that other uses of a key have other numbers."""
WORD = 0xFFFFFFFF


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of the product of two words, in int64."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of Philox-4x32-10, from four words of a counter and two of a key, each int64
    from 0 to 2**32 - 1."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        (high_a, low_a), (high_c, low_c) = _product(a, 0xD2511F53), _product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return a, b, c, d


def uniform(keys: Tensor, positions: Tensor, levels: int) -> Tensor:
    """u[T, levels] in float64, between 0 and 1 without both: the numbers of heights 0, 1, ..."""
    group = torch.arange(-(-levels // 4), device=keys.device).expand(len(keys), -1)
    at, key = positions[:, None].expand_as(group), keys[:, None].expand_as(group)
    counter = (at & WORD, (at >> 32) & WORD, group, torch.full_like(group, DRAWS))
    words = torch.stack(philox(counter, (key & WORD, (key >> 32) & WORD)), -1)
    return (words.flatten(1)[:, :levels].double() + 0.5) * 2.0**-32
