"""linear_grpo_loss: the GRPO or PPO loss of a step from hidden states, with its gradients.

    logp = linear_logp(hidden, weight, target)        loss and metrics = grpo.py of logp
                                                      (triton: grpo_triton.py)

Three products instead of four: the loss needs of a token no more than its log-probability, so a
chunk of tokens is finished while its tiles are still there.
    1. x = hidden weight^T. Kept, at the operands' dtype: E = exp(z - log(2) r[t]) with an integer
       r[t] from the target's logit, beside the tiles' statistics; from them logp, with the bits of
       `linear_logp`. A row whose logits are far above or below its target's is brought to another
       r afterwards, by exact powers of two
    2. g[t] = dloss/dlogp[t], and dlogits = c[t] E, c = -g exp(log(2) r - lse) dz/dx; the element of
       the target is written into E from logp itself: g (1 - p) / c in fp32
    3. dhidden = c (E weight), c in fp32          4. dweight += E^T (c hidden)
A chunk's E is at most CHUNK bytes; that of the first may be larger, as dweight and its lower halves
are not written yet and have room for pieces of it (`room.py`). dweight goes on from chunk to chunk
in its fp32 accumulator (`accumulate.py`; with more than one chunk its lower halves take two bytes
an element beside it) and dhidden from piece to piece, so neither has a bit from these cuts.

The gradients are made in the forward, for an upstream gradient of 1; the backward multiplies them
by the upstream one in place, once: calling it a second time raises.

torch backend: the portable forward and backward of `linear_logp` (four products), same contract.

T = tokens   V = vocabulary   H = hidden size   B = sequences
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_kernels import grpo, grpo_triton
from rlk_kernels import linear_logp_kernels as kernels
from rlk_kernels.accumulate import accumulate, low_halves
from rlk_kernels.accumulate_triton import Sum
from rlk_kernels.backend import choose, record
from rlk_kernels.columns import column_sum
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.grpo import LOSS_TYPES, Loss, by_sequence, token_terms
from rlk_kernels.linear_grpo_kernels import rebase, scale, scale_rows, token_gradient
from rlk_kernels.linear_logp import as_rows, check, check_options
from rlk_kernels.linear_logp_portable import backward_portable, forward_portable
from rlk_kernels.linear_logp_triton import (
    Spec,
    finish,
    forward_triton,
    kept_columns,
    mark,
    new_rows,
    pick,
    planned_processors,
    run_tiles,
    tile_for,
)
from rlk_kernels.room import Piece, block_elements, round_up, together

CHUNK = 512 << 20
"""Bytes that a chunk of tokens takes: its E, at the operands' dtype."""
NUMBERS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
"""Dtypes of what comes a number a token."""


