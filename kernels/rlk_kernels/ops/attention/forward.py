"""The forward of `attention` and `paged_attention` on a GPU: its plan and its launches.

The kernels are in `kernels.py`, and for Hopper in `hopper/blocks.py` and `hopper/pieces.py`.

T = queries  S = keys  D = head size
"""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.device import facts, lazy_module
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.launching import (
    ShapeCache,
    cdiv,
    launch,
    power_of_2,
    replay_or_run,
    shape_cache,
    tensor_map,
)
from rlk_kernels.memory import MemoryLayout, empty, layout, views
from rlk_kernels.ops.attention import kernels
from rlk_kernels.ops.attention.call import AttentionCall, AttentionPlan, PieceList, Scratch
from rlk_kernels.ops.attention.merge import merge_parts
from rlk_kernels.ops.attention.order import CHUNK, block_n, capped_scales
from rlk_kernels.ops.attention.schedule import PIECES, SCRATCH_BYTES, ListPlan, list_plan, schedule

FEW = 64
"""The mean packed rows per sequence up to which queries count as few."""


def _plan(
    call: AttentionCall, rows: int | None, split: bool | None, special: bool | None
) -> AttentionPlan:
    q, k, table, batch, kv_heads = call.q, call.k, call.table, call.batch, call.kv_heads
    tokens, heads, dim = q.shape
    group, padded, here = call.group, max(16, power_of_2(dim)), facts(q.device)
    paged = table is not None
    keys = table.shape[1] * k.shape[1] if table is not None else k.shape[0]
    chunks = cdiv(keys, CHUNK)
    few = tokens * group <= FEW * batch
    room = SCRATCH_BYTES // (kv_heads * (padded + 2) * 4)
    if special is None:
        special = rows is None and q.dtype != torch.float32 and here.gluon
    if special:
        from rlk_kernels.ops.attention.hopper.steps import DIMS, can_read

        # the kernels compute offsets of heads in 32 bits
        special = dim in DIMS and can_read(k, call.v, table) and heads * q.stride(1) < 1 << 31
    if split is None:
        # heads of 256 have a kernel for Hopper where there are pieces, however few chunks
        split = (few or paged) and (chunks > 1 or (special and dim == 256 and not few))
    if special and dim == 256:  # so far over a cache alone
        special = paged and (split or (few and chunks <= 1 and rows in (None, 64)))
    if rows is None and special:
        rows = 64 if few else 128
        if dim == 64 and here.many_groups and not (paged or split) and tokens > 4096 * batch:
            rows = 192  # a third group of four warps works while others wait for exponentials
    if rows is None:
        rows = 16 if tokens * group <= 16 * batch and q.dtype != torch.float32 else 64
    blocks = (tokens * group) // rows + batch
    # ranges of all blocks of rows, and of the prefixes that neighbours share
    most = (blocks + batch // 2) * max(chunks, 1)
    most = min(most, PIECES[min(rows, 128)] * here.processors // kv_heads + blocks + batch)
    # the list counts in 32 bits, and more work than that needs no splitting
    split = split and blocks * chunks * kv_heads < 1 << 31
    narrow = special and rows == 64
    # one group of four warps has no shared memory for merged chunks, and heads of 256 have none
    programs = min(most * kv_heads, here.processors) if narrow or (special and dim == 256) else 0
    alone = narrow and batch == 1 and tokens * group <= 16 and dim == 128
    slots = min(room, tokens * group * (chunks + 1))
    target = PIECES[min(rows, 128)] * here.processors
    undivided = split and not few and _undivided(call, cdiv(tokens * group, rows), target)
    flags = ((most * kv_heads, 2),) if alone else ()  # of 8 bytes
    return AttentionPlan(
        special=special, rows=rows, split=split, listed=split and batch > 1,
        alone=alone, merged=split and not (alone or undivided), programs=programs,
        whole=narrow and not split and chunks <= 1, slots=slots,
        scratch=(
            *flags, (slots * kv_heads, padded), (slots * kv_heads, 2), (programs * rows, padded)
        ),
        most=most, target=1 if undivided else target,
    )  # fmt: skip


def _undivided(call: AttentionCall, blocks: int, target: int) -> bool:
    """Whether each block of rows is one piece, so that there is nothing to merge: the window of a
    row is no longer than a chunk, or the blocks of a lone sequence are so many that `schedule.py`
    divides none of them."""
    near = call.window is not None and call.window <= CHUNK
    return near or (call.batch == 1 and 2 * blocks * call.kv_heads > target)


_hopper_blocks = lazy_module("rlk_kernels.ops.attention.hopper.blocks")
_hopper_pieces = lazy_module("rlk_kernels.ops.attention.hopper.pieces")


def _planned(
    call: AttentionCall, rows: int | None, split: bool | None, special: bool | None
) -> tuple[ShapeCache, AttentionPlan]:
    """(the cache of calls of this shape, their plan)."""
    q, k, v, table = call.q, call.k, call.v, call.table
    cache = shape_cache(
        "attention", q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.dtype,
        call.cu_q.numel(), None if table is None else (table.shape, table.stride(0)), call.causal,
        call.window, rows, split, special, q.device, (k.data_ptr() | v.data_ptr()) & 15 == 0,
        call.softcap > 0,
    )  # fmt: skip
    plan = cache.plan
    if plan is None:
        plan = cache.plan = _plan(call, rows, split, False if call.softcap else special)
    return cache, plan


def paged_pieces(call: AttentionCall) -> PieceList | None:
    """The list that calls with these tables and lengths can share; None if they need no list."""
    if call.q.shape[0] == 0 or call.batch == 0:
        return None
    cache, plan = _planned(call, None, None, None)
    if not plan.listed:
        return None
    own = list_plan(cache, plan, call, CHUNK)
    memory = empty(own.layout.total, torch.int32, call.q.device)
    lists = views(memory, own.layout)
    read = call.cu_q, call.lens_k, call.table
    replay_or_run(cache, (memory, *read), (), schedule, own, lists, call)
    return PieceList(lists[0], lists[1], plan.special)


def forward(
    call: AttentionCall, rows: int | None = None, split: bool | None = None,
    warp_specialized: bool | None = None,
) -> tuple[Tensor, Tensor, str]:  # fmt: skip
    """(out[T, Hq, D], lse[Hq, T], the implementation that ran).

    `rows` (packed rows of a program), `split` and `warp_specialized` (a separate warp for copies,
    `hopper/steps.py`) change the time and never the bits; None: the shape decides.
    """
    q, device = call.q, call.q.device
    tokens, heads, dim = q.shape
    out = call.out
    if out is None:
        out = call.out = empty((tokens, heads, dim), q.dtype, device)
    if tokens == 0 or call.cu_q.numel() == 1:
        return out, empty((heads, tokens), torch.float32, device), "triton"
    cache, plan = _planned(call, rows, split, warp_specialized)
    implementation = "triton/hopper" if plan.special else "triton"
    if plan.special and not (plan.split or plan.whole):
        lse = empty((heads, tokens), torch.float32, device)
        _hopper_blocks().attend_hopper(cache, plan.rows, call, lse)
        return out, lse, implementation
    own = entries = pieces = None
    if plan.listed:
        if call.shared is None:
            own = list_plan(cache, plan, call, CHUNK)
        else:
            entries, pieces = call.shared.entries, call.shared.pieces
            if call.shared.special != plan.special:
                raise UnsupportedShape(
                    "paged_attention: the caches' strides differ from those that the schedule was "
                    "made for; call paged_schedule with the caches of this call"
                )
    scratch_layout, lse_shape = None, (heads, tokens)
    if plan.split:
        inside = not call.keeps_lse
        shape = lse_shape if inside else (0,)
        scratch_layout = cache.get_or_create(
            "scratch_layout", (own is None, inside), _scratch_layout, plan, own, shape
        )
        lse_shape = scratch_layout.total if inside else lse_shape
    lse = memory = empty(lse_shape, torch.float32, device)
    if scratch_layout is not None and call.keeps_lse:
        memory = empty(scratch_layout.total, torch.float32, device)
    tensors = (
        memory, lse, q, call.k, call.v, out, call.cu_q, call.lens_k, call.table, entries, pieces
    )  # fmt: skip
    replay_or_run(
        cache, tensors, (call.scale, call.softcap),
        _launch, plan, own, call, lse, memory, scratch_layout,
    )  # fmt: skip
    return out, lse, implementation


def _scratch_layout(
    plan: AttentionPlan, own: ListPlan | None, lse: tuple[int, ...]
) -> MemoryLayout:
    """The layout of a call's scratch: lse, plan.scratch, and the list that the call makes."""
    lists = () if own is None else own.sizes
    return layout((lse, *plan.scratch, *lists), torch.float32)


def _launch(
    cache: ShapeCache, plan: AttentionPlan, own: ListPlan | None, call: AttentionCall, lse: Tensor,
    memory: Tensor, scratch_layout: MemoryLayout | None,
) -> None:  # fmt: skip
    """Fill call.out and lse. own: the plan of the list that the call makes, if it makes one;
    scratch_layout: the layout of `memory`, if keys are split."""
    scratch = Scratch.unused(lse, call.cu_q)
    if scratch_layout is not None:
        inside, *parts = views(memory, scratch_layout)
        if inside.numel():
            scratch.lse = inside
        flags = parts.pop(0) if plan.alone else scratch.lse
        scratch.flags, scratch.acc, scratch.max_sum, scratch.running = flags, *parts[:3]
        if own is not None:
            lists = [x.view(torch.int32) for x in parts[3:]]
            scratch.entries, scratch.pieces, _ = lists
            schedule(cache, own, lists, call)
    if plan.listed and call.shared is not None:
        scratch.entries, scratch.pieces = call.shared.entries, call.shared.pieces
    if plan.special:
        _hopper_pieces().attend_pieces(cache, plan, call, scratch)
    else:
        _attend(cache, plan, call, scratch)
    if plan.merged:
        merge_parts(cache, plan, call, scratch, CHUNK)


def _attend(cache: ShapeCache, plan: AttentionPlan, call: AttentionCall, scratch: Scratch) -> None:
    """Fill call.out and lse, or the slots, by the kernel in plain Triton."""
    q, k, v, table, rows, window = call.q, call.k, call.v, call.table, plan.rows, call.window
    (tokens, _, dim), kv_heads, group, batch = q.shape, call.kv_heads, call.group, call.batch
    here, padded, bn, paged = (
        facts(q.device), max(16, power_of_2(dim)), block_n(dim, q.dtype), table is not None
    )  # fmt: skip
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
    bend, scale = capped_scales(call.scale, call.softcap)
    grid = ((tokens * group) // rows + batch, kv_heads, 1)
    if plan.split:  # four programs a processor hide the latency of gathers in a decode step
        grid = (min(4 * here.processors, plan.most * kv_heads), 1, 1)
    launch(
        cache, kernels._attention_kernel, grid,
        (q, k, v, k_desc, v_desc, call.out, scratch.lse, scratch.acc, scratch.max_sum,
         scratch.entries, scratch.pieces, call.cu_q, call.lens_k,
         table if table is not None else call.cu_q, batch, tokens, plan.slots, plan.target, scale,
         bend, window or 0, q.stride(0), q.stride(1), *k_strides, *v_strides,
         table.stride(0) if table is not None else 0, kv_heads, group, dim, padded, rows, bn,
         CHUNK, call.causal, window is not None, paged, call.page or 1, tma,
         plan.split, plan.listed, call.softcap > 0, bn.bit_length() - 4, here.overlaps),
        {
            # two accumulators of 64 rows of 256 features are all registers of four warps
            "num_warps": 8 if rows == 128 or (rows > 16 and (bn == 128 or padded > 128)) else 4,
            "num_stages": 1 if q.dtype == torch.float32 else stages, "launch_pdl": here.overlaps,
            "maxnreg": 128 if rows == 16 and bn == 64 and padded <= 128 else None,
        },
    )  # fmt: skip
