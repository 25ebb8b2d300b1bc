"""The forward of `attention` and `paged_attention` on a GPU: how keys are walked, and by what.

The kernels are in `kernels.py`, on Hopper in `hopper_blocks.py` and `hopper_pieces.py`.

T = queries  S = keys  D = head size
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.device import facts
from rlk_kernels.direct import Layout, apart, empty, layout
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.launching import (
    cdiv,
    kept,
    launch,
    launches,
    power_of_2,
    repeat,
    tensor_map,
)
from rlk_kernels.ops.attention import kernels
from rlk_kernels.ops.attention.merge import merge_parts
from rlk_kernels.ops.attention.order import CHUNK, block_n, capped_scales
from rlk_kernels.ops.attention.schedule import (
    PIECES,
    SCRATCH_BYTES,
    ListPlan,
    list_plan,
    schedule,
)

FEW = 64
"""Packed rows of a sequence, in the mean, up to which queries are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """How keys are walked: time alone, no bit."""

    special: bool
    """By the kernels written for Hopper."""
    rows: int
    """Packed rows of a program."""
    split: bool
    """Keys are taken in pieces (`schedule.py`)."""
    listed: bool
    """Pieces come from a list; those of a batch of one sequence need none."""
    alone: bool
    """Few rows of one sequence: eight warps take them, and whoever ends last merges
    (`hopper_merge.py`)."""
    whole: bool
    """No row has more than one chunk of keys: pieces are blocks of rows, and nothing is merged."""
    slots: int
    """Packed rows of one KV head that have room in the scratch."""
    scratch: tuple[tuple[int, ...], ...]
    """What lies there, where keys are split: flags where `alone`, accumulators, (maximum, sum)."""
    most: int
    """Pieces of one KV head that there can be."""
    target: int
    """Pieces of all KV heads that are wanted, where there is enough work."""


