"""`prepare` and `reduce_loss` on Triton, in at most four launches.

    prepare       ids, advantages and weights of the tokens: counts, then elementwise
    reduce_loss   the loss and the metrics in float64: blocks of tokens, then one program

Counts are whole numbers, which any order adds exactly. In `reduce_loss` a program adds BLOCK
consecutive tokens in one fixed order. Of the blocks' sums, column j of LANES adds blocks j,
j + LANES, ... from front to back; then the columns are added in one fixed order. So the order
depends on T alone; it is not that of `portable.py`, which adds by halves of the batch. There are no
atomics, and no number goes to the host, so that a CUDA graph can capture all launches.

A token counts if its weight is not 0. A token outside every sequence of cu_seqlens (whose bounds
are not checked on a GPU) has NaN for the weight and the advantage that its sequence would give it;
nothing is read out of range.

T = tokens   B = sequences
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.losses.policy.objective import METRICS, Objective
from rlk_kernels.memory import empties, empty
from rlk_kernels.numerics.dtypes import wide_dtype

BLOCK, LANES = 512, 64
"""Tokens of a program, and blocks of a step of `_metrics_kernel`: the order of the sums."""
COUNT_BLOCK = 4096
"""Tokens of a step of `_count_kernel` (time only)."""

PLANES = tl.constexpr(len(METRICS) + 1)
"""The planes of partial sums: the loss, then METRICS."""
(
    TOKENS, CLIP, CLIP_LOW, CLIP_HIGH, K1, K3, RATIO_MEAN, LOGP_MEAN, RATIO_MIN, RATIO_MAX, REF_K3,
) = (tl.constexpr(1 + i) for i in range(len(METRICS)))  # fmt: skip


@triton.jit
def _ids(target_ptr, mask_ptr, token, inside, ignore_index):
    """(id of each token or -1, whether it counts)."""
    id = tl.load(target_ptr + token, mask=inside, other=-1).to(tl.int64)
    id = tl.where((id == ignore_index) | (id < 0), -1, id)
    mask = tl.load(mask_ptr + token, mask=inside, other=0)
    return id, inside & (mask != 0) & (id >= 0)


@triton.jit(do_not_specialize=["T", "length", "ignore_index"])
def _count_kernel(
    target_ptr, mask_ptr, cu_ptr, count_ptr, T, length, ignore_index,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The number of counting tokens of each sequence; not PACKED: `length` tokens a sequence."""
    sequence = tl.program_id(0)
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence).to(tl.int64), 0), T).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence + 1).to(tl.int64), 0), T).to(tl.int32)
    else:
        start = sequence * length
        end = start + length
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        _, on = _ids(target_ptr, mask_ptr, token, token < end, ignore_index)
        count += on.to(tl.int32)
    tl.store(count_ptr + sequence, tl.sum(count, 0))


@triton.jit
def _sequence_of(token, inside, cu_ptr, B, length, steps, PACKED: tl.constexpr):
    """(the sequence of a token by `objective.sequence_of`, whether the sequence contains it)."""
    if PACKED:
        low = tl.zeros_like(token)
        high = low + B
        for _ in range(steps):
            middle = (low + high) // 2
            open = low < high
            behind = open & (tl.load(cu_ptr + middle + 1, mask=open, other=0) <= token)
            low = tl.where(behind, middle + 1, low)
            high = tl.where(behind, high, middle)
        known = inside & (low < B)
        known = known & (tl.load(cu_ptr + low, mask=known, other=0) <= token)
        sequence = low
    else:
        sequence = token // length
        known = inside
    return sequence, known


