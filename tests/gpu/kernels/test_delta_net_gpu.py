"""The gated delta rule on a GPU: against float64, in parts, and its gradient for the widths that
models have."""

from itertools import pairwise

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels.ops.delta_rule import on_triton
from rlk_kernels.ops.delta_rule.operator import gated_delta_rule_ref

LIMIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-16}
"""Of the largest magnitude."""
LENGTHS = 70, 0, 5, 192
SHAPES = [(1, 2, 24, 16), (2, 2, 16, 40), (1, 3, 33, 64), (2, 4, 64, 64), (2, 4, 128, 128)]
"""Heads of q and k, heads of v, features of q and k, features of v."""


def rows(shape, lengths, dtype):
    """(q, k, v, g, beta, cu)."""
    hk, hv, d, e = shape
    generator, t = torch.Generator("cuda").manual_seed(sum(shape)), sum(lengths)

    def normal(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    q, k, v = (normal(t, *size).to(dtype) for size in ((hk, d), (hk, d), (hv, e)))
    g, beta = -normal(t, hv).abs() * 0.3, normal(t, hv).sigmoid().to(dtype)
    return q, k, v, g, beta, torch.tensor([0, *lengths], device="cuda").cumsum(0)


def near(value, wanted, limit):
    scale = float(wanted.abs().max())
    return scale > 0 and float((value.double() - wanted).abs().max()) <= limit * scale


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule_and_its_gradient_are_those_of_float64(shape, dtype):
    *parts, cu = rows(shape, LENGTHS, dtype)
    leaves = [x.requires_grad_() for x in parts]
    out = rk.gated_delta_rule(*leaves, cu)
    wide = [x.detach().double().requires_grad_() for x in parts]
    exact = gated_delta_rule_ref(*wide, cu)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, do, retain_graph=True)
    wanted = torch.autograd.grad(exact, wide, do.double())
    again = torch.autograd.grad(out, leaves, do)
    assert near(out.detach(), exact.detach(), 4 * LIMIT[dtype])
    for value, repeat, expected in zip(grads, again, wanted, strict=True):
        assert torch.equal(value, repeat)
        assert near(value, expected, 8 * LIMIT[dtype])


@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
def test_a_sequences_bits_do_not_depend_on_the_others(shape):
    *parts, cu = rows(shape, LENGTHS, torch.bfloat16)
    both = [x.requires_grad_() for x in parts]
    out = rk.gated_delta_rule(*both, cu)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, both, do)
    begin, end = cu[-2:].tolist()
    mine = [x.detach()[begin:end].requires_grad_() for x in parts]
    alone = rk.gated_delta_rule(*mine, cu[-2:] - begin)
    assert torch.equal(alone, out[begin:end])
    for value, whole in zip(torch.autograd.grad(alone, mine, do[begin:end]), grads, strict=True):
        assert torch.equal(value, whole[begin:end])


def new_cache(shape, dtype, slots=4):
    """Whatever was in the slots before: NaN."""
    hk, hv, d, e = shape

    def full(*size, of):
        return torch.full(size, float("nan"), device="cuda", dtype=of)

    return [
        full(slots, hv, d, e, of=torch.float32), full(slots, 64, hk, d, of=dtype),
        full(slots, 64, hv, e, of=dtype), full(slots, 64, hv, of=torch.float32),
    ]  # fmt: skip


def integers(*numbers):
    return torch.tensor(numbers, device="cuda", dtype=torch.int32)


def in_pieces(parts, cache, slot, ends):
    """out of the rows between the ends of one sequence, a piece after another."""
    pieces = []
    for begin, end in pairwise(ends):
        piece = (x[begin:end] for x in parts)
        where = integers(slot), integers(begin), integers(0, end - begin)
        pieces.append(rk.cached_gated_delta_rule(*piece, *cache, *where))
    return torch.cat(pieces)


CUTS = [[1], [2, 3], [62, 63, 64, 65, 66], [64, 128], [65, 127], [150, 151], [40, 170, 171]]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_a_sequence_that_is_cut_has_the_bits_of_the_whole(dtype, shape):
    *parts, cu = rows(shape, (192,), dtype)
    whole = rk.gated_delta_rule(*parts, cu)
    for cuts in CUTS:
        cache = new_cache(shape, dtype)
        assert torch.equal(in_pieces(parts, cache, 2, [0, *cuts, 192]), whole), cuts


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_decode_of_every_row_has_the_bits_of_the_whole(dtype):
    shape = (2, 4, 128, 128)
    *parts, cu = rows(shape, (150,), dtype)
    whole = rk.gated_delta_rule(*parts, cu)
    cache = new_cache(shape, dtype)
    out = in_pieces(parts, cache, 1, range(151))
    differing = (out != whole).flatten(1).any(1).nonzero().flatten().tolist()
    assert differing == []
    once = new_cache(shape, dtype)
    in_pieces(parts, once, 1, [0, 150])
    assert torch.equal(cache[0][1], once[0][1])
    held = 150 % 64
    for one, other in zip(cache[1:], once[1:], strict=True):
        assert torch.equal(one[1, :held], other[1, :held])


