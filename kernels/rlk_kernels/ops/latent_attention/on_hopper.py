"""Latent attention by the kernel for Hopper: what it can read, its plan and its launches.

T = queries  H = heads  L = features of a latent  R = rotated features  B = sequences
"""

import torch
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import ShapeCache, cdiv, launch, shape_cache
from rlk_kernels.matmul.hopper.pipeline import ROWS, tensor_map_at
from rlk_kernels.memory import empty, layout, views
from rlk_kernels.ops.attention.call import AttentionCall, AttentionPlan, Scratch
from rlk_kernels.ops.attention.hopper.rings import BLOCK
from rlk_kernels.ops.attention.hopper.steps import as_matrix, can_read, keys_per_copy
from rlk_kernels.ops.attention.hopper.work import LISTED, LONE
from rlk_kernels.ops.attention.merge import merge_parts
from rlk_kernels.ops.attention.order import LOG2E
from rlk_kernels.ops.attention.schedule import ListPlan, list_plan, schedule
from rlk_kernels.ops.latent_attention.hopper import (
    HALF,
    LATENT,
    ROTATED,
    latent_hopper_kernel,
)
from rlk_kernels.ops.latent_attention.kernels import CHUNK

SCRATCH_BYTES = 1 << 28
"""The most memory for chunks that are not merged yet."""
STATE = LATENT.value + 2
"""Numbers of fp32 of a row's state."""


def can_run(q: Tensor, latents: Tensor, batch: int, table: Tensor | None, latent: int) -> bool:
    """Whether the kernel runs, with these inputs of `on_triton.forward`."""
    keys, blocks = latents.unsqueeze(-2), q.shape[0] * q.shape[1] // ROWS.value + batch
    return (
        facts(q.device).gluon and q.dtype in (torch.bfloat16, torch.float16)
        and (latent, q.shape[2] - latent) == (LATENT.value, ROTATED.value)
        and can_read(keys, keys[..., :latent], table)
        and q.shape[1] * q.stride(1) < 1 << 31  # the kernel computes offsets of heads in 32 bits
        and blocks * _chunks(keys, table) < 1 << 31
    )  # fmt: skip


def _chunks(keys: Tensor, table: Tensor | None) -> int:
    """The most chunks of a sequence."""
    return cdiv(keys.shape[0] if table is None else table.shape[1] * keys.shape[1], CHUNK)


def _plan(call: AttentionCall) -> AttentionPlan:
    (tokens, heads, _), batch, rows = call.q.shape, call.batch, ROWS.value
    chunks, processors = _chunks(call.k, call.table), facts(call.q.device).processors
    blocks = tokens * heads // rows + batch
    # Only rows with a second piece store chunks. With a piece per processor as the target, a
    # sequence of more blocks of rows than half of the processors has none.
    stored = min(tokens * heads, rows * (processors + 1)) * (chunks + 1) if chunks > 1 else 0
    slots = min(stored, SCRATCH_BYTES // (4 * STATE))
    most = min((blocks + batch // 2) * max(chunks, 1), processors + blocks + batch)
    programs = min(most, processors)
    return AttentionPlan(
        special=True, rows=rows, split=True, listed=batch > 1, alone=False, merged=slots > 0,
        programs=programs, whole=False, slots=slots, most=most, target=processors,
        scratch=((slots, LATENT.value), (slots, 2), (programs * rows, LATENT.value)),
    )  # fmt: skip


def attend(
    q: Tensor, latents: Tensor, cu_q: Tensor, lens_k: Tensor, table: Tensor | None, scale: float,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Fill out[T, H, L] and lse[H, T]; the inputs are those of `on_triton.forward` that `can_run`
    accepts, of at least one query and one sequence."""
    keys = latents.unsqueeze(-2)
    call = AttentionCall(
        q, keys, keys[..., : LATENT.value], cu_q, lens_k, table, True, scale, None, out=out
    )
    cache = shape_cache(
        "latent_attention_hopper", q.shape, q.stride(), latents.shape, latents.stride(), q.dtype,
        cu_q.numel(), None if table is None else (table.shape, table.stride(0)), q.device,
    )  # fmt: skip
    plan = cache.plan
    if plan is None:
        plan = cache.plan = _plan(call)
    own: ListPlan | None = list_plan(cache, plan, call, CHUNK) if plan.listed else None
    memory_layout = layout((*plan.scratch, *(own.sizes if own else ())), torch.float32)
    parts = views(empty(memory_layout.total, torch.float32, q.device), memory_layout)
    scratch = Scratch.unused(lse, cu_q)
    scratch.acc, scratch.max_sum, scratch.running = parts[:3]
    if own is not None:
        lists = [x.view(torch.int32) for x in parts[3:]]
        scratch.entries, scratch.pieces, _ = lists
        schedule(cache, own, lists, call)
    _attend(cache, plan, call, scratch)
    if plan.merged:
        merge_parts(cache, plan, call, scratch, CHUNK)


def _attend(cache: ShapeCache, plan: AttentionPlan, call: AttentionCall, scratch: Scratch) -> None:
    """Fill call.out and lse, or the slots."""
    q, keys, table, here = call.q, call.k, call.table, facts(call.q.device)
    maps = cache.get_or_create("maps", keys.data_ptr(), _maps, keys, table)
    how = LISTED if plan.listed else LONE
    launch(
        cache, latent_hopper_kernel, (plan.programs, 1, 1),
        (scratch.entries, scratch.pieces, call.cu_q, call.lens_k, q, *maps, call.out, scratch.lse,
         scratch.acc, scratch.max_sum, scratch.running, call.cu_q if table is None else table,
         call.batch, q.shape[0], plan.slots, plan.target, call.scale * LOG2E, q.stride(0),
         q.stride(1), 0 if table is None else keys.stride(0) // keys.stride(1),
         0 if table is None else table.stride(0), q.shape[1], how.value, call.page,
         here.overlaps),
        {"num_warps": 4, "maxnreg": 168, "launch_pdl": here.overlaps},
    )  # fmt: skip


def _maps(keys: Tensor, table: Tensor | None) -> list:
    """Tensor maps of half of the latents of a block of keys, and of their rotated features."""
    size = as_matrix(keys.shape, keys.stride(), table is not None)
    assert size is not None  # `can_run`
    length = BLOCK.value if table is None else keys_per_copy(keys.shape[1], BLOCK.value)
    return [
        tensor_map_at(keys.data_ptr(), keys.dtype, size, (keys.stride(-3), 1), (length, columns))
        for columns in (HALF.value, ROTATED.value)
    ]
