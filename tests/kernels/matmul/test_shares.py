"""Which program makes which tile, where two products share a launch: each once, all together."""

from types import SimpleNamespace

import pytest
import torch
from rlk_kernels.matmul.accumulate import plan
from rlk_kernels.matmul.hopper import shares

PROGRAMS = 132


def partial(m, n, k, whole=True):
    half = torch.bfloat16
    return plan.Slice(m, n, k, 0, half, half, False, True, whole, False, True)


def tiles_of_program(monkeypatch, program, tiles, everyone, heavy):
    """What the kernel's own functions give one program."""
    language = SimpleNamespace(
        program_id=lambda axis: program, num_programs=lambda axis: PROGRAMS, maximum=max,
        cdiv=lambda a, b: -(-a // b), where=lambda condition, a, b: a if condition else b,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(shares, "gl", language)
        even, count = shares.tile_count.fn(tiles, everyone, heavy)
        return [shares.nth_tile.fn(j, even, everyone, heavy) for j in range(count)]


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"),
    [(1024, 1024, 128), (1408, 1024, 128), (1664, 1024, 128), (1024, 2048, 256), (1408, 4096, 256)],
)
def test_both_gradients_of_a_chunk_end_together(tokens, hidden, width, monkeypatch):
    dh, dw = partial(tokens, hidden, 151936), partial(151936, hidden, tokens, False)
    assert plan.width_beside(dh, dw, PROGRAMS) == width
    counts = plan.tiles_of(dw, 256), plan.tiles_of(dh, width)
    costs = plan.cost(dw, 256), plan.cost(dh, width)
    everyone, heavy = plan.share_tiles(counts[0], costs[0], counts[1], costs[1], PROGRAMS)
    tiles_by_product: tuple[list[int], list[int]] = ([], [])
    times = []
    for program in range(PROGRAMS):
        first = tiles_of_program(monkeypatch, program, counts[0], everyone, heavy)
        second = tiles_of_program(monkeypatch, program, counts[1], counts[1], 0)
        tiles_by_product[0].extend(first)
        tiles_by_product[1].extend(second)
        times.append(len(first) * costs[0] + len(second) * costs[1])
    assert [sorted(tiles) for tiles in tiles_by_product] == [list(range(count)) for count in counts]
    assert max(times) <= 1.05 * sum(times) / PROGRAMS


def test_a_product_of_few_long_tiles_stays_apart():
    dw = partial(151936, 1024, 128, False)
    assert plan.width_beside(partial(128, 1024, 151936), dw, PROGRAMS) == 0
    assert plan.width_beside(partial(1408, 1024, 151936, False), dw, PROGRAMS) == 0
