"""sample: exact properties of a row, and random rows against float64.

T = rows   V = vocabulary
"""

import math

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels.ops.sample import cuts, draws
from sample_suite import bound, check_random_rows, of_requests, picked, rows, same

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
SETTINGS = (
    {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8, "temperature": 1.5}, {"min_p": 0.05},
    {"temperature": 0.8, **LIMITS}, {"temperature": 0.0, **LIMITS},
)  # fmt: skip


def test_philox_has_the_published_words() -> None:
    """The known answers of Random123 1.14 for philox4x32-10."""
    for counter, key, words in (
        ((0,) * 4, (0,) * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         "d16cfe0994fdcceb5001e42024126ea1"),
    ):  # fmt: skip
        drawn = draws.philox(
            tuple(torch.tensor([x]) for x in counter), tuple(torch.tensor([x]) for x in key)
        )
        assert "".join(f"{int(word):08x}" for word in drawn) == words


LONG = pytest.mark.whole_matrix
"""In Triton's interpreter a row takes about half a second."""


@pytest.mark.parametrize(
    ("dtype", "backend", "alone"),
    [*((dtype, "torch", range(6)) for dtype in DTYPES), (torch.float32, "triton", [1]),
     *(pytest.param(dtype, "triton", range(6), marks=LONG) for dtype in DTYPES)],
)  # fmt: skip
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype, backend: str, alone) -> None:
    """In another order, in a batch, in a padded vocabulary, and with other settings beside it."""
    t, v = 6, 300
    x, (keys, positions) = rows(t, v, dtype=dtype), of_requests(t)
    limits = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3, 0.2, 0.9]),
        "top_k": torch.tensor([5, 0, 20, 3, 250, 0]),
        "top_p": torch.tensor([0.5, 0.9, 1.0, 0.8, 0.99, 0.3]),
        "min_p": torch.tensor([0.1, 0.0, 0.0, 0.2, 0.0, 0.01]),
    }
    options = {"raw_logprobs": True, "backend": backend}
    whole = rk.sample(x, keys, positions, **limits, **options)
    assert bool((whole.ids >= 0).all())
    order = torch.tensor([4, 1, 5, 0, 2, 3])
    padded = torch.full((t, v + 13), 77.0, dtype=dtype)
    padded[:, :v] = x[order]
    moved = rk.sample(
        padded[:, :v], keys[order], positions[order], **{n: y[order] for n, y in limits.items()},
        **options,
    )  # fmt: skip
    assert same(moved, picked(whole, order))
    for i in alone:
        one = slice(i, i + 1)
        single = rk.sample(
            x[one], keys[one], positions[one], **{n: float(y[i]) for n, y in limits.items()
            if n != "top_k"}, top_k=int(limits["top_k"][i]), **options,
        )  # fmt: skip
        assert same(single, picked(whole, one))


def test_a_token_depends_on_its_key_and_its_position() -> None:
    x = torch.zeros(1, 1000).expand(300, -1)
    keys, positions = torch.zeros(300, dtype=torch.int64), torch.arange(300)
    high = torch.arange(300) << 33
    ids = [
        rk.sample(x, k, p, backend="torch").ids
        for k, p in ((keys, positions), (positions, keys), (high, keys), (keys, high))
    ]
    for drawn in ids:
        assert len(set(drawn.tolist())) > 200
    assert all(int((a == b).sum()) < 10 for a in ids for b in ids if a is not b)


@pytest.mark.parametrize(
    "settings", [SETTINGS[4], *(pytest.param(s, marks=LONG) for s in SETTINGS)], ids=str
)
def test_both_backends_draw_the_same_tokens(settings: dict) -> None:
    x, where = rows(3, 600, seed=3), of_requests(3, seed=3)
    one, two = (
        rk.sample(x, *where, **settings, raw_logprobs=True, backend=b) for b in ("torch", "triton")
    )
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.kept, two.kept)
    for a, b in zip(one[1:], two[1:], strict=True):
        assert bool(((a - b).abs() <= 2e-6).all())