@triton.jit(do_not_specialize=["T", "B", "length", "steps", "share", "ignore_index"])
def _prepare_kernel(
    target_ptr, mask_ptr, cu_ptr, count_ptr, table_ptr, id_ptr, advantage_ptr, w_ptr,
    T, B, length, steps, share: tl.int64, ignore_index,
    PACKED: tl.constexpr, COUNTED: tl.constexpr, GRPO: tl.constexpr, SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Ids, weights 1 / (count x share), and with SPREAD the advantages of the tokens' sequences."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < T
    id, on = _ids(target_ptr, mask_ptr, token, inside, ignore_index)
    tl.store(id_ptr + token, id, mask=inside)
    sequence = tl.zeros_like(token)
    known = inside
    if GRPO or SPREAD:
        sequence, known = _sequence_of(token, inside, cu_ptr, B, length, steps, PACKED)
    whole = tl.full((BLOCK,), 1.0, tl.float64) * share
    if GRPO:
        whole *= tl.load(count_ptr + sequence, mask=known & on, other=1)
        whole = tl.where(known, whole, float("nan"))
    elif COUNTED:
        whole *= tl.maximum(tl.load(count_ptr), 1)
    tl.store(w_ptr + token, tl.where(on, 1.0 / whole, 0.0), mask=inside)
    if SPREAD:
        advantage = tl.load(table_ptr + sequence, mask=known, other=0)
        advantage = advantage.to(advantage_ptr.dtype.element_ty)
        advantage = tl.where(known, advantage, float("nan"))
        tl.store(advantage_ptr + token, advantage, mask=inside)


@triton.jit
def unclipped_term(ratio, advantage):
    """ratio x advantage; 0 for an advantage of 0, however large the ratio."""
    return tl.where((advantage == 0.0) & (ratio == float("inf")), 0.0, ratio * advantage)


@triton.jit
def _k3(d):
    """exp(d) - 1 - d in float64; below 1/8 by its series, whose relative error is 4e-18."""
    series = d * (1 / 39916800) + 1 / 3628800
    series = series * d + 1 / 362880
    series = series * d + 1 / 40320
    series = series * d + 1 / 5040
    series = series * d + 1 / 720
    series = series * d + 1 / 120
    series = series * d + 1 / 24
    series = series * d + 1 / 6
    series = series * d + 1 / 2
    return tl.where(tl.abs(d) < 0.125, series * d * d, tl.exp(d) - 1.0 - d)


@triton.jit
def _sum_on(x, on):
    return tl.sum(tl.where(on, x, 0.0), 0)


@triton.jit(do_not_specialize=["T", "blocks"])
def _reduce_kernel(
    logp_ptr, old_ptr, advantage_ptr, ref_ptr, w_ptr, part_ptr, T, blocks,
    low: tl.float64, high: tl.float64, beta: tl.float64,
    HAS_REF: tl.constexpr, PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """part[PLANES, blocks] of a block: sums, minimum and maximum over the tokens that count."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + token, mask=token < T, other=0.0)
    on = w != 0.0
    logp = tl.load(logp_ptr + token, mask=on, other=0.0).to(tl.float64)
    log_ratio = logp - tl.load(old_ptr + token, mask=on, other=0.0).to(tl.float64)
    advantage = tl.load(advantage_ptr + token, mask=on, other=0).to(tl.float64)
    ratio = tl.exp(log_ratio)
    unclipped = unclipped_term(ratio, advantage)
    clipped = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio)) * advantage
    active = unclipped > clipped
    value = -tl.where(active, clipped, unclipped)
    at = part_ptr + tl.program_id(0)
    if HAS_REF:
        ref_k3 = _k3(tl.load(ref_ptr + token, mask=on, other=0.0).to(tl.float64) - logp)
        tl.store(at + REF_K3 * blocks, _sum_on(ref_k3, on))
        if PENALTY:
            value += beta * ref_k3
    tl.store(at, _sum_on(value * w, on))
    tl.store(at + TOKENS * blocks, _sum_on(tl.full((BLOCK,), 1.0, tl.float64), on))
    tl.store(at + CLIP * blocks, _sum_on(active.to(tl.float64), on))
    tl.store(at + CLIP_LOW * blocks, _sum_on((active & (ratio < 1.0)).to(tl.float64), on))
    tl.store(at + CLIP_HIGH * blocks, _sum_on((active & (ratio > 1.0)).to(tl.float64), on))
    tl.store(at + K1 * blocks, _sum_on(-log_ratio, on))
    tl.store(at + K3 * blocks, _sum_on(_k3(log_ratio), on))
    tl.store(at + RATIO_MEAN * blocks, _sum_on(ratio, on))
    tl.store(at + LOGP_MEAN * blocks, _sum_on(logp, on))
    tl.store(at + RATIO_MIN * blocks, tl.min(tl.where(on, ratio, float("inf")), 0))
    tl.store(at + RATIO_MAX * blocks, tl.max(tl.where(on, ratio, 0.0), 0))


@triton.jit(do_not_specialize=["blocks"])
def _metrics_kernel(
    part_ptr, loss_ptr, metrics_ptr, blocks, HAS_REF: tl.constexpr, LANES: tl.constexpr
):
    """The loss and METRICS in fp32 from part[PLANES, blocks], in one program."""
    plane = tl.arange(0, 16)
    least = plane == RATIO_MIN
    most = plane == RATIO_MAX
    there = plane < (PLANES if HAS_REF else REF_K3)
    none = tl.where(least, float("inf"), tl.zeros((16,), tl.float64))[:, None]
    acc = none + tl.zeros((16, LANES), tl.float64)
    for first in range(0, blocks, LANES):
        block = first + tl.arange(0, LANES)[None, :]
        inside = there[:, None] & (block < blocks)
        x = tl.load(part_ptr + plane[:, None] * blocks + block, mask=inside, other=0.0)
        x = tl.where(inside, x, none)
        bound = tl.where(least[:, None], tl.minimum(acc, x), tl.maximum(acc, x))
        acc = tl.where((least | most)[:, None], bound, acc + x)
    total = tl.sum(acc, 1)
    count = tl.maximum(tl.sum(tl.where(plane == TOKENS, total, 0.0), 0), 1.0)
    ratio = tl.sum(tl.where(plane == RATIO_MEAN, total, 0.0), 0)
    bound = tl.where(least, tl.min(acc, 1), tl.max(acc, 1))
    bound = tl.where(ratio == ratio, bound, ratio)  # a minimum may drop NaN
    value = tl.where(plane <= TOKENS, total, total / count)
    value = tl.where(least | most, bound, value).to(tl.float32)
    tl.store(loss_ptr + plane, value, mask=plane == 0)
    tl.store(metrics_ptr + plane - 1, value, mask=(plane > 0) & there)


def prepare(
    target: Tensor, mask: Tensor, advantages: Tensor, spread: bool, cu_seqlens: Tensor | None,
    sequences: int, loss_type: str, max_tokens: int | None, ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`portable.prepare`, with the tokens' advantages in fp32, or float64 for float64."""
    t, device = target.shape[0], target.device
    grpo, counted = loss_type == "grpo", loss_type != "dr_grpo"
    share = max(sequences, 1) if grpo else 1
    ids, count = empties(((t,), (share if counted else 0,)), torch.int64, device)
    weights = empty((t,), torch.float64, device)
    packed = cu_seqlens is not None
    out = table = advantages.contiguous()
    if spread:
        wide = wide_dtype(advantages.dtype)
        out = empty((t,), wide, device)
    if t == 0:
        return ids, out, weights
    target, mask = target.contiguous(), mask.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    length = t // max(sequences, 1)
    cache = shape_cache(
        "grpo", target.dtype, mask.dtype, table.dtype,
        None if cu_seqlens is None else cu_seqlens.dtype, spread, loss_type, device,
    )  # fmt: skip
    if counted:
        launch(
            cache, _count_kernel, (share, 1, 1),
            (target, mask, cu_seqlens, count, t, length if grpo else t, ignore_index,
             packed and grpo, COUNT_BLOCK),
            {"num_warps": 8},
        )  # fmt: skip
    else:
        assert max_tokens is not None
        share = max(sequences, 1) * max_tokens
    launch(
        cache, _prepare_kernel, (cdiv(t, BLOCK), 1, 1),
        (target, mask, cu_seqlens, count, table, ids, out, weights, t, sequences, length,
         sequences.bit_length(), share, ignore_index, packed, counted, grpo, spread, BLOCK),
        {"num_warps": 4},
    )  # fmt: skip
    return ids, out, weights


def reduce_loss(
    logp: Tensor, old_logp: Tensor | None, advantages: Tensor, weights: Tensor,
    ref_logp: Tensor | None, objective: Objective,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`portable.reduce_loss` of contiguous tensors [T], with the loss in float32."""
    t, device = logp.shape[0], logp.device
    blocks, has_ref = cdiv(t, BLOCK), ref_logp is not None
    names = METRICS if has_ref else METRICS[:-1]
    part = empty((PLANES.value, blocks), torch.float64, device)
    value, metrics = empties(((), (len(names),)), torch.float32, device)
    cache = shape_cache(
        "grpo loss", logp.dtype, None if old_logp is None else old_logp.dtype, advantages.dtype,
        None if ref_logp is None else ref_logp.dtype, objective.beta > 0, device,
    )  # fmt: skip
    if t:
        launch(
            cache, _reduce_kernel, (blocks, 1, 1),
            (logp, logp if old_logp is None else old_logp, advantages, ref_logp, weights, part, t,
             blocks, 1.0 - objective.low, 1.0 + objective.high, objective.beta, has_ref,
             has_ref and objective.beta > 0, BLOCK),
            {"num_warps": 4},
        )  # fmt: skip
    launch(
        cache, _metrics_kernel, (1, 1, 1),
        (part, value, metrics, blocks, has_ref, LANES),
        {"num_warps": 4},
    )  # fmt: skip
    return value, dict(zip(names, metrics.unbind(), strict=True))
