"""The choice of tiles, and what happens where the self-check fails."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rlk_kernels.launching import only_compiling
from rlk_kernels.matmul import self_check, tile_time, tiles
from rlk_kernels.matmul.hopper import product as hopper
from rlk_kernels.matmul.tile import evenly
from rlk_kernels.matmul.tile_costs import COSTS

CPU = torch.device("cpu")
IN_USE = {*tiles.product_tiles(), *tiles.partial_tiles(), tiles.PICK}
"""Every tile that 16-bit operands can be launched with: what the self-check covers."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    tiles.tile_for.cache_clear()
    self_check._checked.cache_clear()
    yield
    tiles.tile_for.cache_clear()
    self_check._checked.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_choice_is_among_the_tiles_that_are_checked(dtype):
    assert len(IN_USE) > 10
    for m in (1, 16, 17, 33, 64, 65, 500, 1000, 8192, 100000):
        for n in (1, 64, 1024, 6144, 28672, 151936):
            for k in (1, 1024, 14336):
                for specialized in (False, True):
                    tile = tiles.tile_for(m, n, k, dtype, 132, specialized=specialized)
                    assert replace(tile, overlap=1) in IN_USE
                    assert specialized or not tile.warp_specialized


def test_untrusted_devices_get_one_tile_for_every_shape():
    shapes = [(m, n, 1024) for m in (1, 64, 8192) for n in (64, 151936)]
    chosen = {tiles.tile_for(*s, torch.bfloat16, 132, trusted=False) for s in shapes}
    assert chosen == {tiles.SAFE}


def test_float32_has_one_tile():
    chosen = {tiles.tile_for(m, 64, 64, torch.float32, 132) for m in (1, 100, 9000)}
    assert chosen == {tiles.FLOAT32}