def test_the_log_prob_is_that_of_logp_over_the_kept_logits(backend: str) -> None:
    x, where = rows(2, 600, seed=4), of_requests(2, seed=4)
    settings = {"temperature": 0.7, "top_k": 30, "top_p": 0.95}
    got = rk.sample(x, *where, **settings, raw_logprobs=True, backend=backend)
    kept = rk.kept_tokens(x, **settings, backend=backend)
    assert torch.equal(kept.sum(1).int(), got.kept)
    z = (x / torch.tensor(0.7)).masked_fill(~kept, -math.inf)
    assert torch.equal(rk.logp(z, got.ids, backend=backend), got.logprobs)
    assert torch.equal(rk.logp(x, got.ids, backend=backend), got.raw_logprobs)


@pytest.mark.parametrize("v", [1, 2, 15, 17, 256, 900])
def test_random_rows_are_those_of_float64(v: int) -> None:
    check_random_rows(60, v, seed=v, backend="torch")


@pytest.mark.parametrize("v", [300, pytest.param(3, marks=LONG)])
def test_random_rows_of_the_kernels_are_those_of_float64(v: int) -> None:
    check_random_rows(4, v, seed=v, backend="triton")


@pytest.mark.whole_matrix
@pytest.mark.parametrize("seed", range(25))
def test_many_random_rows_are_those_of_float64(seed: int) -> None:
    for v in (7, 33, 100, 1000):
        check_random_rows(100, v, 1000 + seed, "torch")
    check_random_rows(10, 40 * seed + 1, 2000 + seed, "triton")


