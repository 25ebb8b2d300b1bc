"""linear_logp on Triton: slabs of tokens and pieces of the vocabulary over the tile kernels.

What is held at a time: forward, (n, s) of every tile of a slab of tokens, at most SCRATCH bytes;
backward, dlogits of all tokens of a slab over one piece of the vocabulary, if the weight gradient
has no room for them (`room.py`), and the lower halves of unfinished sums (`accumulate.py`), at most
HELD bytes together. Neither cut changes a bit: a row's tree knows nothing of slabs, and a sum goes
on from piece to piece in its accumulator.
Beyond SLAB_NUMBERS hidden gradients the backward makes the two gradients in two passes (five
products instead of four), so that nothing held grows with the number of tokens.

T = tokens   V = vocabulary   H = hidden size   J = ids a token (the target, then `token_ids`)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels import linear_logp_kernels as kernels
from rlk_kernels.accumulate import accumulate, low_halves
from rlk_kernels.accumulate_triton import Sum
from rlk_kernels.backend import interpreting
from rlk_kernels.chains import chains
from rlk_kernels.columns import column_sum
from rlk_kernels.exact import tree_sum
from rlk_kernels.gemm import _has_tma, _processors, _runs_apart, _tma_can_read
from rlk_kernels.lse_tree import LEAF, levels
from rlk_kernels.room import Piece, block_elements, one_after_another
from rlk_kernels.tiles import Tile

SCRATCH = 48 << 20
"""Bytes of tile statistics at a time, forward."""
HELD = 288 << 20
"""Bytes held at a time, backward: dlogits and the lower halves of unfinished sums."""
FINISH_ROWS = 64
"""Rows of a program above the tiles (time only)."""
SLAB_NUMBERS = 16384 * 4096
"""Elements of the hidden gradient up to which one pass makes both gradients."""

STATS_TILE = Tile(128, 256, 64, 8, 4, group=16, flatten=True, apart=True)
STORE_TILE = Tile(128, 256, 64, 8, 3, group=16, flatten=True, apart=True)
SAFE_TILE = Tile(128, 128, 64, 8, 3)
FLOAT32_TILE = Tile(64, 64, 32, 4, 2)
INTERPRETED_TILE = Tile(64, 128, 32, 4, 1)
_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class Spec:
    """What turns a sum into a logit z: rounding, softcap, scale, temperature."""

    logit_dtype: torch.dtype
    softcap: float
    """0 for none."""
    scale: float
    temperature: float

    @property
    def inverse(self) -> float:
        """fp32(1 / temperature)."""
        return float(torch.tensor(1.0 / self.temperature, dtype=torch.float32))

    @property
    def slope(self) -> float:
        """dz/d(logit) without the softcap."""
        return self.scale * self.inverse

    @property
    def inverse_top(self) -> float:
        """1 / the largest z that a softcap lets through."""
        return 1.0 / (self.softcap * self.slope) if self.softcap else 0.0

    def numbers(self) -> tuple[float, float, float, float]:
        """(softcap, 1 / softcap, scale, 1 / temperature) as the kernels take them."""
        cap = self.softcap
        return cap, 1.0 / cap if cap else 0.0, self.scale, self.inverse

    def flags(self) -> tuple[object, bool, bool]:
        """(dtype, whether capped, whether scaled) as the kernels take them."""
        return _TL[self.logit_dtype], self.softcap > 0, (self.scale, self.inverse) != (1.0, 1.0)


def planned_processors(device: torch.device) -> int:
    """How many processors pieces are cut for (time only)."""
    return 132 if interpreting() else _processors(device)


def _trusted(x: Tensor) -> bool:
    from rlk_kernels.cornerstone import holds

    return x.dtype == torch.float32 or interpreting() or holds(x.device)


def _uses_tma(h: Tensor, w: Tensor) -> bool:
    half = h.element_size() == 2 and h.shape[1] > 0
    return half and _has_tma(h.device) and _tma_can_read(h) and _tma_can_read(w)


def tile_for(h: Tensor, w: Tensor, spec: Spec, mode: tl.constexpr) -> Tile:
    """The tile of a tile kernel; its width is the vocabulary block of a node, and no bit's."""
    if interpreting():
        return INTERPRETED_TILE
    if h.dtype == torch.float32:
        return FLOAT32_TILE
    if not _trusted(h) or not _uses_tma(h, w):
        return SAFE_TILE
    tile = STATS_TILE if mode.value == kernels.STATS.value else STORE_TILE
    if chains(h.shape[1], h.dtype, spec.logit_dtype)[0] and not _apart(h, w, tile, None):
        return SAFE_TILE  # has registers for what is put aside
    return tile