def test_every_tile_fits_the_shared_memory_of_hopper():
    for t in IN_USE:
        for out_bytes in (2, 4):
            stages = t.stages if out_bytes == 2 else max(2, t.stages - 1)
            operands = stages * (t.m + t.n) * t.k * 2
            if t.warp_specialized:
                assert hopper.shared_bytes(t) <= 227 * 1024, t
                assert (t.flat % 8, t.k % 64) == (0, 0), t
                continue
            output = t.m * (t.n // 2 if t.subtile else t.n) * out_bytes
            assert operands + output < 227 * 1024, t


def test_the_choice_is_the_least_predicted_time():
    work = [(m, n, k) for m in (1, 33, 129, 2113) for n in (576, 6144) for k in (512, 11008)]
    for m, n, k in work:
        times = {
            tile: tile_time.microseconds(cost, tile_time.work_of(tile, m, n, k, 132))
            for tile, cost in COSTS.items()
            if not tile.tail or m * n >= tile.m * tile.n * 132
        }
        chosen = tiles.tile_for(m, n, k, torch.bfloat16, 132)
        assert times[replace(chosen, overlap=1)] == min(times.values())
    assert len({tiles.tile_for(*shape, torch.bfloat16, 132) for shape in work}) > 8


def test_predicted_times_are_sound():
    """More of anything takes no less time, and a wave's last tile as long as the whole wave."""
    for tile, cost in COSTS.items():
        assert min(cost) > 0, tile

        def us(m, n, k, tile=tile, cost=cost):
            return tile_time.microseconds(cost, tile_time.work_of(tile, m, n, k, 132))

        assert us(4096, 4096, 4096) < us(4096, 4096, 8192) < us(16384, 4096, 8192)
        if not tile.tail:
            wave = 12 * tile.m, 11 * tile.n
            assert us(wave[0], wave[1] + 1, 4096) > 1.2 * us(*wave, 4096), tile


def test_tiles_that_lie_evenly_cover_a_side_with_as_many_and_have_equal_parts_of_it():
    for tile, unit in ((64, 1), (72, 1), (208, 1), (192, 16), (256, 16)):
        for length in (*range(1, 600), 1032, 4096, 14336):
            width = evenly(length, tile, unit)
            count = -(-length // tile)
            assert 0 < width <= tile
            assert width % unit == 0
            assert -(-length // width) == count  # the kernel finds out how many from `width`
            if unit == 1:
                assert width * count - length < count
    assert (evenly(135, 64), evenly(65, 64), evenly(576, 192, 16)) == (45, 33, 192)


def test_a_tail_is_part_of_the_predicted_time():
    tile = tiles.Tile(128, 256, 64, 8, 4, flatten=True, tail=64)
    full = tile_time.work_of(tile, 128, 132 * 256, 4096, 132)
    assert (full.waves, full.narrow_waves) == (1, 0)
    more = tile_time.work_of(tile, 128, 132 * 256 + 1, 4096, 132)
    assert (more.waves, more.narrow_waves) == (1, 1)


def test_a_tail_begins_where_the_full_waves_end():
    tile = tiles.Tile(128, 256, 64, 8, 4, tail=128)
    assert tile.wide_columns(512, 28672, 132) == 25344  # 3 waves of 132 tiles, 4 row tiles
    for m in (1, 129, 512, 1000):
        for n in (1, 200, 264, 4096, 28672, 151936):
            wide = tile.wide_columns(m, n, 132)
            assert 0 <= wide <= n
            assert wide % tile.n == 0
    assert tiles.SAFE.wide_columns(129, 264, 132) == 264


def literals() -> set[tiles.Tile]:
    """Every `Tile(...)` of `linear` in the source of the package; those of products by expert are
    held against `linear` by tests/gpu/kernels/test_experts_gpu.py."""
    literal = set()
    package = Path(tiles.__file__).parents[1]
    for path in {*package.rglob("*.py")} - {*(package / "ops" / "experts").iterdir()}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Tile":
                literal.add(eval(ast.unparse(node), {"Tile": tiles.Tile}))
    return literal


def test_the_self_check_covers_every_tile_in_the_source():
    literal = literals() | {*COSTS}
    assert len(literal) > len(COSTS)
    known = {*IN_USE, *tiles.SINGLE}
    assert {tiles.as_product(tile) for tile in literal} <= known
    assert not {tiles.as_product(tiles.Tile(16, 16, 64, 4, 3))} <= known


@pytest.fixture
def odd(monkeypatch):
    """All tiles agree but those that a test names: (tile, dtype, whether split)."""
    odd: set = set()

    def bits(tile, dtype, device, split=False, pointers=False):
        return torch.ones(2, 2) + (1e-7 if (tile, dtype, split) in odd else 0)

    monkeypatch.setattr(self_check, "tile_bits", bits)
    monkeypatch.setattr(self_check, "partial_bits", bits)
    return odd


@pytest.mark.usefixtures("odd")
def test_where_all_tiles_agree_they_are_trusted():
    assert self_check.tiles_agree(CPU)
    assert self_check.tiles_agree(CPU, split=True)
    assert self_check.trusted(CPU, torch.float32)


def test_it_is_checked_once_however_it_is_asked_for(monkeypatch):
    checked = []
    monkeypatch.setattr(self_check, "disagreements", lambda *asked: checked.append(asked) or [])
    assert all([self_check.tiles_agree(CPU), self_check.tiles_agree(CPU, False)])
    assert self_check.tiles_agree(CPU, split=False)
    assert self_check.trusted(CPU, torch.bfloat16)
    assert checked == [(CPU, False, (dtype,)) for dtype in self_check.HALVES]


def test_what_is_compiled_ahead_of_the_check_asks_for_none(monkeypatch):
    monkeypatch.setattr(self_check, "disagreements", lambda *_: pytest.fail("it was checked"))
    with only_compiling():
        assert self_check.trusted(CPU, torch.bfloat16, split=True)


class Notes:
    """Triton's cache of a machine, for one digest at a time."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def folder(self, digest: str) -> SimpleNamespace:
        def put(text: str, name: str, binary: bool) -> None:
            self.files.add(digest)

        return SimpleNamespace(
            get_file=lambda name: name if digest in self.files else None, put=put
        )


def test_that_it_held_is_noted_for_such_a_gpu_and_these_sources_alone(monkeypatch):
    notes, checked, gpu = Notes(), [], ["NVIDIA H100"]
    on_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(self_check, "disk_cache", notes.folder)
    monkeypatch.setattr(self_check, "interpreting", lambda: False)
    monkeypatch.setattr(self_check, "facts", lambda device: SimpleNamespace(cuda=False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    wrong: list = []
    monkeypatch.setattr(self_check, "disagreements", lambda *asked: checked.append(asked) or wrong)

    def again(dtype=torch.bfloat16, split=False) -> int:
        """How often a new process checks."""
        self_check._checked.cache_clear()
        checked.clear()
        assert self_check.trusted(on_gpu, dtype, split)
        return len(checked)

    assert (again(), again()) == (1, 0)
    assert (again(torch.float16), again(split=True), again(split=True)) == (1, 1, 0)
    gpu[0] = "NVIDIA H200"
    assert (again(), again()) == (1, 0)
    monkeypatch.setattr(self_check, "sources_digest", lambda: "edited")
    assert again() == 1
    gpu[0], wrong[:] = "NVIDIA H20", ["a tile"]
    for _ in range(2):  # a failure is noted nowhere
        self_check._checked.cache_clear()
        with pytest.warns(self_check.TilesDiffer):
            assert not self_check.trusted(on_gpu, torch.bfloat16)


def test_one_tile_that_differs_is_noticed_and_said(odd):
    tile = tiles.product_tiles(False)[3]
    odd.add((tile, torch.float16, True))
    assert self_check.disagreements(CPU, split=True) == [(tile, torch.float16)]
    assert self_check.tiles_agree(CPU)
    with pytest.warns(self_check.TilesDiffer, match="one|every M"):
        assert not self_check.tiles_agree(CPU, split=True)


def test_tiles_of_the_hopper_kernel_are_checked_where_it_runs(monkeypatch):
    here = SimpleNamespace(gluon=True, cuda=True)
    monkeypatch.setattr(self_check, "facts", lambda device: here)
    checked = {what for what, _ in self_check._checks(torch.bfloat16, CPU, False)}
    assert {tiles.as_product(tile) for tile in COSTS} <= checked
    here.gluon, here.cuda = False, False
    checked = {what for what, _ in self_check._checks(torch.bfloat16, CPU, False)}
    assert not {tile for tile in checked if getattr(tile, "warp_specialized", False)}


@pytest.mark.parametrize("split", [False, True])
def test_each_tile_in_use_is_checked(odd, split):
    checked = [*tiles.product_tiles(False), tiles.PICK]
    checked += [] if split else tiles.partial_tiles()
    for tile in checked:
        odd.clear()
        odd.add((tile, torch.bfloat16, split))
        if tile != tiles.SAFE:  # what the others are compared with
            disagreeing = self_check.disagreements(CPU, split)
            assert set(disagreeing) == {(tile, torch.bfloat16)}, tile


def test_nan_bits_never_count_as_agreement(monkeypatch):
    nan = torch.full((2, 2), float("nan"))
    for name in ("tile_bits", "partial_bits"):
        monkeypatch.setattr(self_check, name, lambda *_, **__: nan)
    assert self_check.disagreements(CPU)


def test_partial_accumulators_show_the_sums_of_the_product(monkeypatch):
    """In the interpreter, whose every tile adds one by one; another sum shows."""
    monkeypatch.setattr(self_check, "sum_length", lambda split: 72)
    tile, half = tiles.Tile(128, 128, 8, 4, 1), torch.float16
    expected = self_check.tile_bits(tiles.Tile(64, 128, 8, 4, 1), half, CPU)
    assert torch.equal(self_check.partial_bits(tile, half, CPU), expected)
    operands = self_check.operands

    def shifted(*arguments):
        return [x.roll(1, 1) for x in operands(*arguments)]

    monkeypatch.setattr(self_check, "operands", shifted)
    assert not torch.equal(self_check.partial_bits(tile, half, CPU), expected)


def test_the_storage_of_partial_sums_on_hopper_is_undone():
    """As `_store_partial` has it: fp32 numbers in the order of the registers."""
    from rlk_kernels.matmul.hopper.accumulate import stored_partials

    sums = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    stored = [
        half.reshape(5, 8, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(5, 128).contiguous()
        for half in sums.split(128, 1)
    ]
    x = SimpleNamespace(out=stored[0].view(torch.bfloat16), lo=stored[1].view(torch.int16))
    assert torch.equal(stored_partials(x), sums)