def test_the_reference_sees_another_top_p() -> None:
    """The control of the tests above."""
    x = rows(1, 900, seed=5)[0]
    here = {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    fewest, most = (bound(x, here, sign)[0] for sign in (-1, 1))
    got = rk.sample(x[None], *of_requests(1), top_p=0.91, backend="torch")
    assert fewest == most < int(got.kept)


def test_a_row_of_a_real_vocabulary() -> None:
    x = rows(2, 151_936, seed=6)
    got = rk.sample(x, *of_requests(2), temperature=0.9, top_p=0.95, backend="torch")
    for i in range(2):
        here = {"temperature": 0.9, "top_k": 0, "top_p": 0.95, "min_p": 0.0}
        fewest, most = (bound(x[i], here, sign)[0] for sign in (-1, 1))
        assert fewest <= int(got.kept[i]) <= most


@pytest.mark.parametrize(
    "settings", [pytest.param({"top_k": 50}, marks=LONG), {"top_p": 0.97}], ids=str
)
def test_a_list_that_is_full_changes_nothing(settings: dict, monkeypatch) -> None:
    """`decide` reads the row itself then."""
    x, where = rows(2, 300, seed=8), of_requests(2, seed=8)
    x[1] = 0.0
    whole = rk.sample(x, *where, **settings, backend="triton")
    monkeypatch.setattr(cuts, "LISTED", 8)
    monkeypatch.setattr(cuts, "MOST_LISTED", type(cuts.MOST_LISTED)(8))
    assert same(rk.sample(x, *where, **settings, backend="triton"), whole)


NOTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
ADVERSARIAL = (
    ("all equal, top-k", [2.0] * 40, {"top_k": 7}, range(7)),
    ("all equal, top-p", [2.0] * 40, {"top_p": 0.125}, range(5)),
    ("all equal, min-p", [2.0] * 40, {"min_p": 1.0}, range(40)),
    ("one token above -inf", [-math.inf] * 20 + [-5.0], {}, [20]),
    ("one column", [3.0], {"top_k": 5, "top_p": 0.3, "min_p": 0.5}, [0]),
    ("top-p 1e-9", [0.0, 1.0, 1.0, 0.5], {"top_p": 1e-9}, [1]),
    ("top-p 1", [0.0, 1.0, -80.0], {"top_p": 1.0}, range(3)),
    ("temperature 1e-6", [0.0, 1.0, 1.0, 0.5], {"temperature": 1e-6, "min_p": 0.5}, [1, 2]),
    ("temperature 0", [0.0, 1.0, 1.0, 0.5], {"temperature": 0.0}, [1]),
    ("zeros of both signs", [-0.0, 0.0, -0.0, -1.0], {"top_k": 2}, [0, 1]),
    ("fewer than top-k", [-math.inf, 0.0, -math.inf], {"top_k": 3}, [1]),
    ("the lowest finite logits", [-3.4e38, 0.0, torch.finfo(torch.float32).min, 1.0],
     {"top_k": 3}, [0, 1, 3]),
)  # fmt: skip


def test_adversarial_rows(backend: str) -> None:
    """In one batch; shorter rows are padded with -inf."""
    x = torch.full((len(ADVERSARIAL), 40), -math.inf)
    for i, (_, row, _, _) in enumerate(ADVERSARIAL):
        x[i, : len(row)] = torch.tensor(row)
    settings = {
        name: torch.tensor([case[2].get(name, value) for case in ADVERSARIAL])
        for name, value in NOTHING.items()
    }
    got = rk.kept_tokens(x, **settings, backend=backend)
    drawn = rk.sample(x, *of_requests(len(x)), **settings, backend=backend)
    for i, (name, _, _, kept) in enumerate(ADVERSARIAL):
        assert got[i].nonzero().flatten().tolist() == list(kept), name
        assert int(drawn.ids[i]) in kept, name
        assert int(drawn.kept[i]) == len(kept), name
        assert -4.0 < float(drawn.logprobs[i]) <= 1e-7, name


@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=LONG)])
def test_a_row_without_a_distribution(bad: float, backend: str) -> None:
    x, where = rows(4, 40, seed=9), of_requests(4, seed=9)
    good = rk.sample(x, *where, top_k=5, backend=backend)
    x[1, 30], x[3] = bad, -math.inf
    for settings in ({"top_k": 5}, {"temperature": 0.0}):
        if backend == "torch":
            with pytest.raises(ValueError, match="row 1 of the logits has no distribution"):
                rk.sample(x, *where, **settings, backend=backend)
            continue
        got = rk.sample(x, *where, **settings, backend=backend)
        assert got.ids[1::2].tolist() == [-1, -1]
        assert got.kept[1::2].tolist() == [0, 0]
        assert bool(got.logprobs[1::2].isnan().all())
        if settings == {"top_k": 5}:
            assert same(picked(got, [0, 2]), picked(good, [0, 2]))


def test_refusals() -> None:
    x, where = rows(2, 9), of_requests(2)
    for changed, error in (
        ({"temperature": -1.0}, ValueError), ({"temperature": math.nan}, ValueError),
        ({"top_p": 1.5}, ValueError), ({"top_k": -1}, ValueError), ({"min_p": 2.0}, ValueError),
        ({"top_p": torch.ones(3)}, rk.UnsupportedShape),
        ({"top_k": torch.ones(2)}, rk.UnsupportedDtype),
        ({"temperature": torch.ones(2, dtype=torch.int32)}, rk.UnsupportedDtype),
    ):  # fmt: skip
        with pytest.raises(error, match=next(iter(changed))):
            rk.sample(x, *where, **changed)
    with pytest.raises(rk.UnsupportedDtype, match="keys"):
        rk.sample(x, where[0].int(), where[1])
    with pytest.raises(rk.UnsupportedShape, match="positions"):
        rk.sample(x, where[0], where[1][:1])
    with pytest.raises(rk.UnsupportedShape, match="logits"):
        rk.sample(x[:, :0], *where)


def test_a_gradient_is_refused_by_name(backend: str) -> None:
    x = rows(2, 9).requires_grad_()
    drawn = rk.sample(x, *of_requests(2), backend=backend)
    with pytest.raises(NotImplementedError, match="a choice has no gradient"):
        drawn.logprobs.sum().backward()
