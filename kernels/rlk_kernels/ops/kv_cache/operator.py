"""write_kv_cache: k_cache[slot // P, slot % P] = k[t] for slot = slots[t], and likewise v.

This is a copy without arithmetic. The engine assigns the slots; a token with a negative slot
(padding) is not written. No two tokens may share a slot.

T = tokens   Hk = KV heads   D = head size   P = block size of the cache
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.arguments import last_dense
from rlk_kernels.ops.kv_cache import portable

_module = two_backends(portable, lazy_module("rlk_kernels.ops.kv_cache.kernels"))


@custom_op("write_kv_cache", lambda *arguments: None, writes=("k_cache", "v_cache"))
def _write_kv_cache(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, backend: str
) -> None:
    _module("write_kv_cache", backend).write(k_cache, v_cache, k, v, slots)


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Write k[T, Hk, D] and v[T, Hk, D] into k_cache and v_cache[blocks, P, Hk, D] at slots[T].

    A slot is block * P + offset in the block (int32 or int64); a token with a negative slot is not
    written. The caches are those of `paged_attention`, with any strides and a dense last dimension:
    two halves of one tensor, or vLLM's [blocks, Hk, P, 2 D] as
    `cache.transpose(1, 2).split(D, -1)`. A slot beyond the cache raises IndexError on the torch
    backend, and is not written on a GPU. There are no gradients. Raises UnsupportedShape,
    UnsupportedDtype, and what `backend.choose` raises.
    """
    rows, pages = k.shape, k_cache.shape
    if len(rows) != 3 or len(pages) != 4 or v.shape != rows or v_cache.shape != pages:
        raise UnsupportedShape(
            "write_kv_cache: k and v[T, Hk, D] and caches[blocks, P, Hk, D] are needed, not "
            f"{tuple(rows)}, {tuple(v.shape)}, {tuple(pages)}, {tuple(v_cache.shape)}"
        )
    if pages[2:] != rows[1:] or pages[1] == 0 or slots.shape != rows[:1]:
        raise UnsupportedShape(
            f"write_kv_cache: caches {tuple(pages)} and slots {tuple(slots.shape)} do not fit k "
            f"{tuple(rows)}"
        )
    if k_cache.stride()[3] != 1 or v_cache.stride()[3] != 1:
        raise UnsupportedShape(
            "write_kv_cache: the last dimension of a cache must be dense; the caches have strides "
            f"{k_cache.stride()} and {v_cache.stride()}"
        )
    if slots.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"write_kv_cache: slots are {slots.dtype}; int32 or int64 is needed")
    dtype = k.dtype
    if not dtype == v.dtype == k_cache.dtype == v_cache.dtype:
        raise UnsupportedDtype(
            f"write_kv_cache: k, v and the caches are {dtype}, {v.dtype}, {k_cache.dtype} and "
            f"{v_cache.dtype}; one dtype is needed"
        )
    chosen = choose("write_kv_cache", backend, k, v, k_cache, v_cache, slots)
    if k.requires_grad or v.requires_grad:
        k, v = k.detach(), v.detach()
    k, v = last_dense(k), last_dense(v)
    call(_write_kv_cache, k_cache, v_cache, k, v, slots.contiguous(), chosen)
