"""linear_grpo_loss on Triton: chunks of tokens, each with its part of the gradients.

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

T = tokens   V = vocabulary   H = hidden size
"""

from dataclasses import replace

import torch
from torch import Tensor

from rlk_kernels import linear_logp_kernels as kernels
from rlk_kernels.accumulate import accumulate, low_halves
from rlk_kernels.accumulate_triton import Sum
from rlk_kernels.columns import column_sum
from rlk_kernels.grpo import Loss
from rlk_kernels.linear_grpo_kernels import rebase, scale_rows, token_gradient
from rlk_kernels.linear_logp_triton import (
    Spec,
    finish,
    kept_columns,
    mark,
    new_rows,
    pick,
    planned_processors,
    run_tiles,
    slabs,
    tile_for,
)
from rlk_kernels.room import Piece, block_elements, round_up, together

CHUNK = 512 << 20
"""Bytes that a chunk of tokens takes: its E, at the operands' dtype."""


def first_chunk(
    t: int, v: int, k: int, size: int, most: int, processors: int
) -> tuple[int, tuple[Piece, ...]]:
    """Rows of the first chunk and the pieces of its E, so that the fewest chunks of `most` rows
    come after it. No rows: that would save no chunk.

    If it is the only one, CHUNK holds its statistics of tiles, c hidden, and the lower halves of
    dhidden too.
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
    return 0, ()


def chunks_of(
    t: int, v: int, k: int, size: int, spare: bool, processors: int
) -> list[tuple[slice, tuple[Piece, ...]]]:
    """Chunks of tokens and the pieces of their E: as few as can be, all but the first of nearly
    the same size.

    size: bytes of an element. spare: whether there is a weight gradient with room for the first.
    """
    wide = round_up(v)
    most = max(1, CHUNK // (wide * size) // 128) * 128
    rows, pieces = first_chunk(t, v, k, size, most, processors) if spare else (0, ())
    whole = (Piece(0, v, wide, 0, 0),)
    chunks = [(slice(0, rows), pieces)] if rows else []
    return chunks + [(slice(rows + x, rows + y), whole) for x, y in slabs(t - rows, most)]


def logp_and_gradients(
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
