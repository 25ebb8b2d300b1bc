"""The gather by stores, in Triton's interpreter: processes share memory, and each runs the kernel
of the GPUs. R = ranks"""

import random
import time
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from rlk_kernels.errors import RankMissing, UnsupportedShape
from rlk_kernels.parallel.copies import gather_columns
from rlk_kernels.parallel.peer import flagged, kernels
from rlk_kernels.parallel.peer.channels import SLOT_BYTES, SLOTS, flagged_offset, region_bytes
from rlk_kernels.parallel.peer.gather import MOST_BYTES, POLLS_PER_SECOND, PeerGather
from torch import Tensor

COUNT = 16
FEW = 2
"""Channels; few, so that a shard of some KiB has several pieces."""
CPU = torch.device("cpu")


def regions_of(ranks: int, count: int = COUNT) -> list[Tensor]:
    """One region for each rank. Processes that are forked from this one see it at the same
    address."""
    size = region_bytes(ranks, count)
    return [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(ranks)]


def gather_of(
    rank: int, regions: list[Tensor], polls: int = 1 << 20, count: int = COUNT
) -> PeerGather:
    addresses = [region.data_ptr() for region in regions]
    return PeerGather(addresses, rank, CPU, polls / POLLS_PER_SECOND, count=count)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


def noise(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, including NaN and infinities."""
    words = (rows, columns * dtype.itemsize // 2)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, words, generator=generator).short().view(dtype)


def _random_shapes(group: Any, regions: list[Tensor], count: int) -> int:
    """The number of random shapes for which the bits are those of torch's all_gather."""
    gather, equal, draw = gather_of(group.rank(), regions), 0, random.Random(1)
    for i in range(count):
        dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
        columns = draw.choice([1, 3, 60, 512, draw.randint(1, 3000)])
        x = noise(draw.randint(1, 9), columns, dtype, seed=i * 8 + group.rank())
        expected = gather_columns(bits(x).int(), group)
        equal += torch.equal(bits(gather.columns(x)).int(), expected)
    gather.check()
    return equal


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.whole_matrix)])
def test_bits_are_those_of_torch(ranks):
    assert on_ranks(ranks, _random_shapes, regions_of(ranks), 6) == [6] * ranks


def _in_turn(group: Any, regions: list[Tensor]) -> list[bool]:
    """Rank 1 is late in each call; rank 0 stores the next piece as soon as it may."""
    gather, equal = gather_of(group.rank(), regions), []
    for i in range(4):
        time.sleep(0.05 * group.rank())
        x = torch.full((2, 64), 10.0 * i + group.rank(), dtype=torch.bfloat16)
        y = gather.columns(x)
        equal.append(
            torch.equal(y.unflatten(1, (2, 64)).sum(0)[:, 0], 20.0 * i + 2 * torch.arange(2))
        )
    return equal


def test_a_rank_that_comes_late_is_waited_for():
    assert on_ranks(2, _in_turn, regions_of(2)) == [[True] * 4] * 2


def test_a_rank_that_does_not_come_is_named():
    """Only rank 1 of 3 runs. Missing values are NaN; after that it neither stores nor waits."""
    regions = regions_of(3)
    gather = gather_of(1, regions, polls=2)
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    y = gather.columns(x).unflatten(1, (3, 8))
    assert torch.equal(y[:, 1], x)
    assert bool(y[:, [0, 2]].isnan().all())
    with pytest.raises(RankMissing, match=r"rank 1 of 3 waited for rank 0, 2, which did not join"):
        gather.check()
    with pytest.raises(RankMissing, match="rank 0, 2"):
        gather.columns(x)
    stored = [region.clone() for region in regions]
    # Few bytes are sent as messages with their epoch, which lie after flags and slots.
    behind = flagged_offset(3, COUNT)
    assert not bool(stored[0][:behind].any())
    assert bool(stored[0][behind:].any())
    # A CUDA graph would continue like this.
    again = kernels.columns(x * 2, gather.channels).unflatten(1, (3, 8))
    assert bool(again[:, [0, 2]].isnan().all())
    assert all(map(torch.equal, stored, regions))