def first_chunk(
    t: int, v: int, k: int, size: int, most: int, processors: int
) -> tuple[int, tuple[Piece, ...]] | None:
    """Rows of the first chunk and the pieces of its E, so that the fewest chunks of `most` rows
    come after it. None: that would save no chunk.

    Within CHUNK are its statistics of tiles, c hidden, and the lower halves of dhidden too.
    """
    for others in range(-(-t // most) - 1):
        rows = min(t, round_up(t - others * most, 128))
        beside = rows * k * (2 if size == 2 else 1)
        block = (CHUNK - 8 * rows * -(-v // 128)) // size - beside
        # other chunks need the lower halves of dweight anyway; one alone does better without
        for spares in (1,) if size != 2 else (2,) if others else (1, 2):
            pieces = together(rows, v, k, block, spares, processors)
            if pieces:
                return rows, pieces
    return None


def chunks_of(
    t: int, v: int, k: int, size: int, spare: bool, processors: int
) -> list[tuple[slice, tuple[Piece, ...]]]:
    """Chunks of tokens and the pieces of their E: as few as can be, all but the first of nearly
    the same size.

    size: bytes of an element. spare: whether there is a weight gradient with room for the first.
    """
    wide = round_up(v)
    most = max(1, CHUNK // (wide * size) // 128) * 128
    first = first_chunk(t, v, k, size, most, processors) if spare else None
    chunks = [] if first is None else [(slice(0, first[0]), first[1])]
    start = 0 if first is None else first[0]
    if start < t:
        step = round_up(-(-(t - start) // -(-(t - start) // most)), 128)
        whole = (Piece(0, v, wide, 0, 0),)
        chunks += [(slice(x, min(x + step, t)), whole) for x in range(start, t, step)]
    return chunks


def _loss_and_gradients(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    tokens: tuple[Tensor | None, Tensor, Tensor | None, Tensor], spec: Spec, loss: Loss,
    needs: list[bool],
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """(logp[T], [dh, dw, db]); tokens: old_logp, advantages, ref_logp, weights."""
    (t, k), v, size = h.shape, w.shape[0], h.element_size()
    old, advantages, ref, weights = tokens
    dh = torch.empty_like(h) if needs[0] else None
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if needs[1] else None
    logps = torch.empty(t, dtype=torch.float32, device=h.device)
    if t == 0:
        zero = None if bias is None else torch.zeros_like(bias)
        return logps, [dh, None if dw is None else dw.zero_(), zero]
    chunks = chunks_of(t, v, k, size, dw is not None, planned_processors(h.device))
    first_rows, first_pieces = chunks[0][0].stop, chunks[0][1]
    blocks = [block_elements(pieces, part.stop - part.start) for part, pieces in chunks]
    halved = first_rows if size == 2 and len(first_pieces) > 1 else 0  # dhidden goes on there
    end = blocks[0] + halved * k
    block = torch.empty(max(end, *blocks), dtype=h.dtype, device=h.device)
    dh_low = block[blocks[0] : end].view(torch.int16).view(halved, k)
    low = None
    memories = [block]
    if dw is not None:
        lent = any(piece.memory == 2 for piece in first_pieces)
        low = low_halves(dw, 2 if lent else len(chunks))
        memories += [dw.view(-1), low.view(h.dtype).view(-1)]
    tile = tile_for(h, w, spec, kernels.KEEP)
    sums = []
    targets = pick(h, w, bias, ids, spec)
    for part, pieces in chunks:
        m, own = part.stop - part.start, ids[part]
        kept = [piece.of(memories, m)[:, : piece.last - piece.first] for piece in pieces]
        width = kept_columns(h, w, kept[0], tile)
        nodes = [slice(piece.first // width, -(-piece.last // width)) for piece in pieces]
        stats = torch.empty(2, nodes[-1].stop, m, dtype=torch.float32, device=h.device)
        rows = replace(new_rows(targets[part], False), logp=logps[part, None])
        for piece, e, node in zip(pieces, kept, nodes, strict=True):
            run_tiles(
                h[part], w[piece.columns], None if bias is None else bias[piece.columns], spec,
                tile, kernels.KEEP, stats[0, node], stats[1, node], None, rows.z, None, e,
            )  # fmt: skip
        finish(stats, own, rows, 0, m, False)
        g, a, c = token_gradient(
            rows, own, None if old is None else old[part], advantages[part],
            None if ref is None else ref[part], weights[part], loss, spec.slope,
            h.dtype == torch.float16,
        )  # fmt: skip
        weighted = None if dw is None else scale_rows(h[part], c, torch.empty_like(h[part]))
        of_columns = []
        for piece, e, node in zip(pieces, kept, nodes, strict=True):
            last = piece.last == v
            rebase(e, stats[0, node], rows, width)
            mark(e, own, rows, g[:, None], a, None, spec, piece.first, e.shape[1], slice(0, m), c)
            products = []
            if dh is not None:
                products.append(
                    Sum(a=e, b=w[piece.columns], out=dh[part], low=dh_low, trans_a=False,
                        first=piece.first == 0, last=last, scale=c if last else None)
                )  # fmt: skip
            if dw is not None and low is not None and weighted is not None:
                products.append(
                    Sum(a=e, b=weighted, out=dw[piece.columns], low=low[piece.columns],
                        trans_a=True, first=part.start == 0, last=part.stop == t, rows=v)
                )  # fmt: skip
            accumulate(*products)
            if needs[2]:
                whole = piece.of(memories, m)
                scale_rows(whole, c, whole)
                of_columns.append(column_sum(whole, "triton")[: e.shape[1]])
        if needs[2]:
            sums.append(torch.cat(of_columns))
    db = column_sum(torch.stack(sums), "triton") if needs[2] else None
    return logps, [dh, dw, db if bias is None or db is None else db.to(bias.dtype)]


class _LinearGRPO(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, tokens, spec, loss, backend, grad_enabled):
        record("linear_grpo_loss", backend)
        ctx.backend, ctx.used = backend, False
        needs = [grad_enabled and bool(x) for x in ctx.needs_input_grad[:3]]
        old, advantages, ref, weights = tokens
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if backend == "torch":
            rows = forward_portable(hidden, weight, bias, ids, spec, False)
            logp = rows.logp.squeeze(1)
            old = logp if old is None else old
            slope = token_terms(logp, old, advantages, ref, loss)[1]
            g = torch.where(weights == 0, 0.0, slope * weights)[:, None]
            grads = [None, None, None]
            if any(needs):
                grads = list(
                    backward_portable(hidden, weight, bias, ids, rows, g, None, None, spec, needs)
                )
                if bias is not None and grads[2] is not None:
                    grads[2] = grads[2].to(bias.dtype)
            value, metrics = grpo.reduce_loss(
                logp, old, advantages, weights != 0, weights, ref, loss
            )
        else:
            if any(needs):
                logp, grads = _loss_and_gradients(
                    hidden, weight, bias, ids, tokens, spec, loss, needs
                )
            else:
                rows = forward_triton(hidden, weight, bias, ids, spec, False)
                logp, grads = rows.logp.squeeze(1), [None, None, None]
            value, metrics = grpo_triton.reduce_loss(logp, old, advantages, weights, ref, loss)
        ctx.grads = grads
        ctx.names = list(metrics)
        found = tuple(metrics.values())
        ctx.mark_non_differentiable(logp, *found)
        ctx.set_materialize_grads(False)
        return value.to(wide), logp, ctx.names, *found

    @staticmethod
    @once_differentiable
    def backward(ctx, g, *_):
        if g is None:
            return (None,) * 9
        if ctx.used:
            raise RuntimeError(
                "linear_grpo_loss: its gradients are made once, in the forward; a second backward "
                "needs a second call"
            )
        ctx.used = True
        grads, ctx.grads = ctx.grads, None
        for i, x in enumerate(grads):
            if x is None or x.numel() == 0:
                continue
            if ctx.backend == "torch":
                grads[i] = torch.where(g == 1, x, (x * g).to(x.dtype))
            else:
                scale(x, g)
        return (*grads, *(None,) * 6)


def _partition(cu_seqlens: Tensor, t: int) -> bool:
    """Whether the sequences hold each token once. On a GPU asking would wait for it: not asked."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 + (t > 0):
        return False
    if cu_seqlens.device.type != "cpu":
        return True
    bounds = cu_seqlens.tolist()
    return bounds[0] == 0 and bounds[-1] == t and sorted(bounds) == bounds


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
    loss_type: str = "grpo",
    max_tokens: int | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    logit_dtype: torch.dtype = torch.float32,
    ignore_index: int = -100,
    backend: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of `grpo.py` (a float32 scalar, differentiable in hidden, weight, bias) and metrics.

    hidden[B, L, H] with target, mask, old_logp, ref_logp [B, L]; or hidden[T, H] packed, those [T],
    with cu_seqlens[B + 1] from 0 to T (checked on the CPU; on a GPU a token that no sequence holds
    gets NaN for what its sequence would give it). advantages: [B], one a sequence, or one a token.
    mask: 1 for the tokens that count; a token whose target is ignore_index or negative is masked
    out (it has logp 0 and no gradient). old_logp None: the policy's own log-probabilities (ratio
    1). beta above 0 needs ref_logp. loss_type: see `grpo.py`; dr_grpo takes max_tokens (default L;
    packed, it must be given). The rest as in `linear_logp`, whose bits the metrics' `logp` [T] has.

    metrics: detached tensors, `logp` and the scalars `grpo.METRICS`.
    Raises UnsupportedShape, UnsupportedDtype, ValueError, and what `backend.choose` raises.
    """
    name = "linear_grpo_loss"
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"{name}: loss_type {loss_type!r} is unknown; choose from {LOSS_TYPES}")
    if hidden.dim() == 3:
        sequences, length, _ = hidden.shape
        cu_seqlens = None
        max_tokens = length if max_tokens is None else max_tokens
        hidden = hidden.flatten(0, 1)
    elif cu_seqlens is None:
        raise UnsupportedShape(f"{name}: packed hidden[T, H] needs cu_seqlens[B + 1]")
    elif not _partition(cu_seqlens, target.numel()):
        raise UnsupportedShape(
            f"{name}: cu_seqlens must rise from 0 to the {target.numel()} tokens, not {cu_seqlens}"
        )
    else:
        sequences = cu_seqlens.shape[0] - 1
    max_tokens = None if max_tokens is None else int(max_tokens)
    if loss_type == "dr_grpo" and not (max_tokens and max_tokens > 0):
        raise ValueError(f"{name}: dr_grpo needs max_tokens of at least 1, not {max_tokens}")
    if beta and ref_logp is None:
        raise ValueError(f"{name}: beta {beta} needs ref_logp; without it there is no KL term")
    target, mask = target.flatten(), mask.flatten()
    check(name, hidden, weight, target, bias)
    spec = check_options(name, temperature, softcap, logit_scale, logit_dtype)
    if not isinstance(clip, tuple | list) or len(clip) != 2:
        raise ValueError(f"{name}: clip is (low, high), not {clip!r}")
    beta, low, high = float(beta), float(clip[0]), float(clip[1])
    if not (beta >= 0 and 0 <= low <= 1 and high >= 0):
        raise ValueError(f"{name}: beta {beta} and clip {clip} must not be negative, nor 1 - low")
    per_token = {"mask": mask}
    spread = by_sequence(advantages, sequences)
    if not spread:
        advantages = per_token["advantages"] = advantages.flatten()
    for what, x in (("old_logp", old_logp), ("ref_logp", ref_logp)):
        if x is not None:
            per_token[what] = x.detach().flatten().contiguous()
    for what, x in per_token.items():
        if x.shape[0] != target.shape[0]:
            raise UnsupportedShape(
                f"{name}: {what} has {x.shape[0]} numbers for {target.shape[0]} tokens"
            )
    for what, x in (per_token | {"advantages": advantages}).items():
        if x.dtype not in NUMBERS:
            raise UnsupportedDtype(f"{name}: {what} is {x.dtype}; it takes one of {NUMBERS}")
    chosen = choose(
        name, backend, hidden, weight, bias, target, cu_seqlens, advantages, *per_token.values()
    )
    prepare = grpo.prepare if chosen == "torch" else grpo_triton.prepare
    ids, advantages, weights = prepare(
        target, mask, advantages.detach(), spread, cu_seqlens, sequences, loss_type, max_tokens,
        int(ignore_index),
    )  # fmt: skip
    tokens = (per_token.get("old_logp"), advantages, per_token.get("ref_logp"), weights)
    value, logp, names, *found = _LinearGRPO.apply(
        as_rows(hidden), as_rows(weight), None if bias is None else bias.contiguous(),
        ids[:, None], tokens, spec, Loss(beta, low, high), chosen, torch.is_grad_enabled(),
    )  # fmt: skip
    return value, {"logp": logp, **dict(zip(names, found, strict=True))}
