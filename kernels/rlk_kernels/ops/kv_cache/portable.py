"""`write_kv_cache` in PyTorch."""

from torch import Tensor


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k and v[T, Hk, D] to slots[T]."""
    blocks, page = k_cache.shape[:2]
    if slots.numel() and int(slots.max()) >= blocks * page:
        raise IndexError(
            f"write_kv_cache: slot {int(slots.max())} is not below {blocks} blocks of {page}"
        )
    taken = slots >= 0
    at = slots[taken].long()
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[at // page, at % page] = x[taken]
