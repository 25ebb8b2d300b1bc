"""The measured boundaries of sequences, from the values of a real attention."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from rlk_align.trace.boundaries import BoundaryCheck
from rlk_align.trace.schema import BoundaryRecord

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = (7, 1, 5, 9)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Causal attention within [ends[i], ends[i + 1]): `[T, heads, D]` -> `[T, heads * D]`."""
    out = torch.empty_like(q)
    for start, stop in pairwise(ends):
        parts = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
        done = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, enable_gqa=True
        )
        out[start:stop] = done[0].transpose(0, 1)
    return out.flatten(1)


def measured(shift: dict[int, int], dtype: torch.dtype = torch.bfloat16) -> BoundaryRecord:
    """`shift`: number of a boundary -> its error."""
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q = torch.randn(total, HEADS, DIM).to(dtype)
    k, v = torch.randn(2, total, KV_HEADS, DIM).to(dtype).unbind()
    ends = np.concatenate([[0], np.cumsum(LENGTHS)]).tolist()
    for i, by in shift.items():
        ends[i] += by
    sample = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    position = np.concatenate([np.arange(n) for n in LENGTHS])
    check = BoundaryCheck(HEADS, KV_HEADS)
    check.see("layers.0.v_proj", v.flatten(1), sample, position)
    check.see("layers.0.attn", attention(q, k, v, ends), sample, position)
    return check.record()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_right_boundaries_are_right(dtype: torch.dtype) -> None:
    record = measured({}, dtype)
    assert (record.checked, record.wrong, record.first) == (sum(LENGTHS), 0, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_late_boundary_names_both_rows(dtype: torch.dtype) -> None:
    record = measured({3: 1}, dtype)
    found = [(w.sample, w.position, w.sees) for w in record.first]
    assert found == [(3, 0, "other tokens"), (3, 1, "itself alone")]
    assert record.wrong == 2


def test_an_early_boundary_names_both_rows() -> None:
    found = [(w.sample, w.position, w.sees) for w in measured({3: -1}).first]
    assert found == [(2, 4, "itself alone"), (3, 0, "other tokens")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beside_sinks_the_first_token_gets_a_share_of_its_value(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = np.arange(2)
    value = torch.randn(2, KV_HEADS, DIM).to(dtype)
    repeated = value.repeat_interleave(HEADS // KV_HEADS, dim=1)
    share = torch.tensor([0.9, 0.02, 0.5, 0.3])[None, :, None]
    right = (repeated.float() * share).to(dtype)
    for first, found in (
        (right[0], []),
        (-right[0], [(0, 0, "other tokens")]),
        (right.mean(dim=0), [(0, 0, "other tokens")]),
    ):
        check = BoundaryCheck(HEADS, KV_HEADS, sinks=True)
        check.see("layers.0.v_proj", value.flatten(1), 0 * rows, rows)
        out = torch.stack([first, right.mean(dim=0)])
        check.see("layers.0.attn", out.flatten(1), 0 * rows, rows)
        assert [(w.sample, w.position, w.sees) for w in check.record().first] == found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_repeated_token_sees_only_itself_either_way(dtype: torch.dtype, at_once: bool) -> None:
    """The average of equal values is the value itself; in a decode, rows come one at a time."""
    torch.manual_seed(0)
    ids = torch.tensor([0, 0, 0, 0, 1, 2])
    q = torch.randn(len(ids), HEADS, DIM).to(dtype)
    k, v = torch.randn(2, 3, KV_HEADS, DIM).to(dtype)[:, ids].unbind()
    for ends, found in (([0, 6], []), ([0, 5, 6], [(0, 5, "itself alone")])):
        out = attention(q, k, v, ends)
        check = BoundaryCheck(HEADS, KV_HEADS)
        for rows in np.split(np.arange(len(ids)), 1 if at_once else len(ids)):
            sample = np.zeros_like(rows)
            check.see("layers.0.v_proj", v[rows].flatten(1), sample, rows)
            check.see("layers.0.attn", out[rows], sample, rows)
        record = check.record()
        assert [(w.sample, w.position, w.sees) for w in record.first] == found
        assert record.checked == len(ids)


def test_other_layers_and_shapes_are_left_alone() -> None:
    where = (np.zeros(2, dtype=np.int64), np.arange(2))
    check = BoundaryCheck(HEADS, KV_HEADS)
    check.see("layers.0.attn", torch.randn(2, HEADS * DIM), *where)
    check.see("layers.1.v_proj", torch.randn(2, KV_HEADS * DIM), *where)
    check.see("layers.1.attn", torch.randn(2, HEADS * DIM), *where)
    assert check.record() == BoundaryRecord()
    check.see("layers.0.v_proj", torch.randn(2, KV_HEADS * DIM), *where)
    check.see("layers.0.attn", torch.randn(2, 2 * HEADS * DIM), *where)
    assert check.record() == BoundaryRecord()
