"""Latent attention on the triton backend: launches of its kernels in plain Triton. `on_hopper.py`
launches the one for Hopper.

T = queries  S = keys  H = heads  L = features of a latent  R = rotated features  B = sequences
"""

import math

import torch
from torch import Tensor

from rlk_kernels.device import facts, interpreting, lazy_module
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.attention.order import LOG2E
from rlk_kernels.ops.latent_attention import backward_kernels, kernels
from rlk_kernels.ops.latent_attention.kernels import CHUNK, block_n

ROWS = 64
"""Packed rows of a program: those of one product of Hopper's tensor cores. No bit depends on
them."""
WIDE_ROWS = 16
"""Those for fp32 rows, whose products are not on tensor cores."""
SCRATCH_BYTES = 1 << 28
"""The most memory for chunks that are not merged yet."""
HEADS = 16
"""The most heads of a program of the latents' gradient: part of the order of its sums."""
SPECIAL = True
"""Whether the kernel for Hopper runs where it can."""
OPTIONS = {"num_warps": 8, "num_stages": 2}
WIDE_OPTIONS = {"num_warps": 8, "num_stages": 1}

_on_hopper = lazy_module("rlk_kernels.ops.latent_attention.on_hopper")


def _rows(dtype: torch.dtype) -> int:
    return WIDE_ROWS if interpreting() or dtype == torch.float32 else ROWS


def _options(dtype: torch.dtype) -> dict:
    return WIDE_OPTIONS if dtype == torch.float32 else OPTIONS


def _widths(q: Tensor, latent: int) -> tuple[int, int, int, int]:
    """(L, R, and both padded to what a product of tiles takes)."""
    rotated = q.shape[2] - latent
    return latent, max(16, power_of_2(latent)), rotated, max(16, power_of_2(rotated))


def _aligned(x: Tensor) -> bool:
    """Whether each row of x[T, H, features] begins at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:2])


def forward(
    q: Tensor, latents: Tensor, cu_q: Tensor, lens_k: Tensor, table: Tensor | None, latent: int,
    scale: float, ways: int | None = None, special: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out[T, H, L], lse[H, T]). latents[S, L + R] with lens_k[B + 1], the begins of sequences; or
    with a table a cache[blocks, P, L + R], and lens_k[B], the numbers of keys. ways: the programs
    that divide the chunks of a block of rows, in plain Triton; None: the shape decides. special:
    the kernel for Hopper runs where it can; None: SPECIAL. No bit depends on either."""
    special = SPECIAL if special is None else special
    (tokens, heads, _), device, batch = q.shape, q.device, cu_q.numel() - 1
    out = empty((tokens, heads, latent), q.dtype, device)
    lse = empty((heads, tokens), torch.float32, device)
    if tokens == 0 or batch == 0:
        return out, lse
    special = special and ways is None and facts(device).gluon
    if special and _on_hopper().can_run(q, latents, batch, table, latent):
        _on_hopper().attend(q, latents, cu_q, lens_k, table, scale, out, lse)
        return out, lse
    paged = table is not None
    page = latents.shape[1] if paged else 1
    keys = table.shape[1] * page if table is not None else latents.shape[0]
    rows, processors = _rows(q.dtype), facts(device).processors
    blocks, most = tokens * heads // rows + batch, max(1, cdiv(keys, CHUNK))
    widths = _widths(q, latent)
    ways = min(most, processors // blocks) if ways is None else ways
    split = most > 1 and ways > 1
    slots = min(tokens * heads * most, SCRATCH_BYTES // (4 * widths[1])) if split else 0
    programs = blocks if split else min(blocks, processors)
    # In a step of decode every sequence has as many blocks, of which the last one is empty: no
    # program may get these alone.
    while programs < blocks and math.gcd(programs, heads // rows + 1) > 1:
        programs -= 1
    running = empty((programs * rows if most > 1 else 1, widths[1]), torch.float32, device)
    acc, base = empty((slots, widths[1]), torch.float32, device), cu_q
    max_sum = empty((slots, 2), torch.float32, device)
    strides = q.stride(0), q.stride(1), latents.stride(0) if paged else 0, latents.stride(-2)
    own = shape_cache(
        "latent_attention", heads, widths, q.dtype, strides, paged, page, split, batch == 1, device
    )
    if split:
        base = empty((batch,), torch.int64, device)
        launch(
            own, kernels.slots_kernel, (1, 1, 1),
            (cu_q, lens_k, base, batch, slots, heads, CHUNK, paged, max(16, power_of_2(batch))),
            {"num_warps": 1}, (power_of_2(batch),),
        )  # fmt: skip
    bn = block_n(q.dtype)
    launch(
        own, kernels.attend_kernel, (programs, ways if split else 1, 1),
        (q, latents, out, lse, running, acc, max_sum, base, cu_q, lens_k,
         cu_q if table is None else table, batch, tokens, blocks, scale * LOG2E, *strides,
         0 if table is None else table.stride(0), heads, *widths, rows, bn, CHUNK, paged, page,
         split, bn.bit_length() - 4),
        _options(q.dtype),
    )  # fmt: skip
    if split:
        launch(
            own, kernels.merge_kernel, (tokens + batch, heads, 1),
            (out, lse, acc, max_sum, base, cu_q, lens_k, batch, tokens, heads, *widths[:2], CHUNK,
             paged),
            {"num_warps": 1},
        )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, latents: Tensor, cu_q: Tensor, cu_k: Tensor, latent: int, scale: float, out: Tensor,
    lse: Tensor, do: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dq, dlatents), contiguous, in the inputs' dtypes; zeros for rows outside every sequence."""
    (tokens, heads, _), device, batch = q.shape, q.device, cu_q.numel() - 1
    dq = torch.zeros(q.shape, dtype=q.dtype, device=device)
    groups, keys = cdiv(heads, HEADS), latents.shape[0]
    parts = torch.zeros((groups, *latents.shape), dtype=torch.float32, device=device)
    if tokens and keys and batch:
        widths, small = _widths(q, latent), _rows(q.dtype)
        # Tiles of the other side of a product: what fits beside two of them in shared memory.
        bn = small if small == WIDE_ROWS else ROWS // 2
        strides = q.stride(0), q.stride(1), latents.stride(0)
        delta = empty((heads, tokens), torch.float32, device)
        own = shape_cache(
            "latent_attention_backward", heads, widths, q.dtype, strides, batch == 1, device
        )
        launch(
            own, backward_kernels.delta_kernel, (cdiv(tokens * heads, 8), 1, 1),
            (out, do, delta, tokens, heads, *widths[:2], 8), {"num_warps": 4},
        )  # fmt: skip
        given = q, latents, do, lse, delta
        launch(
            own, backward_kernels.queries_kernel, (tokens * heads // small + batch, 1, 1),
            (*given, dq, cu_q, cu_k, batch, tokens, scale * LOG2E, scale, *strides, heads, *widths,
             small, bn),
            _options(q.dtype),
        )  # fmt: skip
        launch(
            own, backward_kernels.latents_kernel, (keys // small + batch, groups, 1),
            (*given, parts, cu_q, cu_k, batch, tokens, keys, scale * LOG2E, scale, *strides, heads,
             cdiv(heads, groups), *widths, bn, small, _aligned(q) and _aligned(do)),
            _options(q.dtype),
        )  # fmt: skip
    total = parts[0]
    for part in parts[1:]:
        total += part
    return dq, total.to(latents.dtype)