def _plan(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, batch: int, rows: int | None,
    split: bool | None, special: bool | None,
) -> ForwardPlan:  # fmt: skip
    (tokens, heads, dim), kv_heads = q.shape, k.shape[-2]
    group, padded, here = heads // kv_heads, max(16, power_of_2(dim)), facts(q.device)
    paged = table is not None
    keys = table.shape[1] * k.shape[1] if table is not None else k.shape[0]
    chunks = cdiv(keys, CHUNK)
    few = tokens * group <= FEW * batch
    room = SCRATCH_BYTES // (kv_heads * (padded + 2) * 4)
    if special is None:
        special = rows is None and block_n(dim, q.dtype) == 128 and here.gluon
    if special:
        from rlk_kernels.ops.attention.hopper import reads

        # their offsets of heads have 32 bits
        special = reads(k, v, table) and heads * q.stride(1) < 1 << 31
    if rows is None and special:
        rows = 64 if few else 128
        if dim == 64 and here.many_groups and not (paged or split) and tokens > 4096 * batch:
            rows = 192  # a third group of four warps fills in for those that wait for exponentials
    if rows is None:
        rows = 16 if tokens * group <= 16 * batch and q.dtype != torch.float32 else 64
    blocks = (tokens * group) // rows + batch
    # four warps have no room for merged chunks beside their copies: theirs lie in slots
    running = special and rows == 64
    if split is None:
        split = chunks > 1 and (few or paged)
    # ranges of all blocks of rows, and of prefixes that neighbours share
    most = (blocks + batch // 2) * max(chunks, 1)
    most = min(most, PIECES[min(rows, 128)] * here.processors // kv_heads + blocks + batch)
    split = split and (not running or tokens * group <= room)
    # the list counts in 32 bits, and so much work needs no splitting
    split = split and blocks * chunks * kv_heads < 1 << 31
    alone = running and batch == 1 and tokens * group <= 16 and dim == 128
    slots = min(room, tokens * group * (chunks + 1))
    flags = ((most * kv_heads, 2),) if alone else ()  # of 8 bytes
    return ForwardPlan(
        special=special, rows=rows, split=split, listed=split and batch > 1,
        alone=alone, whole=running and not split and chunks <= 1, slots=slots,
        scratch=(*flags, (slots * kv_heads, padded), (slots * kv_heads, 2)), most=most,
        target=PIECES[min(rows, 128)] * here.processors,
    )  # fmt: skip


@functools.cache
def _pieces() -> ModuleType:
    from rlk_kernels.ops.attention import hopper_pieces

    return hopper_pieces


@functools.cache
def _blocks() -> ModuleType:
    from rlk_kernels.ops.attention import hopper_blocks

    return hopper_blocks


def _planned(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, batch: int, causal: bool,
    window: int | None, rows: int | None, split: bool | None, special: bool | None, softcap: float,
) -> tuple[dict, ForwardPlan]:  # fmt: skip
    """(what is kept for calls of this shape, how they walk their keys)."""
    seen = launches(
        "attention", q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.dtype, batch,
        None if table is None else (table.shape, table.stride(0)), causal, window, rows, split,
        special, q.device, (k.data_ptr() | v.data_ptr()) & 15 == 0, softcap > 0,
    )  # fmt: skip
    own = seen.get("plan")
    if own is None:
        special = False if softcap else special
        own = seen["plan"] = _plan(q, k, v, table, batch, rows, split, special)
    return seen, own


def _list_plan(
    seen: dict, own: ForwardPlan, q: Tensor, k: Tensor, cu_q: Tensor, table: Tensor | None,
    causal: bool, window: int | None,
) -> ListPlan:  # fmt: skip
    """How the list for `own` is made."""
    kv_heads = k.shape[-2]
    return list_plan(
        seen, cu_q, table, 1 if table is None else k.shape[1], kv_heads, q.shape[1] // kv_heads,
        own.rows, CHUNK, causal, window, own.special and own.rows == 64, own.slots, own.most,
    )  # fmt: skip


def paged_pieces(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens_k: Tensor, table: Tensor,
    window: int | None, softcap: float,
) -> tuple[Tensor, Tensor, bool] | None:  # fmt: skip
    """What `forward` takes as `given` for calls with these tables and lengths; None: no list."""
    batch = cu_q.numel() - 1
    if q.shape[0] == 0 or batch == 0:
        return None
    seen, own = _planned(q, k, v, table, batch, True, window, None, None, None, softcap)
    if not own.listed:
        return None
    made = _list_plan(seen, own, q, k, cu_q, table, True, window)
    memory = empty(made.layout.total, torch.int32, q.device)
    lists = apart(memory, made.layout)
    key = tuple(x.data_ptr() for x in (memory, cu_q, lens_k, table))
    repeat(seen, ("list", *key), schedule, seen, made, lists, cu_q, lens_k, table)
    return lists[0], lists[1], own.special


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens_k: Tensor, table: Tensor | None,
    causal: bool, scale: float, window: int | None,
    rows: int | None = None, split: bool | None = None, warp_specialized: bool | None = None,
    out: Tensor | None = None, softcap: float = 0.0,
    given: tuple[Tensor, Tensor, bool] | None = None, keeps_lse: bool = True,
) -> tuple[Tensor, Tensor, str]:  # fmt: skip
    """(out[T, Hq, D], lse[Hq, T], which implementation ran).

    `lens_k`: cu_seqlens_k, or context lengths with a `table`.

    `rows` (packed rows of a program), `split` and `warp_specialized` (copies in a warp of their
    own, `hopper.py`) change the time and never the bits; None leaves them to the shape. `out`:
    contiguous memory for the result. `softcap`: 0 is none; the kernels for Hopper have none.
    `given`: the pieces (`paged_pieces`) that calls with the same tables and lengths share.
    `keeps_lse`: False where nobody asks for lse: it lies in the call's scratch then, which may be
    what is returned in its place.
    """
    tokens, heads, dim = q.shape
    if out is None:
        out = empty((tokens, heads, dim), q.dtype, q.device)
    batch = cu_q.numel() - 1
    if tokens == 0 or batch == 0:
        return out, empty((heads, tokens), torch.float32, q.device), "triton"
    seen, own = _planned(
        q, k, v, table, batch, causal, window, rows, split, warp_specialized, softcap
    )
    implementation = "triton/hopper" if own.special else "triton"
    if own.special and not (own.split or own.whole):
        lse = empty((heads, tokens), torch.float32, q.device)
        _blocks().attend_hopper(
            seen, own.rows, q, k, v, out, lse, cu_q, lens_k, table, causal, scale, window
        )  # fmt: skip
        return out, lse, implementation
    if own.listed and given is not None and given[2] != own.special:
        raise UnsupportedShape(
            "paged_attention: the caches lie otherwise than those that the schedule was made with; "
            "make one with paged_schedule from this call's"
        )
    lists = made = None
    of_lists = (0, 0)
    if own.listed:
        if given is None:
            made = _list_plan(seen, own, q, k, cu_q, table, causal, window)
        else:
            lists = given[:2]
            of_lists = lists[0].data_ptr(), lists[1].data_ptr()
    inside = own.split and not keeps_lse
    of_lse = (heads, tokens) if inside else (0,)
    places = kept(seen, "places", (made is None, inside), _places, own, made, of_lse)
    lse = memory = empty(places.total if inside else (heads, tokens), torch.float32, q.device)
    if own.split and not inside:
        memory = empty(places.total, torch.float32, q.device)
    key = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(),
        memory.data_ptr(), cu_q.data_ptr(), lens_k.data_ptr(),
        0 if table is None else table.data_ptr(), *of_lists, scale, softcap,
    )  # fmt: skip
    repeat(
        seen, key, _launch, seen, own, made, lists, memory, places, q, k, v, out, lse, cu_q, lens_k,
        table, causal, scale, window, softcap,
    )  # fmt: skip
    return out, lse, implementation


