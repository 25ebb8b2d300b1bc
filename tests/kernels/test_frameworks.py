"""Digests by which a framework's rollout is shown to hold its trainer's weights."""

from collections.abc import Callable

import pytest
import torch
from rlk_kernels.integrations.frameworks import EMBEDDING, HEAD, differences, row_digests, to_bytes
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_digest_is_that_of_its_bits(dtype: torch.dtype) -> None:
    weight = matrix(7, 33, dtype)
    digests = row_digests(weight)
    assert digests.shape == (7,)
    assert len(set(digests.tolist())) == 7
    assert torch.equal(row_digests(weight[2:5]), digests[2:5])
    for row, column in ((0, 0), (3, 32), (6, 17)):
        changed = weight.clone()
        changed[row, column] = torch.nextafter(changed[row, column], torch.tensor(9.0).to(dtype))
        assert (row_digests(changed) != digests).nonzero().flatten().tolist() == [row]


def test_the_sign_of_zero_and_the_order_of_entries_count() -> None:
    zero, ordered = torch.zeros(1, 4), torch.tensor([[1.0, 2.0]])
    assert row_digests(zero) != row_digests(-zero)
    assert row_digests(ordered) != row_digests(ordered.flip(1))


def test_a_vector_has_a_digest_of_each_entry() -> None:
    vector = matrix(9, 1).flatten()
    assert torch.equal(row_digests(vector[4:]), row_digests(vector)[4:])


def test_large_weights_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(11, 33)
    whole = row_digests(weight)
    monkeypatch.setattr("rlk_kernels.integrations.frameworks.CHUNK", 70)
    assert torch.equal(row_digests(weight), whole)


def weights() -> dict[str, Tensor]:
    return {EMBEDDING: matrix(8, 4), "layer.weight": matrix(6, 4), "norm.weight": matrix(4, 1)}


def found(change: Callable[[dict[str, Tensor]], None], tied: bool = True) -> list[str]:
    """Two ranks hold the halves of the layer; what the second misses."""
    trained = weights()
    live = {name: weight.clone() for name, weight in trained.items()}
    change(live)
    parts = [(n, w[3:], 3) if n == "layer.weight" else (n, w, 0) for n, w in live.items()]
    sent = to_bytes({name: row_digests(weight) for name, weight in trained.items()})
    return differences(sent, parts, tied)


def test_equal_weights_differ_nowhere() -> None:
    assert found(lambda live: None) == []


def test_a_tied_output_layer_is_the_embedding() -> None:
    assert found(lambda live: live.update({HEAD: live[EMBEDDING]})) == []
    sent = {EMBEDDING: row_digests(matrix(8, 4)), HEAD: row_digests(matrix(8, 4))}
    held = [(EMBEDDING, matrix(8, 4), 0)]
    assert differences(to_bytes(sent), held, tied=True) == []
    sent[HEAD] = row_digests(matrix(8, 4) + 1)
    assert len(differences(to_bytes(sent), held, tied=True)) == 1


def test_what_a_rollout_holds_otherwise_is_named() -> None:
    assert found(lambda live: live["layer.weight"][5].mul_(2)) == [
        "layer.weight: 1 of 3 rows differ"
    ]
    assert found(lambda live: live["norm.weight"].neg_()) == ["norm.weight: 4 of 4 rows differ"]
    assert found(lambda live: live.pop("norm.weight")) == [
        "norm.weight: the rollout does not hold it"
    ]
    assert found(lambda live: live.update(new=matrix(2, 2))) == ["new: the trainer did not send it"]
    assert found(lambda live: live.update({"layer.weight": matrix(9, 4)})) == [
        "layer.weight: 6 of 6 rows differ"
    ]
