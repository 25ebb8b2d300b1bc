"""A schedule that is made once for several calls of `paged_attention`: their bits, what it is
refused for, and what it holds for."""

from dataclasses import replace

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import same
from rlk_kernels.ops.attention import forward as attention_forward
from schedule_suite import CHUNK, DECODE, HEADS, MIXED, PAGE, wide_batch


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(attention_forward, "CHUNK", CHUNK)


@pytest.fixture
def lists(monkeypatch):
    """The lists that are made, as they are made."""
    made, make = [], attention_forward.schedule

    def spy(*args):
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(attention_forward, "schedule", spy)
    return made


def batch(lens_q, lens_k, heads=HEADS, page=PAGE, width=40, dtype=torch.float32):
    """Arguments of `paged_attention`, the table wider than it must be."""
    *arguments, cu_q = wide_batch(lens_q, lens_k, width, heads, page, dtype)
    return tuple(arguments), cu_q


def made(x, **more):
    return rk.paged_schedule(*x[0], cu_seqlens_q=x[1], backend="triton", **more)


def run(x, backend="triton", **more):
    return rk.paged_attention(*x[0], cu_seqlens_q=x[1], backend=backend, return_lse=True, **more)


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [None, 50])
def test_calls_that_share_a_schedule_have_the_bits_of_calls_alone(lens, window, lists):
    layers = [batch(*lens), batch(*lens)]
    layers[1][0][1].mul_(2.0)  # another layer's keys
    expected = [run(x, window=window) for x in layers]
    lists.clear()
    schedule = made(layers[0], window=window)
    outputs = [run(x, window=window, schedule=schedule) for x in layers]
    assert len(lists) == 1
    assert all(same(a, b) for a, b in zip(outputs, expected, strict=True))
    assert not same(*outputs)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 5.0}, {"sinks": torch.ones(2)}, {"out": torch.empty(4, 2, 16)}],
    ids=lambda options: next(iter(options)),
)
def test_every_form_of_call_takes_one(options, lists):
    x = batch(*DECODE)
    expected = [y.clone() for y in run(x, **options)]
    lists.clear()
    schedule = made(x, softcap=options.get("softcap"))
    assert same(run(x, **options, schedule=schedule), expected)
    assert len(lists) == 1


@pytest.mark.parametrize("lens", [DECODE, MIXED, ([2], [300])], ids=["decode", "mixed", "one"])
def test_a_call_that_is_asked_for_no_lse_has_the_same_bits(lens):
    x = batch(*lens)
    expected, _ = run(x)
    for schedule in (None, made(x)):
        for out in (None, torch.empty_like(expected)):
            outputs = rk.paged_attention(
                *x[0], cu_seqlens_q=x[1], backend="triton", schedule=schedule, out=out
            )
            assert torch.equal(outputs, expected)
            assert out is None or outputs is out


def test_what_a_given_list_says_is_done():
    x = batch(*DECODE)
    schedule = made(x)
    one = run(x, schedule=schedule)
    schedule.pieces.view(-1, 12)[:, 4] = 1  # of all keys one
    assert not same(run(x, schedule=schedule), one)


def test_it_holds_for_the_lengths_that_it_was_made_with():
    x = batch(*DECODE)
    schedule = made(x)
    x[0][4].copy_(torch.tensor([0, 90, 33, 20]))
    one = run(x)
    assert not same(run(x, schedule=schedule), one)
    assert same(run(x, schedule=made(x)), one)


def test_none_is_made_where_none_is_needed():
    assert made(batch([1], [300])) is None
    assert made(batch([1, 1], [9, 30], width=0)) is None
    assert made(batch([0, 0], [9, 300])) is None
    assert same(run(batch([1], [300]), schedule=None), run(batch([1], [300])))


def test_the_portable_backend_takes_one_and_needs_none():
    x = batch(*DECODE)
    assert rk.paged_schedule(*x[0], cu_seqlens_q=x[1]) is None
    assert same(run(x, backend="torch", schedule=made(x)), run(x, backend="torch"))


OTHERS = {
    "q": batch([1, 1, 1, 2], DECODE[1]),
    "dtype": batch(*DECODE, dtype=torch.float16),
    "a block of the cache": batch(*DECODE, page=16),
    "block_table": batch(*DECODE, width=41),
    "heads": batch(*DECODE, heads=(4, 1, 16)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_for_other_calls_is_refused(name):
    schedule = made(batch(*DECODE))
    expected = "q" if name == "heads" else name
    for backend in ("torch", "triton"):
        with pytest.raises(rk.UnsupportedShape, match=f"made for {expected} .*paged_schedule"):
            run(OTHERS[name], backend=backend, schedule=schedule)


@pytest.mark.parametrize("options", [{"window": 9}, {"softcap": 2.0}], ids=str)
def test_one_for_another_window_or_no_softcap_is_refused(options):
    x = batch(*DECODE)
    (name,) = options
    for there, here in (({}, options), (options, {})):
        schedule = made(x, **there)
        with pytest.raises(rk.UnsupportedShape, match=name):
            run(x, schedule=schedule, **here)


def test_one_on_another_device_or_for_caches_that_lie_otherwise_is_refused():
    x = batch(*DECODE)
    schedule = made(x)
    with pytest.raises(rk.UnsupportedDevice, match="meta"):
        run(x, schedule=replace(schedule, plan=schedule.plan.to("meta")))
    with pytest.raises(rk.UnsupportedShape, match="strides differ"):
        run(x, schedule=replace(schedule, special=True))


def test_a_compiled_call_takes_one(monkeypatch):
    monkeypatch.setenv("RLK_BACKEND", "triton")
    x = batch(*DECODE)
    schedule = made(x)

    def attend(q, schedule):
        return rk.paged_attention(q, *x[0][1:], cu_seqlens_q=x[1], schedule=schedule) * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x[0][0], schedule), attend(x[0][0], None))
