"""linear_grpo_loss on Triton: chunks of tokens, each with its part of the gradients.

It needs three products instead of four, because the loss depends on a token's log-probability
alone, so that a chunk of tokens is finished while its tiles are still in memory.
    1. x = hidden weight^T. Stored in the operands' dtype: E = exp(z - log(2) r[t]), with an integer
       r[t] from the target's logit, and the statistics of the tiles. logp comes from the statistics
       and has the bits of `linear_logp`. A row with logits far above or below its target's is
       brought to another r afterwards, by exact powers of two
    2. g[t] = dloss/dlogp[t], and dlogits = c[t] E, c = -g exp(log(2) r - lse) dz/dx; the element of
       the target is written into E from logp itself: g (1 - p) / c in fp32
    3. dhidden = c (E weight), c in fp32          4. dweight += E^T (c hidden)
E of a chunk of tokens takes at most CHUNK_BYTES. E of the first chunk may be larger, because
dweight and its lower halves are not written yet and have room for parts of it (`workspace.py`).
dweight continues from one chunk of tokens to the next in its fp32 accumulator
(`matmul/accumulate`; with several chunks its lower halves take two more bytes an element), and
dhidden from one chunk of the vocabulary to the next. So no bit of them depends on the chunks.

T = tokens   V = vocabulary   H = hidden size
"""

import torch
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.losses.linear_grpo import plan
from rlk_kernels.losses.linear_grpo.kernels import (
    clear_dead_rows,
    rebase,
    scale,
    scale_rows,
    token_gradient,
)
from rlk_kernels.losses.policy.kernels import prepare, reduce_loss
from rlk_kernels.losses.policy.objective import Objective
from rlk_kernels.matmul.accumulate.accumulate import accumulate
from rlk_kernels.matmul.accumulate.plan import PartialProduct, lo_accumulator
from rlk_kernels.matmul.plan import recorded_implementation
from rlk_kernels.memory import empties, empty
from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.ops.linear_logp.launch import (
    finish,
    forward_inference,
    is_trusted,
    pick,
    plane_shapes,
    planes_of,
    row_shapes,
    run_tiles,
    store_id_gradients,
)
from rlk_kernels.ops.linear_logp.options import LogitOptions, RowStatistics
from rlk_kernels.ops.linear_logp.plan import shape_of

__all__ = ["logp_alone", "logp_and_gradients", "prepare", "reduce_loss", "scale"]


def logp_and_gradients(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    tokens: tuple[Tensor | None, Tensor, Tensor | None, Tensor], spec: LogitOptions,
    objective: Objective, needs: list[bool],
) -> tuple[Tensor, list[Tensor | None], str]:  # fmt: skip
    """(logp[T], [dh, dw, db], the implementation that ran); tokens: old_logp, advantages, ref_logp,
    weights."""
    (t, k), v = h.shape, w.shape[0]
    old, advantages, ref, weights = tokens
    dh = torch.empty_like(h) if needs[0] else None
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if needs[1] else None
    logps = torch.empty(t, dtype=torch.float32, device=h.device)
    if t == 0:
        zero = None if bias is None else torch.zeros_like(bias)
        return logps, [dh, None if dw is None else dw.zero_(), zero], "triton"
    here = facts(h.device)
    shape = shape_of(h, w, spec.logit_dtype, here)
    planned = plan.plan_loss(shape, dw is not None, here, is_trusted(h, spec))
    block = torch.empty(planned.block, dtype=h.dtype, device=h.device)
    dh_lo = block[planned.dh_lo_offset :][: planned.dh_lo_rows * k]
    dh_lo = dh_lo.view(torch.int16).view(planned.dh_lo_rows, k)
    lo = None
    buffers = [block]
    if dw is not None:
        lo = lo_accumulator(dw, 2 if planned.lends_lo else len(planned.chunks))
        buffers += [dw.view(-1), lo.view(h.dtype).view(-1)]
    sums, ran = [], set()
    targets = torch.empty(t, dtype=torch.float32, device=h.device)
    pick(planned.pick, h, w, bias, ids, spec, targets)

    def run(chunk: plan.TokenChunk) -> None:
        """Compute a chunk's part of all results; its other memory is freed on return."""
        part, m = chunk.tokens, chunk.last - chunk.first
        chunk_ids = ids[part]
        stored = [vocab.view(buffers, m)[:, : vocab.last - vocab.first] for vocab in chunk.vocab]
        nodes = chunk.nodes(chunk.vocab[-1]).stop
        shapes = plane_shapes(nodes, m, False)
        n = empty(shapes[0], torch.float32, h.device)
        s, *above = empties(shapes[1:], torch.float32, h.device)
        inner = empties(row_shapes(chunk_ids, False)[1:-1], torch.float32, h.device)
        rows = RowStatistics(*[logps[part], *inner, targets[part]])
        for vocab, tiles, e in zip(chunk.vocab, chunk.tiles, stored, strict=True):
            node = chunk.nodes(vocab)
            run_tiles(
                tiles, h[part], w[vocab.columns], None if bias is None else bias[vocab.columns],
                spec, n[node], s[node], None, rows.z, None, e,
            )  # fmt: skip
            ran.add(tiles.implementation)
        finish(planes_of([n, s, *above], False), chunk_ids, rows, 0, m, False)
        del s, above  # before c hidden is allocated; of the statistics only n is read again
        g, a, c = token_gradient(
            rows, chunk_ids, None if old is None else old[part], advantages[part],
            None if ref is None else ref[part], weights[part], objective, spec.slope,
            h.dtype == torch.float16,
        )  # fmt: skip
        weighted = None if dw is None else scale_rows(h[part], c, torch.empty_like(h[part]))
        of_columns = []
        for vocab, tiles, e in zip(chunk.vocab, chunk.tiles, stored, strict=True):
            last = vocab.last == v
            rebase(e, n[chunk.nodes(vocab)], rows, tiles.node_columns)
            clear_dead_rows(e, g, rows)
            store_id_gradients(e, chunk_ids, rows, g, a, None, spec, vocab.first, e.shape[1], c)
            products = []
            if dh is not None:
                products.append(
                    PartialProduct(a=e, b=w[vocab.columns], out=dh[part], lo=dh_lo, trans_a=False,
                        first=vocab.first == 0, last=last, scale=c if last else None)
                )  # fmt: skip
            if dw is not None and lo is not None and weighted is not None:
                products.append(
                    PartialProduct(a=e, b=weighted, out=dw[vocab.columns], lo=lo[vocab.columns],
                        trans_a=True, first=part.start == 0, last=part.stop == t, rows=v)
                )  # fmt: skip
            ran.add(accumulate(*products))
            if needs[2]:
                whole = vocab.view(buffers, m)
                scale_rows(whole, c, whole)
                of_columns.append(column_sum(whole, "triton")[: e.shape[1]])
        if needs[2]:
            sums.append(torch.cat(of_columns))

    for chunk in planned.chunks:
        run(chunk)
    db = column_sum(torch.stack(sums), "triton") if needs[2] else None
    db = db if bias is None or db is None else db.to(bias.dtype)
    return logps, [dh, dw, db], recorded_implementation(ran)


def logp_alone(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: LogitOptions
) -> tuple[Tensor, str]:
    """(logp[T], the implementation that ran)."""
    (logp,), ran = forward_inference(h, w, bias, ids, spec, False, 1)
    return logp, ran
