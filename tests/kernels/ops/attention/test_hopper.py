"""Where the Hopper kernel finds keys: as rows of one matrix, or not at all."""

import pytest
import torch
from rlk_kernels.ops.attention.hopper import steps as hopper

HEADS, DIM = 3, 64


def fused(rows):
    """Keys between queries and values in one tensor."""
    return torch.arange(rows * 9 * DIM).view(rows, 9, DIM)[:, 3:6]


def beside_values(blocks, page):
    """vLLM's cache with keys and values in one block."""
    return torch.arange(blocks * 2 * page * HEADS * DIM).view(blocks, 2, page, HEADS, DIM)[:, 0]


def rows_of(x, paged):
    """What a tensor map of x describes, or None."""
    size = hopper.as_matrix(x.shape, x.stride(), paged)
    return None if size is None else torch.as_strided(x, size, (x.stride(-3), 1))


@pytest.mark.parametrize("rows", [1, 7])
def test_rows_of_packed_keys(rows):
    for x in (fused(rows), fused(rows).contiguous()):
        matrix = rows_of(x, False)
        assert matrix is not None
        for head in range(HEADS):
            column = head * x.stride(1)
            assert torch.equal(matrix[:, column : column + DIM], x[:, head])


@pytest.mark.parametrize("page", [8, 16])
@pytest.mark.parametrize("blocks", [1, 5])
def test_rows_of_a_cache(blocks, page):
    for x in (beside_values(blocks, page), beside_values(blocks, page).contiguous()):
        matrix = rows_of(x, True)
        assert matrix is not None
        pitch = x.stride(0) // x.stride(1)
        for block in range(blocks):
            row, column = block * pitch, 2 * x.stride(2)
            assert torch.equal(matrix[row : row + page, column : column + DIM], x[block, :, 2])


def test_what_is_no_matrix_of_rows_is_left_to_the_other_kernel():
    heads_first = torch.zeros(5, HEADS, 16, DIM).transpose(1, 2)
    assert rows_of(heads_first, True) is None
    assert rows_of(torch.zeros(1, HEADS, DIM).expand(7, -1, -1), False) is None
    assert rows_of(torch.zeros(0, HEADS, DIM), False) is None


def test_pages_fill_blocks_or_are_left_to_the_other_kernel():
    taken = {8: 8, 16: 16, 64: 64, 128: 128, 256: 128, 1: 0, 4: 0, 24: 0, 192: 0}
    assert {page: hopper.keys_per_copy(page, 128) for page in taken} == taken
    taken |= {128: 64, 192: 64, 256: 64}
    assert {page: hopper.keys_per_copy(page, 64) for page in taken} == taken