def _places(own: ForwardPlan, made: ListPlan | None, of_lse: tuple[int, ...]) -> Layout:
    """Of what lies in a call's scratch: lse, own.scratch, and the list that it makes for itself."""
    lists = () if made is None else made.sizes
    return layout((of_lse, *own.scratch, *lists), torch.float32)


def _launch(
    seen: dict, own: ForwardPlan, made: ListPlan | None, lists: tuple[Tensor, Tensor] | None,
    memory: Tensor, places: Layout, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, cu_q: Tensor, lens_k: Tensor, table: Tensor | None, causal: bool,
    scale: float, window: int | None, softcap: float,
) -> None:  # fmt: skip
    """Fill out and lse."""
    part_acc = part_ml = flags = lse
    plan = pieces = cu_q
    if own.split:
        inside, *parts = apart(memory, places)
        lse = inside if inside.numel() else lse
        *told, part_acc, part_ml = parts[: len(own.scratch)]
        flags = told[0] if told else lse
        if made is not None:
            lists_made = [x.view(torch.int32) for x in parts[len(own.scratch) :]]
            plan, pieces, _ = lists_made
            schedule(seen, made, lists_made, cu_q, lens_k, table)
    if lists is not None:
        plan, pieces = lists
    if own.special:
        _pieces().attend_pieces(
            seen, own, plan, pieces, q, k, v, out, lse, part_acc, part_ml, flags, cu_q, lens_k,
            table, causal, scale, window,
        )  # fmt: skip
    else:
        _attend(
            seen, own, q, k, v, out, lse, part_acc, part_ml, plan, pieces, cu_q, lens_k, table,
            causal, scale, window, softcap,
        )  # fmt: skip
    if own.split and not own.alone:
        merge_parts(
            seen, own, plan, part_acc, part_ml, out, lse, cu_q, lens_k, k.shape[-2], CHUNK, causal,
            window, table is not None,
        )  # fmt: skip


def _attend(
    seen: dict, own: ForwardPlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    part_acc: Tensor, part_ml: Tensor, plan: Tensor, pieces: Tensor,
    cu_q: Tensor, lens_k: Tensor, table: Tensor | None, causal: bool, scale: float,
    window: int | None, softcap: float,
) -> None:  # fmt: skip
    """Fill out and lse with the kernel in plain Triton."""
    (tokens, heads, dim), kv_heads, rows = q.shape, k.shape[-2], own.rows
    here, batch, group = facts(q.device), cu_q.numel() - 1, heads // kv_heads
    padded, bn, paged = (
        max(16, power_of_2(dim)),
        block_n(dim, q.dtype),
        table is not None,
    )
    tma = (
        not paged and here.tma and q.dtype != torch.float32
        and all(x.data_ptr() % 16 == 0 and x.stride(2) == 1 for x in (k, v))
        and all(x.stride(i) * x.element_size() % 16 == 0 for x in (k, v) for i in (0, 1))
        and k.shape[0] > 0
    )  # fmt: skip
    k_desc, v_desc = k, v
    if tma:
        k_desc, v_desc = (
            tensor_map(
                TensorDescriptor, x.data_ptr(), x.dtype, x.shape, x.stride(), (bn, 1, padded)
            )
            for x in (k, v)
        )
    stages = 3 if bn == 64 and padded <= 128 and rows > 16 else 2
    k_strides = k.stride()[:3] if paged else (0, *k.stride()[:2])
    v_strides = v.stride()[:3] if paged else (0, *v.stride()[:2])
    bend, scale = capped_scales(scale, softcap)
    grid = ((tokens * group) // rows + batch, kv_heads, 1)
    if own.split:  # four programs a processor hide the latency of the gathers of a decode step
        grid = (min(4 * here.processors, own.most * kv_heads), 1, 1)
    launch(
        seen, kernels._attention_kernel, grid,
        (q, k, v, k_desc, v_desc, out, lse, part_acc, part_ml, plan, pieces, cu_q, lens_k,
         table if table is not None else cu_q, batch, tokens, own.slots, own.target, scale, bend,
         window or 0, q.stride(0), q.stride(1), *k_strides, *v_strides,
         table.stride(0) if table is not None else 0, kv_heads, group, dim, padded, rows, bn,
         CHUNK, causal, window is not None, paged, 1 if table is None else k.shape[1], tma,
         own.split, own.listed, softcap > 0, bn.bit_length() - 4, here.overlaps),
        {
            "num_warps": 8 if rows == 128 or (rows > 16 and bn == 128) else 4,
            "num_stages": 1 if q.dtype == torch.float32 else stages, "launch_pdl": here.overlaps,
            "maxnreg": 128 if rows == 16 and bn == 64 and padded <= 128 else None,
        },
    )  # fmt: skip