LONG = (2, 4, 128, 128)
AT = [0, 1, 15, 16, 17, 63, 64, 65, 100, 127, 128, 200]
"""Tokens before the step, of the sequences of a batch."""


def a_step(parts, whole, share=None, monkeypatch=None):
    """(whether a step of decode of a sequence, after different numbers of its tokens, has its rows,
    whether the slot of a row without one is untouched)."""
    cache = new_cache(LONG, parts[0].dtype, slots=len(AT) + 1)
    for slot, context in enumerate(AT):
        if context:
            in_pieces(parts, cache, slot, [0, context])
    if share is not None:
        monkeypatch.setattr(on_triton, "_share", lambda *_: share)
    at = torch.tensor([*AT, 3], device="cuda")
    out = rk.cached_gated_delta_rule(
        *(x[at] for x in parts), *cache, integers(*range(len(AT)), -1), integers(*AT, 3),
        torch.arange(len(AT) + 2, device="cuda"),
    )  # fmt: skip
    return torch.equal(out[:-1], whole[at[:-1]]), all(bool(x[-1].isnan().all()) for x in cache)


@pytest.mark.parametrize("share", [None, 1, 2, 8])
def test_a_step_of_decode_of_many_sequences_has_their_bits(share, monkeypatch):
    *parts, cu = rows(LONG, (201,), torch.bfloat16)
    whole = rk.gated_delta_rule(*parts, cu)
    assert a_step(parts, whole, share, monkeypatch) == (True, True)


@pytest.mark.parametrize(("features", "warps"), [(16, 1), (32, 4), (128, 8)])
def test_no_bit_depends_on_the_tiles(features, warps, monkeypatch):
    *parts, cu = rows(LONG, LENGTHS, torch.bfloat16)
    whole = rk.gated_delta_rule(*parts, cu)
    monkeypatch.setattr(on_triton, "FEATURES", dict.fromkeys(on_triton.FEATURES, features))
    monkeypatch.setattr(on_triton, "WARPS", {**on_triton.WARPS, "states": warps})
    monkeypatch.setattr(on_triton, "shape_cache", lambda *_: None)
    assert torch.equal(rk.gated_delta_rule(*parts, cu), whole)


def test_few_rows_of_one_sequence_have_the_bits_of_the_whole_on_a_gpu():
    """As many rows as sequences, which a step of decode has; but one sequence has all of them."""
    *parts, cu = rows(LONG, (192,), torch.bfloat16)
    whole = rk.gated_delta_rule(*parts, cu)
    for start in (20, 62, 63, 64, 126):
        cache, end = new_cache(LONG, torch.bfloat16), start + 3
        in_pieces(parts, cache, 2, [0, start])
        out = rk.cached_gated_delta_rule(
            *(x[start:end] for x in parts), *cache, integers(1, 2, 0), integers(4, start, 0),
            integers(0, 0, 3, 3),
        )  # fmt: skip
        assert torch.equal(out, whole[start:end]), start
        assert torch.equal(in_pieces(parts, cache, 2, [end, 192]), whole[end:]), start


def test_a_prefill_beside_steps_of_decode_has_their_bits():
    *parts, cu = rows(LONG, (192,), torch.bfloat16)
    whole = rk.gated_delta_rule(*parts, cu)
    cache = new_cache(LONG, torch.bfloat16)
    ends = (63, 64), (70, 192), (10, 10), (5, 6)
    for slot, (context, _) in enumerate(ends):
        in_pieces(parts, cache, slot, [0, context])
    at = torch.cat([torch.arange(*pair, device="cuda") for pair in ends])
    bounds = torch.tensor([0, *(b - a for a, b in ends)], device="cuda").cumsum(0)
    out = rk.cached_gated_delta_rule(
        *(x[at] for x in parts), *cache, integers(*range(4)), integers(*(a for a, _ in ends)),
        bounds,
    )  # fmt: skip
    assert torch.equal(out, whole[at])


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129])
def test_the_beginning_of_a_sequence_has_the_bits_of_the_whole(length):
    *parts, cu = rows(LONG, (192,), torch.bfloat16)
    whole = rk.gated_delta_rule(*parts, cu)
    short = rk.gated_delta_rule(*(x[:length] for x in parts), integers(0, length))
    assert torch.equal(short, whole[:length])


@pytest.mark.parametrize("part", ["heads", "features"])
def test_a_share_of_v_has_the_bits_of_the_whole(part):
    *parts, cu = rows(LONG, LENGTHS, torch.bfloat16)
    q, k, v, g, beta = parts
    whole = rk.gated_delta_rule(*parts, cu)
    if part == "heads":
        mine = rk.gated_delta_rule(
            q[:, :1], k[:, :1], v[:, :2].contiguous(), g[:, :2].contiguous(), beta[:, :2], cu
        )
        assert torch.equal(mine, whole[:, :2])
    else:
        mine = rk.gated_delta_rule(q, k, v[..., 40:72].contiguous(), g, beta, cu)
        assert torch.equal(mine, whole[..., 40:72])
