"""linear_logp on Triton: the tile kernels over chunks of tokens and chunks of the vocabulary.

Memory at a time: in the forward (n, s) of all tiles of a chunk of tokens, at most STATISTICS_BYTES.
In the backward dlogits of a chunk of tokens over one chunk of the vocabulary, unless the weight
gradient has room for them (`workspace.py`), and the lower halves of partial accumulators
(`matmul/accumulate`), at most WORKSPACE_BYTES together. The chunks change no bit: the tree of a row
does not depend on chunks of tokens, and a sum continues from one chunk of the vocabulary to the
next in its accumulator. Beyond ONE_PASS_ELEMENTS hidden gradients, the backward computes the two
gradients in two passes (five products instead of four), so that its memory does not grow with the
number of tokens.

T = tokens   V = vocabulary   H = hidden size   J = ids a token (the target, then `token_ids`)
"""

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.device import facts
from rlk_kernels.launching import ShapeCache, cdiv, launch, replay_or_run, shape_cache
from rlk_kernels.matmul import epilogue
from rlk_kernels.matmul.accumulate.accumulate import accumulate
from rlk_kernels.matmul.accumulate.plan import PartialProduct, lo_accumulator
from rlk_kernels.matmul.launch import hopper_epilogue
from rlk_kernels.matmul.plan import EpiloguePlan, recorded_implementation
from rlk_kernels.matmul.self_check import trusted
from rlk_kernels.matmul.split import segments
from rlk_kernels.memory import MemoryLayout, empty, layout, views
from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.lse_tree.tree import LEAF, levels
from rlk_kernels.numerics.rows import tree_sum
from rlk_kernels.ops.linear_logp import kernels, plan
from rlk_kernels.ops.linear_logp.options import LogitOptions, RowStatistics
from rlk_kernels.ops.linear_logp.workspace import VocabChunk

FINISH_ROWS = 64
"""Rows of a program of the tree above the tiles (time only)."""
Planes = tuple[Tensor, Tensor, Tensor | None]
"""(n, s, and u or None)[nodes, T] of one level of the tree; u is for the entropy."""
_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def flags(spec: LogitOptions) -> tuple[object, bool, bool]:
    """The kernels' constants: the logit dtype, whether logits are capped, whether they are
    scaled."""
    return _TL[spec.logit_dtype], spec.softcap > 0, spec.scaled


def is_trusted(h: Tensor, spec: LogitOptions) -> bool:
    """Whether the logits of h may use any tile."""
    split = segments(h.shape[1], h.dtype, spec.logit_dtype)[0] > 0
    return trusted(h.device, h.dtype, split)


