"""The choice of tiles, and what happens where the corner-stone does not hold."""

from dataclasses import replace

import pytest
import torch
from rlk_kernels import cornerstone, gemm, tiles

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(tiles, "interpreting", lambda: False)
    tiles.tile_for.cache_clear()
    cornerstone.holds.cache_clear()
    yield
    tiles.tile_for.cache_clear()
    cornerstone.holds.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_choice_is_among_the_tiles_that_are_checked(dtype):
    known = tiles.tiles_in_use()
    assert len(known) > 10
    for m in (1, 16, 17, 33, 64, 65, 500, 1000, 8192, 100000):
        for n in (1, 64, 1024, 6144, 28672, 151936):
            for k in (1, 1024, 14336):
                assert replace(tiles.tile_for(m, n, k, dtype), overlap=1) in known


def test_untrusted_devices_get_one_tile_for_every_shape():
    shapes = [(m, n, 1024) for m in (1, 64, 8192) for n in (64, 151936)]
    assert {tiles.tile_for(*s, torch.bfloat16, False) for s in shapes} == {tiles.SAFE}


def test_float32_has_one_tile():
    assert {tiles.tile_for(m, 64, 64, torch.float32) for m in (1, 100, 9000)} == {tiles.FLOAT32}


def test_every_tile_fits_the_shared_memory_of_hopper():
    for t in tiles.tiles_in_use():
        for out_bytes in (2, 4):
            stages = t.stages if out_bytes == 2 else max(2, t.stages - 1)
            operands = stages * (t.m + t.n + t.n2) * t.k * 2
            output = t.m * (t.n // 2 if t.subtile else t.n) * out_bytes + t.m * t.n2 * out_bytes
            assert operands + output < 227 * 1024, t


def test_a_tail_begins_where_the_full_waves_end():
    tile = tiles.Tile(128, 256, 64, 8, 4, tail=128)
    assert gemm._wide_columns(tile, 512, 28672, 132) == 25344  # 3 waves of 132 tiles, 4 row tiles
    for m in (1, 129, 512, 1000):
        for n in (1, 200, 264, 4096, 28672, 151936):
            wide = gemm._wide_columns(tile, m, n, 132)
            assert 0 <= wide <= n
            assert wide % tile.n == 0
    assert gemm._wide_columns(tiles.SAFE, 129, 264, 132) == 264


def test_where_all_tiles_agree_they_are_trusted(monkeypatch):
    monkeypatch.setattr(cornerstone, "tile_bits", lambda *_, chained: torch.ones(2))
    assert cornerstone.holds(CPU)
    assert cornerstone.holds(CPU, chained=True)


def test_one_tile_that_differs_is_noticed_and_said(monkeypatch):
    odd = tiles.tiles_in_use()[3]

    def bits(tile, dtype, device, chained):
        return torch.ones(2) + (1e-7 if tile == odd and dtype == torch.float16 and chained else 0)

    monkeypatch.setattr(cornerstone, "tile_bits", bits)
    assert cornerstone.disagreements(CPU, chained=True) == [(odd, torch.float16)]
    assert cornerstone.holds(CPU)
    with pytest.warns(cornerstone.TilesDiffer, match="one|every M"):
        assert not cornerstone.holds(CPU, chained=True)


def test_nan_bits_never_count_as_agreement(monkeypatch):
    monkeypatch.setattr(
        cornerstone,
        "tile_bits",
        lambda *_, chained: torch.full((2,), float("nan")),
    )
    assert cornerstone.disagreements(CPU)
