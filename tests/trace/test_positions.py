"""The measured positions of rows, from real rotations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlk_align.trace.positions import PositionCheck, Rotary
from rlk_align.trace.schema import WRONG_ROWS, PositionRecord

HEADS, KV_HEADS, PAIRS, CONTEXT = 3, 1, 16, 400
ROTARY = Rotary(
    inv_freq=tuple(10000.0 ** (-j / PAIRS) for j in range(PAIRS)),
    heads=HEADS,
    kv_heads=KV_HEADS,
    context=CONTEXT,
    source="layers.0.q_norm",
    key_source="layers.0.k_norm",
)


def rotate(
    x: torch.Tensor, position: np.ndarray, theta: float = 10000.0, count: int = HEADS
) -> torch.Tensor:
    """The half-split rotary embedding, rounded like that of an engine in x's dtype: `[N, F]`."""
    frequency = torch.tensor([theta ** (-j / PAIRS) for j in range(PAIRS)])
    angle = torch.from_numpy(position).float()[:, None] * frequency
    cos, sin = (t.to(x.dtype)[:, None] for t in (angle.cos(), angle.sin()))
    heads = x.reshape(len(x), count, -1)
    a, b, rest = heads[..., :PAIRS], heads[..., PAIRS : 2 * PAIRS], heads[..., 2 * PAIRS :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).reshape(len(x), -1)


def measured(
    used: np.ndarray,
    own: np.ndarray,
    dtype: torch.dtype = torch.bfloat16,
    theta: float = 10000.0,
    width: int = 2 * PAIRS,
) -> PositionRecord:
    torch.manual_seed(0)
    x = torch.randn(len(own), HEADS * width).to(dtype)
    check = PositionCheck(ROTARY)
    sample = np.zeros(len(own), dtype=np.int64)
    check.see("layers.0.q_norm", x, sample, own)
    check.see("layers.0.q_rope", rotate(x, used, theta), sample, own)
    return check.record()