def _permuted(w: Tensor, tile_n: int, tile_k: int) -> TensorDescriptor:
    """A tensor map of w[V, H], V a multiple of 128, in the order of PERMUTED (`epilogue.py`)."""
    (v, k), row = w.shape, w.stride(0)
    shape, strides = [v // 128, 16, 4, 2, k], [128 * row, 2 * row, 32 * row, row, 1]
    return TensorDescriptor(w, shape, strides, [tile_n // 128, 16, 4, 2, tile_k])


def run_tiles(
    tiling: EpiloguePlan, h: Tensor, w: Tensor, bias: Tensor | None, spec: LogitOptions,
    n: Tensor, s: Tensor, u: Tensor | None = None, a: Tensor | None = None,
    b: Tensor | None = None, out: Tensor | None = None, cache: ShapeCache | None = None,
) -> None:  # fmt: skip
    """Launch all tiles of h[T, H] @ w[V, H]^T as `tiling` says. cache: the cache of these shapes,
    if the launch is repeated."""
    t, v, k = h.shape[0], w.shape[0], h.shape[1]
    if t == 0 or v == 0:
        return
    tile = tiling.tile
    numbers = (*spec.numbers, spec.inverse_top)
    chosen = (bias is not None, *flags(spec), u is not None or b is not None)
    if tiling.kernel == "hopper":
        hopper_epilogue().hopper_tiles(
            tiling, h, w, bias, n, s, u, a, b, out, numbers, chosen, cache
        )
        return
    mode, partial, ragged = epilogue.MODES[tiling.epilogue], v % tile.n != 0, v % LEAF != 0
    stride = 0 if out is None else out.stride(0)
    tiles = triton.cdiv(t, tile.m) * triton.cdiv(v, tile.n)
    if tiling.kernel == "tma":
        box = [tile.n, tile.k]
        kernels._tiles_tma_kernel[(min(tiles, tiling.processors),)](
            TensorDescriptor.from_tensor(h, [tile.m, tile.k]),
            _permuted(w, *box) if tiling.permuted else TensorDescriptor.from_tensor(w, box),
            bias, n, s, u, a, b,
            TensorDescriptor.from_tensor(out, [tile.m, tile.n]) if tiling.tma_store else h,
            out, t, v, k, tiling.last_segment, stride, *numbers, mode, *chosen, partial,
            ragged, tile.m, tile.n, tile.k, levels(tile.n // LEAF), tile.group, tile.flatten,
            tiling.tma_store, tiling.permuted, tiling.segment, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        return
    kernels._tiles_pointer_kernel[(tiles,)](
        h, w, bias, n, s, u, a, b, out, t, v, k, tiling.last_segment, h.stride(0), w.stride(0),
        stride, *numbers, mode, *chosen, partial, ragged,
        tile.m, tile.n, tile.k, levels(tile.n // LEAF), tile.group, tiling.segment,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _per_row(ids: Tensor) -> int:
    """J of ids[T, J], or 1 of ids[T]."""
    return 1 if ids.dim() == 1 else ids.shape[1]


def pick(
    pick_plan: plan.PickPlan, h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    spec: LogitOptions, z: Tensor, cache: ShapeCache | None = None,
) -> None:  # fmt: skip
    """Fill z with the logits of the ids, both [T, J] or [T]; NaN if an id is not a column. cache:
    see `run_tiles`."""
    cache = ShapeCache() if cache is None else cache
    grid, constants, options = cache.get_or_create(
        "pick", None, _pick_constants, pick_plan, h, w, bias, ids, spec
    )
    launch(cache, kernels._pick_kernel, grid, (h, w, bias, ids, z, *constants), options)


def _pick_constants(
    pick_plan: plan.PickPlan, h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    spec: LogitOptions,
) -> tuple[tuple[int, int, int], tuple, dict]:  # fmt: skip
    """What calls of one shape share: (grid, constants, options)."""
    t, j, tile = ids.shape[0], _per_row(ids), pick_plan.tile
    constants = (
        t, w.shape[0], h.shape[1], pick_plan.last_segment, j, h.stride(0), w.stride(0),
        *spec.numbers, bias is not None, *flags(spec), tile.m, tile.k, pick_plan.segment,
    )  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return (cdiv(t, tile.m), j, 1), constants, options


def row_shapes(ids: Tensor, entropy: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of the `RowStatistics` of ids[T, J] or ids[T]."""
    t = ids.shape[0]
    return ids.shape, (t,), (t if entropy else 0,), (t,), (t,), ids.shape


def finish(
    planes: list[Planes], ids: Tensor, rows: RowStatistics, first: int, last: int, entropy: bool,
    cache: ShapeCache | None = None,
) -> None:  # fmt: skip
    """Fill rows first ... last from the statistics of the tiles. planes: all levels, the first of
    them filled; cache: see `run_tiles`."""
    m = last - first
    grid = cdiv(m, FINISH_ROWS)
    for below, above in pairwise(planes):
        nodes = below[0].shape[0]
        launch(
            cache, kernels._collapse_kernel, (grid, above[0].shape[0], 1),
            (*below, *above, m, nodes, entropy, FINISH_ROWS, 5),
            {"num_warps": 1}, (nodes, m),
        )  # fmt: skip
    nodes = planes[-1][0].shape[0]
    of_rows = rows.entropy if entropy else None
    tensors = (ids, rows.z, rows.logp, rows.lse, of_rows, rows.n, rows.log_s)
    if m < ids.shape[0]:
        tensors = tuple(None if x is None else x[first:last] for x in tensors)
    launch(
        cache, kernels._finish_kernel, (grid, 1, 1),
        (*planes[-1], *tensors, m, _per_row(ids), nodes, entropy, FINISH_ROWS, levels(nodes)),
        {"num_warps": 1},
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def plane_shapes(nodes: int, t: int, entropy: bool) -> tuple[tuple[int, int], ...]:
    """The shapes of the planes of t rows: the nodes of the tiles, then levels with a 32nd of the
    nodes each, until there are at most 32."""
    each = 3 if entropy else 2
    return ((nodes, t),) * each + (() if nodes <= 32 else plane_shapes(cdiv(nodes, 32), t, entropy))


def planes_in(
    memory: Tensor, nodes: int, t: int, entropy: bool, before: tuple[tuple[int, ...], ...] = ()
) -> list[Planes]:
    """The planes of `plane_shapes` in `memory`, after tensors of the shapes `before`."""
    places = layout((*before, *plane_shapes(nodes, t, entropy)), memory.dtype)
    return planes_of(views(memory, places)[len(before) :], entropy)


def planes_of(flat: list[Tensor], entropy: bool) -> list[Planes]:
    """Tensors of the shapes of `plane_shapes`, by level of the tree."""
    each = 3 if entropy else 2
    return [
        (flat[i], flat[i + 1], flat[i + 2] if entropy else None) for i in range(0, len(flat), each)
    ]


def forward(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: LogitOptions, entropy: bool
) -> tuple[RowStatistics, str]:
    """(statistics, the implementation that ran); h[T, H], w[V, H], contiguous ids[T, J] or [T]."""
    cache, planned = _planned(h, w, bias, ids, spec, entropy)
    shapes = row_shapes(ids, entropy)
    rows = RowStatistics(*[empty(shape, torch.float32, ids.device) for shape in shapes])
    _fill(cache, planned, h, w, bias, ids, spec, entropy, rows)
    return rows, planned.plan.tiles.implementation


def forward_inference(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: LogitOptions, entropy: bool,
    count: int,
) -> tuple[list[Tensor], str]:  # fmt: skip
    """(the first `count` of logp, lse and entropy, the implementation that ran) of a call without a
    backward. They share memory, so no custom operator may return them."""
    cache, planned = _planned(h, w, bias, ids, spec, entropy)
    results = empty(planned.results.total, torch.float32, ids.device)
    _fill(cache, planned, h, w, bias, ids, spec, entropy, results)
    return views(results, planned.results, count), planned.plan.tiles.implementation


@dataclass(frozen=True, slots=True)
class _Planned:
    """What calls of one shape share."""

    plan: plan.ForwardPlan
    results: MemoryLayout
    """The layout of logp, lse and entropy."""
    inner: tuple[tuple[int, ...], ...]
    """Shapes of the other `RowStatistics`, which a call without a backward has in its scratch,
    before the planes."""
    scratch: tuple[MemoryLayout, MemoryLayout]
    """The layouts without `inner` and with it."""


def _planned(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: LogitOptions, entropy: bool
) -> tuple[ShapeCache, _Planned]:
    """(the cache of calls of this shape, how they run)."""
    cache = shape_cache(
        "linear_logp", h.shape, h.stride(), w.shape, w.stride(), h.dtype,
        None if bias is None else bias.dtype, ids.shape, spec, entropy, h.device,
        (h.data_ptr() | w.data_ptr()) & 15 == 0,
    )  # fmt: skip
    planned = cache.plan
    if planned is None:
        here = facts(h.device)
        shape = plan.shape_of(h, w, spec.logit_dtype, here)
        chosen = plan.plan_forward(shape, entropy, here, is_trusted(h, spec))
        rows = row_shapes(ids, entropy)
        longest = chosen.chunks[0][1] if chosen.chunks else 0
        planes = plane_shapes(chosen.nodes, longest, entropy)
        planned = cache.plan = _Planned(
            chosen, layout(rows[:3], torch.float32), rows[3:],
            (layout(planes, torch.float32), layout((*rows[3:], *planes), torch.float32)),
        )  # fmt: skip
    return cache, planned


def _fill(
    cache: ShapeCache, planned: _Planned, h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    spec: LogitOptions, entropy: bool, rows: RowStatistics | Tensor,
) -> None:  # fmt: skip
    """Fill `rows`: statistics, or the memory of the first three of them."""
    if not planned.plan.chunks:
        return
    scratch = empty(planned.scratch[isinstance(rows, Tensor)].total, torch.float32, h.device)
    arguments = (planned, h, w, bias, ids, spec, entropy, rows, scratch)
    if planned.plan.tiles.kernel == "hopper":
        filled = (rows,) if isinstance(rows, Tensor) else rows
        memory = (scratch, h, w, bias, ids, *filled)
        replay_or_run(cache, memory, (), _launch_forward, *arguments)
    else:
        _launch_forward(cache, *arguments)


def _launch_forward(
    cache: ShapeCache, planned: _Planned, h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor,
    spec: LogitOptions, entropy: bool, rows: RowStatistics | Tensor, scratch: Tensor,
) -> None:  # fmt: skip
    inner = ()
    if isinstance(rows, Tensor):
        inner = planned.inner
        inside = views(scratch, planned.scratch[True], len(inner))
        rows = RowStatistics(*views(rows, planned.results), *inside)
    pick(planned.plan.pick, h, w, bias, ids, spec, rows.z, cache)
    for first, last in planned.plan.chunks:
        m = last - first
        planes = planes_in(scratch, planned.plan.nodes, m, entropy, inner)  # all chunks' memory
        some = h if m == h.shape[0] else h[first:last]
        run_tiles(planned.plan.tiles, some, w, bias, spec, *planes[0], cache=cache)
        finish(planes, ids, rows, first, last, entropy, cache)


def coefficients(
    ids: Tensor, g: Tensor, g_lse: Tensor | None, g_entropy: Tensor | None, entropy: Tensor,
    spec: LogitOptions,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(g[T, J] of the ids, a[T], b[T] or None) of dlogits = p (a + b log2 p) + g at the ids."""
    # `where` with a number instead of a tensor would wait for the GPU
    g = g.float().masked_fill(ids < 0, 0.0) * spec.slope
    a = -(g if g.shape[1] == 1 else tree_sum(g)).squeeze(-1)
    if g_lse is not None:
        a = a + g_lse.float() * spec.slope
    if g_entropy is None:
        return g.contiguous(), a.contiguous(), None
    b = g_entropy.float() * -spec.slope
    return g.contiguous(), torch.where(b == 0, a, a + b * entropy), b * 0.6931471805599453


@dataclass(frozen=True, slots=True)
class _Part:
    """The inputs of the dlogits of some tokens; see `_copy_live_rows`."""

    h: Tensor
    ids: Tensor
    rows: RowStatistics
    g: Tensor
    a: Tensor
    b: Tensor | None


def _copy_live_rows(
    into: Tensor, h: Tensor, ids: Tensor, rows: RowStatistics, g: Tensor, a: Tensor,
    b: Tensor | None, part: slice,
) -> _Part:  # fmt: skip
    """The tokens `part` with a copy of h in which rows without a gradient are zero: 0 x NaN is NaN,
    and the weight gradient is a sum over all rows."""
    h, ids, g, a = h[part], ids[part], g[part], a[part]
    b = None if b is None else b[part]
    (t, k), j, block = h.shape, ids.shape[1], 2048
    old = [x[part] for x in (rows.n, rows.log_s, rows.z)]
    new = [torch.empty_like(x) for x in old]
    out = into[:t, :k]
    kernels._copy_live_rows_kernel[(t, max(1, triton.cdiv(k, block)))](
        h, g, a, b, *old, out, *new, k, j, h.stride(0), out.stride(0), b is not None, block,
        num_warps=4,
    )  # fmt: skip
    n, log_s, z = new
    return _Part(out, ids, rows._replace(n=n, log_s=log_s, z=z), g, a, b)


def store_id_gradients(
    out: Tensor, ids: Tensor, rows: RowStatistics, g: Tensor, a: Tensor, b: Tensor | None,
    spec: LogitOptions, first: int, v: int, unit: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the dlogits (divided by unit[T]) of the ids among columns first ... first + v."""
    t, j = ids.shape[0], _per_row(ids)
    kernels._id_gradient_kernel[(triton.cdiv(t, 128), j)](
        out, ids, rows.z, g, rows.n, rows.log_s, a, b, unit, t, j, first, v, out.stride(0),
        spec.inverse_top, spec.softcap > 0, b is not None, unit is not None, 128, num_warps=4,
    )  # fmt: skip


def backward(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, rows: RowStatistics, g: Tensor,
    g_lse: Tensor | None, g_entropy: Tensor | None, spec: LogitOptions, needs: list[bool],
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None], str]:  # fmt: skip
    """((dh, dw, dbias), the implementation that ran); a gradient that `needs` excludes is None, and
    dbias is in fp32."""
    t, v = h.shape[0], w.shape[0]
    g, a, b = coefficients(ids, g, g_lse, g_entropy, rows.entropy, spec)
    dh = torch.empty_like(h) if needs[0] else None
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if needs[1] else None
    db = torch.zeros(v, dtype=torch.float32, device=w.device) if needs[2] else None
    if t == 0:
        return (dh, None if dw is None else dw.zero_(), db), "triton"
    here = facts(h.device)
    shape = plan.shape_of(h, w, spec.logit_dtype, here)
    backward = plan.plan_backward(shape, dw is not None, here, is_trusted(h, spec))
    ran = {x.implementation for x in backward.tiles}
    block = torch.empty(backward.block, dtype=h.dtype, device=h.device)
    buffers = [block] if dw is None else [block, dw.view(-1)]
    vocab_chunks = list(zip(backward.vocab, backward.tiles, strict=True))

    # for all chunks of tokens, with rows that a tensor map can describe
    copy = torch.empty(
        backward.chunks[0][1], -(-h.shape[1] // 8) * 8, dtype=h.dtype, device=h.device
    )

    def dlogits(x: _Part, vocab: VocabChunk, tiles: EpiloguePlan) -> Tensor:
        """The dlogits of some tokens over a chunk of the vocabulary."""
        out = vocab.view(buffers, x.h.shape[0])[:, : vocab.last - vocab.first]
        run_tiles(
            tiles, x.h, w[vocab.columns], None if bias is None else bias[vocab.columns], spec,
            x.rows.n, x.rows.log_s, None, x.a, x.b, out,
        )  # fmt: skip
        store_id_gradients(out, x.ids, x.rows, x.g, x.a, x.b, spec, vocab.first, out.shape[1])
        return out

    def columns(part: slice, vocab: VocabChunk) -> Tensor:
        """The sums over rows of dlogits, in their full width, on which the order may depend."""
        whole = vocab.view(buffers, part.stop - part.start)
        return column_sum(whole, "triton")[: vocab.last - vocab.first]

    if dh is not None:
        # for all chunks of tokens
        los = lo_accumulator(dh[: backward.chunks[0][1]], len(backward.vocab))
        for start, stop in backward.chunks:
            part = slice(start, stop)
            live = _copy_live_rows(copy, h, ids, rows, g, a, b, part)
            lo = los[: stop - start]
            for vocab, tiles in vocab_chunks:
                out = dlogits(live, vocab, tiles)
                sums = [
                    PartialProduct(a=out, b=w[vocab.columns], out=dh[part], lo=lo, trans_a=False,
                        first=vocab.first == 0, last=vocab.last == v)
                ]  # fmt: skip
                if backward.one_pass and dw is not None:
                    sums.append(
                        PartialProduct(a=out, b=live.h, out=dw[vocab.columns], lo=lo,
                            trans_a=True, first=True, last=True)
                    )  # fmt: skip
                ran.add(accumulate(*sums))
                if backward.one_pass and db is not None:
                    db[vocab.columns] = columns(part, vocab)
        del los, lo, sums
    if (dw is not None or db is not None) and not (backward.one_pass and dh is not None):
        widest = max((vocab.width for vocab in backward.vocab), default=0)
        los = None if dw is None else lo_accumulator(dw[:widest], len(backward.chunks))
        for vocab, tiles in vocab_chunks:
            lo = None if los is None else los[: vocab.last - vocab.first]
            column_sums = []
            for start, stop in backward.chunks:
                live = _copy_live_rows(copy, h, ids, rows, g, a, b, slice(start, stop))
                out = dlogits(live, vocab, tiles)
                if dw is not None and lo is not None:
                    partial = PartialProduct(
                        a=out, b=live.h, out=dw[vocab.columns], lo=lo, trans_a=True,
                        first=start == 0, last=stop == t,
                    )  # fmt: skip
                    ran.add(accumulate(partial))
                if db is not None:
                    column_sums.append(columns(slice(start, stop), vocab))
            if db is not None:
                db[vocab.columns] = column_sum(torch.stack(column_sums), "triton")
    return (dh, dw, db), recorded_implementation(ran)