def _runs(w: Tensor, tile: Tile) -> TensorDescriptor:
    """w[V, H], V a multiple of 128, with its rows in the order of RUNS (`linear_logp_kernels`)."""
    (v, k), row = w.shape, w.stride(0)
    shape, strides = [v // 128, 16, 4, 2, k], [128 * row, 2 * row, 32 * row, row, 1]
    return TensorDescriptor(w, shape, strides, [tile.n // 128, 16, 4, 2, tile.k])


def _apart(h: Tensor, w: Tensor, tile: Tile, out: Tensor | None) -> bool:
    """Whether the kernel of `linear_logp_hopper.py` runs."""
    stored = out is None or _tma_can_read(out)
    return tile.apart and stored and _uses_tma(h, w) and _runs_apart(h.device)


def kept_columns(h: Tensor, w: Tensor, out: Tensor, tile: Tile) -> int:
    """Columns of a node that KEEP leaves: a tile's, or half a tile's."""
    return tile.n // 2 if _apart(h, w, tile, out) else tile.n


def run_tiles(
    h: Tensor, w: Tensor, bias: Tensor | None, spec: Spec, tile: Tile, mode: tl.constexpr,
    n: Tensor, s: Tensor, u: Tensor | None = None, a: Tensor | None = None,
    b: Tensor | None = None, out: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch over all tiles of h[T, H] @ w[V, H]^T."""
    t, v, k = h.shape[0], w.shape[0], h.shape[1]
    if t == 0 or v == 0:
        return
    entropy = u is not None or b is not None
    partial, ragged = v % tile.n != 0, v % LEAF != 0
    stride = 0 if out is None else out.stride(0)
    numbers = (*spec.numbers(), spec.inverse_top)
    logit, softcap, scaled = spec.flags()
    flags = (mode, bias is not None, logit, softcap, scaled, entropy)
    chain, last = chains(k, h.dtype, spec.logit_dtype)
    tiles = triton.cdiv(t, tile.m) * triton.cdiv(v, tile.n)
    if _apart(h, w, tile, out):
        from rlk_kernels.linear_logp_hopper import hopper_tiles

        hopper_tiles(
            h, w, bias, n, s, u, a, b, out, numbers, flags, chain, last, tile,
            _processors(h.device),
        )  # fmt: skip
        return
    if _uses_tma(h, w):
        desc = h
        runs = mode.value != kernels.GRADIENT.value and v % 128 == 0 and tile.n % 128 == 0
        w_desc = _runs(w, tile) if runs else TensorDescriptor.from_tensor(w, [tile.n, tile.k])
        tma_store = out is not None and _tma_can_read(out)
        if tma_store:
            desc = TensorDescriptor.from_tensor(out, [tile.m, tile.n])
        kernels._tiles_tma_kernel[(min(tiles, _processors(h.device)),)](
            TensorDescriptor.from_tensor(h, [tile.m, tile.k]), w_desc,
            bias, n, s, u, a, b, desc, out, t, v, k, last, stride, *numbers, *flags, partial,
            ragged, tile.m, tile.n, tile.k, levels(tile.n // LEAF), tile.group, tile.flatten,
            tma_store, runs, chain, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    kernels._tiles_pointer_kernel[(tiles,)](
        h, w, bias, n, s, u, a, b, out, t, v, k, last, h.stride(0), w.stride(0), stride, *numbers,
        *flags, partial, ragged,
        tile.m, tile.n, tile.k, levels(tile.n // LEAF), tile.group, chain,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def pick(h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: Spec) -> Tensor:
    """z[T, J] of ids[T, J]; NaN where an id is no column."""
    t, j = ids.shape
    z = torch.empty(t, j, dtype=torch.float32, device=h.device)
    if h.dtype == torch.float32 or interpreting():
        block, step, warps = 16, 32, 4
    elif _trusted(h):
        block, step, warps = 16, 128, 4
    else:
        block, step, warps = SAFE_TILE.m, SAFE_TILE.k, SAFE_TILE.warps
    logit, softcap, scaled = spec.flags()
    chain, last = chains(h.shape[1], h.dtype, spec.logit_dtype)
    kernels._pick_kernel[(triton.cdiv(t, block), j)](
        h, w, bias, ids, z, t, w.shape[0], h.shape[1], last, j, h.stride(0), w.stride(0),
        *spec.numbers(), bias is not None, logit, softcap, scaled, block, step, chain,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return z


@dataclass(frozen=True, slots=True)
class Rows:
    """What the forward knows of each row."""

    logp: Tensor
    """[T, J]."""
    lse: Tensor
    """[T]."""
    entropy: Tensor
    """[T], or [0]."""
    n: Tensor
    """[T], the row's integer exponent."""
    log_s: Tensor
    """[T], log2 of the sum."""
    z: Tensor
    """[T, J], the logits of the ids."""


def new_rows(z: Tensor, entropy: bool) -> Rows:
    """Rows to be filled by `finish`."""
    t = z.shape[0]
    lse, n, log_s = (torch.empty(t, dtype=torch.float32, device=z.device) for _ in range(3))
    of_rows = torch.empty(t if entropy else 0, dtype=torch.float32, device=z.device)
    return Rows(torch.empty_like(z), lse, of_rows, n, log_s, z)


def finish(stats: Tensor, ids: Tensor, rows: Rows, first: int, last: int, entropy: bool) -> None:
    """Rows first ... last from the tiles' stats[2 or 3, nodes, last - first]."""
    m = last - first
    grid = triton.cdiv(m, FINISH_ROWS)
    while stats.shape[1] > 32:
        above = torch.empty(
            stats.shape[0], triton.cdiv(stats.shape[1], 32), m, dtype=stats.dtype,
            device=stats.device,
        )  # fmt: skip
        kernels._collapse_kernel[(grid, above.shape[1])](
            *_planes(stats), *_planes(above), m, stats.shape[1], entropy, FINISH_ROWS, 5,
            num_warps=1,
        )  # fmt: skip
        stats = above
    part = slice(first, last)
    kernels._finish_kernel[(grid,)](
        *_planes(stats), ids[part], rows.z[part], rows.logp[part], rows.lse[part],
        rows.entropy[part] if entropy else None, rows.n[part], rows.log_s[part], m, ids.shape[1],
        stats.shape[1], entropy, FINISH_ROWS, levels(stats.shape[1]), num_warps=1,
    )  # fmt: skip


def _planes(stats: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return stats[0], stats[1], stats[2] if stats.shape[0] == 3 else None


def slabs(t: int, most: int) -> list[tuple[int, int]]:
    """[0, t) in equal pieces of at most `most` rows, multiples of 128."""
    count = max(1, -(-t // max(most, 128)))
    size = max(128, -(-t // count // 128) * 128)
    return [(start, min(start + size, t)) for start in range(0, t, size)]


def forward_triton(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, spec: Spec, entropy: bool
) -> Rows:
    """h[T, H], w[V, H], ids[T, J] contiguous -> Rows."""
    rows = new_rows(pick(h, w, bias, ids, spec) if h.shape[0] else _no_rows(ids), entropy)
    tile = tile_for(h, w, spec, kernels.STATS)
    nodes = triton.cdiv(w.shape[0], tile.n)
    planes = 3 if entropy else 2
    pieces = slabs(h.shape[0], SCRATCH // (4 * planes * nodes))
    size = planes * nodes * (pieces[0][1] if pieces else 0)
    scratch = torch.empty(size, dtype=torch.float32, device=h.device)  # one for all slabs
    for first, last in pieces:
        stats = scratch[: planes * nodes * (last - first)].view(planes, nodes, last - first)
        run_tiles(
            h[first:last], w, bias, spec, tile, kernels.STATS, stats[0], stats[1],
            stats[2] if entropy else None,
        )  # fmt: skip
        finish(stats, ids, rows, first, last, entropy)
    return rows


def _no_rows(ids: Tensor) -> Tensor:
    return torch.empty(ids.shape, dtype=torch.float32, device=ids.device)


def coefficients(
    ids: Tensor, g: Tensor, g_lse: Tensor | None, g_entropy: Tensor | None, entropy: Tensor,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(g[T, J] of the ids, a[T], b[T] or None): dlogits = p (a + b log2 p) + the ids' g."""
    g = torch.where(ids < 0, 0.0, g.float()) * spec.slope
    a = -(g if g.shape[1] == 1 else tree_sum(g)).squeeze(-1)
    if g_lse is not None:
        a = a + g_lse.float() * spec.slope
    if g_entropy is None:
        return g, a.contiguous(), None
    b = g_entropy.float() * -spec.slope
    return g, a + b * entropy, b * 0.6931471805599453


def mark(
    out: Tensor, ids: Tensor, rows: Rows, g: Tensor, a: Tensor, b: Tensor | None, spec: Spec,
    first: int, v: int, part: slice, unit: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dlogits (over unit[T]) of the ids among columns first ... first + v of rows `part`."""
    t, j = ids[part].shape
    kernels._mark_kernel[(triton.cdiv(t, 128), j)](
        out, ids[part], rows.z[part], g[part], rows.n[part], rows.log_s[part], a[part],
        b[part] if b is not None else None, unit, t, j, first, v, out.stride(0), spec.inverse_top,
        spec.softcap > 0, b is not None, unit is not None, 128, num_warps=4,
    )  # fmt: skip


def backward_triton(
    h: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, rows: Rows, g: Tensor,
    g_lse: Tensor | None, g_entropy: Tensor | None, spec: Spec, needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dh, dw, dbias), each None where `needs` says so; dbias in fp32."""
    (t, k), v = h.shape, w.shape[0]
    g, a, b = coefficients(ids, g, g_lse, g_entropy, rows.entropy, spec)
    dh = torch.empty_like(h) if needs[0] else None
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if needs[1] else None
    db = torch.zeros(v, dtype=torch.float32, device=w.device) if needs[2] else None
    if t == 0:
        return dh, None if dw is None else dw.zero_(), db
    tile = tile_for(h, w, spec, kernels.GRADIENT)
    parts = slabs(t, SLAB_NUMBERS // max(k, 1))
    longest, together = parts[0][1], len(parts) == 1
    size = h.element_size()
    free = HELD // size - (longest * k if size == 2 else 0)
    widest = v if together else longest  # the lower halves of its sums are within HELD too
    processors = planned_processors(h.device)
    pieces = one_after_another(longest, v, k, free, dw is not None, widest, processors)
    block = torch.empty(block_elements(pieces, longest), dtype=h.dtype, device=h.device)
    memories = [block] if dw is None else [block, dw.view(-1)]

    def dlogits(part: slice, piece: Piece) -> Tensor:
        """dlogits of rows `part` over a piece of the vocabulary."""
        out = piece.of(memories, part.stop - part.start)[:, : piece.last - piece.first]
        own = None if bias is None else bias[piece.columns]
        run_tiles(
            h[part], w[piece.columns], own, spec, tile, kernels.GRADIENT, rows.n[part],
            rows.log_s[part], None, a[part], None if b is None else b[part], out,
        )  # fmt: skip
        mark(out, ids, rows, g, a, b, spec, piece.first, out.shape[1], part)
        return out

    def columns(part: slice, piece: Piece) -> Tensor:
        """Sums over rows of dlogits, whole as they lie: the order may depend on the width."""
        whole = piece.of(memories, part.stop - part.start)
        return column_sum(whole, "triton")[: piece.last - piece.first]

    if dh is not None:
        lows = low_halves(dh[:longest], len(pieces))  # one for all slabs
        for start, stop in parts:
            part = slice(start, stop)
            low = lows[: stop - start]
            for piece in pieces:
                out = dlogits(part, piece)
                sums = [
                    Sum(a=out, b=w[piece.columns], out=dh[part], low=low, trans_a=False,
                        first=piece.first == 0, last=piece.last == v)
                ]  # fmt: skip
                if together and dw is not None:
                    sums.append(
                        Sum(a=out, b=h, out=dw[piece.columns], low=low, trans_a=True, first=True,
                            last=True)
                    )  # fmt: skip
                accumulate(*sums)
                if together and db is not None:
                    db[piece.columns] = columns(part, piece)
        del lows, low, sums
    if (dw is not None or db is not None) and not (together and dh is not None):
        widest = max((piece.wide for piece in pieces), default=0)
        lows = None if dw is None else low_halves(dw[:widest], len(parts))
        for piece in pieces:
            low = None if lows is None else lows[: piece.last - piece.first]
            found = []
            for start, stop in parts:
                out = dlogits(slice(start, stop), piece)
                if dw is not None and low is not None:
                    accumulate(
                        Sum(a=out, b=h[start:stop], out=dw[piece.columns], low=low, trans_a=True,
                            first=start == 0, last=stop == t)
                    )  # fmt: skip
                if db is not None:
                    found.append(columns(slice(start, stop), piece))
            if db is not None:
                db[piece.columns] = column_sum(torch.stack(found), "triton")
    return dh, dw, db