def _in_pieces(group: Any, regions: list[Tensor], columns: int, epoch: int) -> list[bool]:
    """Several pieces in a channel, the last one short; then one piece, then several again."""
    gather, equal = gather_of(group.rank(), regions, count=FEW), []
    gather.channels.counters.fill_(epoch)
    for i, rows in enumerate((PIECES * FEW, 1, PIECES * FEW + 1)):
        time.sleep(0.05 * (group.rank() == i % 2))
        x = noise(rows, columns, torch.bfloat16, seed=i * 8 + group.rank())
        equal.append(
            torch.equal(bits(gather.columns(x)).int(), gather_columns(bits(x).int(), group))
        )
    gather.check()
    passed = int(gather.channels.counters[0]) - epoch
    return [*equal, passed > 2 * PIECES]


PIECES = 6
"""More than the number of slots."""


@pytest.mark.parametrize("epoch", [0, -3])  # as after 2**32 - 3 pieces
def test_more_than_the_slots_hold_is_gathered_in_pieces(epoch):
    assert PIECES > SLOTS
    columns = SLOT_BYTES // 2 - 8
    regions = regions_of(2, FEW)
    for region in regions:
        region[: FEW * 2 * 4].view(torch.int32).fill_(epoch)
    assert on_ranks(2, _in_pieces, regions, columns, epoch) == [[True] * 4] * 2


def test_a_rank_that_is_gone_between_pieces_is_named_and_not_stored_to():
    """Rank 0 of 2 receives the first piece of rank 1, and never the second."""
    regions = regions_of(2, FEW)
    gather = gather_of(0, regions, polls=2, count=FEW)
    # In place of rank 1: flags of both channels for source 1.
    regions[0][: FEW * 2 * 4].view(torch.int32).view(FEW, 2)[:, 1] = 1
    size = FEW * SLOT_BYTES
    x = torch.ones(6 * size // 16, 8, dtype=torch.bfloat16)
    arrived, lost = (
        gather.columns(x).unflatten(1, (2, 8))[:, 1].flatten().split([size // 2, 5 * size // 2])
    )
    assert not bool(arrived.any())
    assert bool(lost.isnan().all())
    with pytest.raises(RankMissing, match="rank 0 of 2 waited for rank 1"):
        gather.check()
    end = flagged_offset(2, FEW)
    slots = regions[1][end - SLOTS * 2 * size : end].view(SLOTS, 2, size)[:, 0]
    assert slots.bool().any(1).tolist() == [False, True, True, True], "epochs 1 to 3, of 6"


def test_a_shard_is_of_words_and_counted_by_32_bits():
    regions = regions_of(2)
    with torch.device("meta"):  # as engines create models
        gather = gather_of(0, regions)
    assert gather.channels.regions.is_cpu
    most = MOST_BYTES // 2
    assert gather.takes(torch.empty(most // 4, device="meta"))
    wrong = (most // 4 + 1, torch.float32), (0, torch.float32), (8, torch.uint8)
    for size, dtype in wrong:
        x = torch.empty(size, dtype=dtype, device="meta")
        assert not gather.takes(x)
        with pytest.raises(UnsupportedShape, match="cannot be gathered by stores"):
            gather.launch(x)


def test_every_kernel_is_compiled_before_a_graph(monkeypatch):
    """`compile_for` has compiled every kernel that any number of rows launches later."""
    gather, launched = gather_of(0, regions_of(1, FEW), count=FEW), set()

    def record(_cache: Any, kernel: Any, _grid: Any, arguments: tuple, _options: Any) -> None:
        launched.add((kernel.fn.__name__, arguments[-2] if kernel is kernels._gather_kernel else 0))

    for module in (kernels, flagged):
        monkeypatch.setattr(module, "launch", record)
    for columns, dtype in ((24, torch.bfloat16), (7, torch.float16), (600, torch.float32)):
        launched.clear()
        gather.compile_for(columns, dtype)
        before = launched.copy()
        for rows in range(1, 3 * FEW * SLOT_BYTES // (columns * dtype.itemsize), 3):
            gather.columns(torch.empty(rows, columns, dtype=dtype))
        assert launched == before
        assert len(launched) == (3 if columns % 2 == 0 else 2)


def test_it_is_traced_and_has_no_gradient():
    gather = gather_of(0, regions_of(1)[:1])

    def run(x: Tensor) -> Tensor:
        return gather.columns(x) * 2

    x = torch.arange(8.0)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x * 2)
    with pytest.raises(NotImplementedError, match="for inference"):
        run(x.requires_grad_()).sum().backward()