ALL = np.arange(CONTEXT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [2 * PAIRS, 3 * PAIRS])
def test_right_positions_are_right(dtype: torch.dtype, width: int) -> None:
    record = measured(ALL, ALL, dtype, width=width)
    assert (record.checked, record.wrong, record.first) == (CONTEXT, 0, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shift", [-1, 1, 2, 17])
def test_shifted_positions_are_named(dtype: torch.dtype, shift: int) -> None:
    own = ALL[20:60]
    record = measured(own + shift, own, dtype)
    assert record.wrong == len(own)
    assert len(record.first) == WRONG_ROWS
    first = record.first[0]
    assert (first.sample, first.position, first.effective) == (0, 20, 20 + shift)


def test_one_wrong_row_among_many_is_named() -> None:
    used = ALL.copy()
    used[123] = 0
    record = measured(used, ALL)
    assert record.wrong == 1
    assert (record.first[0].position, record.first[0].effective) == (123, 0)


def test_another_base_is_no_position() -> None:
    record = measured(ALL[200:], ALL[200:], theta=500.0)
    assert record.checked == 200
    assert record.wrong == 0


def test_what_does_not_rotate_is_no_position() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(2, 50, HEADS * 2 * PAIRS).unbind()
    check = PositionCheck(ROTARY)
    sample, own = np.zeros(50, dtype=np.int64), np.arange(50)
    check.see("layers.0.q_norm", x, sample, own)
    check.see("layers.0.q_rope", y, sample, own)
    assert check.record().wrong == 0
    # Of another width: nothing to measure.
    check.see("layers.0.q_norm", x, sample, own)
    check.see("layers.0.q_rope", y[:, :PAIRS], sample, own)
    assert check.record().checked == 50


def test_other_layers_and_a_rotation_without_its_input_are_left_alone() -> None:
    x = torch.randn(4, HEADS * 2 * PAIRS)
    check = PositionCheck(ROTARY)
    where = (np.zeros(4, dtype=np.int64), np.arange(4))
    check.see("layers.0.q_rope", x, *where)
    check.see("layers.1.q_norm", x, *where)
    check.see("layers.1.q_rope", x, *where)
    assert check.record() == PositionRecord()


def test_not_a_number_is_left_to_the_comparison() -> None:
    x = torch.full((3, HEADS * 2 * PAIRS), float("nan"))
    check = PositionCheck(ROTARY)
    where = (np.zeros(3, dtype=np.int64), np.arange(3))
    check.see("layers.0.q_norm", x, *where)
    check.see("layers.0.q_rope", x, *where)
    assert check.record().wrong == 0


def test_a_query_of_zeros_has_no_position() -> None:
    """Such a query is that of a padding token, whose embedding is 0."""
    torch.manual_seed(0)
    x = torch.randn(40, HEADS * 2 * PAIRS)
    x[7] = 0.0
    x[9, : 2 * PAIRS] = 0.0
    x[11].view(HEADS, 2, PAIRS)[..., 1:] = 0.0
    for used, wrong in ((ALL[:40], 0), (ALL[:40] + 1, 39)):
        check = PositionCheck(ROTARY)
        sample = np.zeros(40, dtype=np.int64)
        check.see("layers.0.q_norm", x, sample, ALL[:40])
        check.see("layers.0.q_rope", rotate(x, used), sample, ALL[:40])
        assert (check.record().checked, check.record().wrong) == (40, wrong)


def test_parts_are_put_together_in_order() -> None:
    own = ALL[:20]
    late, early = measured(own + 1, own), measured(own + 2, own)
    both = PositionRecord.together([late, early])
    assert (both.checked, both.wrong) == (40, 40)
    assert [w.position for w in both.first] == [0, 0, 1, 1, 2, 2, 3, 3]


def both_turned(
    queries: np.ndarray, keys: np.ndarray, own: np.ndarray, sample: np.ndarray
) -> PositionRecord:
    """The record of queries and keys that are rotated by these positions."""
    torch.manual_seed(0)
    q, k = (torch.randn(len(own), n * 2 * PAIRS).bfloat16() for n in (HEADS, KV_HEADS))
    check = PositionCheck(ROTARY)
    check.see("layers.0.q_norm", q, sample, own)
    check.see("layers.0.k_norm", k, sample, own)
    check.see("layers.0.q_rope", rotate(q, queries), sample, own)
    check.see("layers.0.k_rope", rotate(k, keys, count=KV_HEADS), sample, own)
    return check.record()


OWN, SAMPLE = np.tile(np.arange(30), 2), np.repeat([0, 1], 30)


def test_one_shift_of_queries_and_keys_is_harmless() -> None:
    record = both_turned(OWN + 1, OWN + 1, OWN, SAMPLE)
    assert (record.wrong, record.shift, record.harmless, record.one_shift) == (60, (1, 1), True, 1)
    assert record.shift_words == "+1"
    each = OWN + np.where(SAMPLE == 0, 3, -1)
    record = both_turned(each, each, OWN, SAMPLE)
    assert (record.shift, record.harmless, record.one_shift) == ((-1, 3), True, 0)
    assert record.shift_words == "-1 to +3, one shift in each sequence"
    assert PositionRecord.together([record]).shift == (-1, 3)
    # Another part may have the rest of a sequence.
    assert PositionRecord.together([record, record]).shift is None


def test_what_changes_a_difference_of_positions_is_not_harmless() -> None:
    healthy = both_turned(OWN, OWN, OWN, SAMPLE)
    assert (healthy.wrong, healthy.shift, healthy.harmless) == (0, (0, 0), False)
    later = OWN + (OWN > 20)
    for queries, keys in ((OWN + 1, OWN), (OWN, OWN + 1), (later, later), (OWN + 1, OWN + 2)):
        record = both_turned(queries, keys, OWN, SAMPLE)
        assert (record.shift, record.harmless, record.one_shift) == (None, False, 0)
    one = both_turned(OWN + 1, OWN + 1, OWN, SAMPLE)
    for other in (healthy, both_turned(OWN + 2, OWN + 2, OWN, SAMPLE)):
        assert PositionRecord.together([one, other]).shift is None
    # Keys that were not measured are not known to follow.
    assert measured(OWN[:30] + 1, OWN[:30]).shift is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_of_eight_tell_positions(dtype: torch.dtype) -> None:
    rotary = replace(ROTARY, inv_freq=tuple(10000.0 ** (-j / 4) for j in range(4)), context=2048)
    assert rotary.tells_positions
    assert not replace(rotary, inv_freq=rotary.inv_freq[:3]).tells_positions
    torch.manual_seed(0)
    own = np.arange(2040)
    x = torch.randn(len(own), HEADS * 8).to(dtype)
    frequency = torch.tensor(rotary.inv_freq)
    for shift in (0, 1, -1, 7):
        angle = torch.from_numpy(own + shift).float()[:, None] * frequency
        cos, sin = (t.to(dtype)[:, None] for t in (angle.cos(), angle.sin()))
        a, b = x.reshape(len(x), HEADS, -1).split(4, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).reshape(len(x), -1)
        check = PositionCheck(rotary)
        sample = np.zeros(len(own), dtype=np.int64)
        check.see("layers.0.q_norm", x, sample, own)
        check.see("layers.0.q_rope", turned, sample, own)
        record = check.record()
        assert record.wrong == (len(own) if shift else 0)
        assert all(w.effective == w.position + shift for w in record.first)
