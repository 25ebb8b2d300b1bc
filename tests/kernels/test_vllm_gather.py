"""Which gather vLLM's row-parallel products take: stores, where ranks share memory, and vLLM's own
else."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from rlk_kernels.errors import RankMissing, UnsupportedDevice
from rlk_kernels.integrations.vllm import gather, layers
from rlk_kernels.parallel.peer.channels import region_bytes
from rlk_kernels.parallel.peer.gather import PeerGather
from vllm.model_executor.layers import logits_processor

CPU, COUNT = torch.device("cpu"), 2


class Ranks:
    """What is asked of vLLM's group: it has one rank, or two of which the other never comes."""

    unique_name, device, cpu_group = "tp:0", torch.device("cuda"), None

    def __init__(self) -> None:
        self.gathered: list[tuple[int, ...]] = []

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.gathered.append(tuple(x.shape))
        return x.clone()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks()
    monkeypatch.setattr(gather, "get_tp_group", lambda: ranks)
    monkeypatch.setattr(gather, "_peers", {})
    parallel = SimpleNamespace(disable_custom_all_reduce=False, enable_dbo=False)
    config = SimpleNamespace(parallel_config=parallel)
    monkeypatch.setattr(gather, "get_current_vllm_config", lambda: config)
    return ranks


def peers_of(count: int) -> tuple[PeerGather, list[torch.Tensor]]:
    regions = [torch.zeros(region_bytes(count, COUNT), dtype=torch.uint8) for _ in range(count)]
    made = PeerGather([x.data_ptr() for x in regions], 0, CPU, seconds=1e-6, count=COUNT)
    return made, regions


def test_what_can_be_is_stored_and_the_rest_is_left_to_vllm(ranks: Ranks) -> None:
    peers, _regions = peers_of(1)
    gather._peers[ranks.unique_name] = peers
    few, many = torch.ones(4, 8), torch.ones(1 << 15, 8)
    for x in (few, many):
        before = int(peers.channels.counters.sum())
        assert torch.equal(gather.columns(x, 1), x)
        assert int(peers.channels.counters.sum()) > before
    assert ranks.gathered == []
    bytes_ = torch.ones(4, 8, dtype=torch.uint8)
    assert torch.equal(gather.columns(bytes_, 1), bytes_)
    assert ranks.gathered == [tuple(bytes_.shape)]


def test_without_shared_memory_all_is_left_to_vllm(ranks: Ranks) -> None:
    gather._peers[ranks.unique_name] = None
    gather.columns(torch.ones(4, 8), 1)
    gather.check()
    assert ranks.gathered == [(4, 8)]


def test_a_rank_that_did_not_come_is_named_by_the_next_step(ranks: Ranks) -> None:
    peers, _regions = peers_of(2)
    gather._peers[ranks.unique_name] = peers
    y = gather.columns(torch.ones(1, 8), 2)
    assert y.shape == (1, 16)
    assert bool(y[:, 8:].isnan().all())
    with pytest.raises(RankMissing, match="rank 0 of 2 waited for rank 1"):
        gather.check()


@pytest.mark.parametrize(("count", "asked"), [(1, "all"), (2, "all"), (2, "one")])
def test_logits_of_several_ranks_that_all_want_them_are_stored(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, count: int, asked: str
) -> None:
    """And those of one rank are no copy, also where vLLM asks for them to be gathered."""
    monkeypatch.setattr(ranks, "world_size", count, raising=False)
    monkeypatch.setattr(layers, "get_tp_group", lambda: ranks)
    for name in ("all_gather", "gather"):
        function = f"tensor_model_parallel_{name}"
        monkeypatch.setattr(logits_processor, function, lambda logits: logits)
    processor = layers.RlkLogitsProcessor.__new__(layers.RlkLogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.use_all_gather = asked == "all"
    logits = torch.ones(2, 8)
    gathered = processor._gather_logits(logits)
    stored = count > 1 and asked == "all"
    assert (gathered is logits) == (not stored)
    assert ranks.gathered == [(2, 8)] * stored


@pytest.mark.parametrize("option", ["disable_custom_all_reduce", "enable_dbo"])
def test_options_of_vllm_leave_all_to_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    setattr(gather.get_current_vllm_config().parallel_config, option, True)
    monkeypatch.setattr(gather, "peer_gather", pytest.fail)
    gather.connect((8,), torch.bfloat16)
    assert gather._peers == {ranks.unique_name: None}


def test_gpus_that_do_not_reach_each_other_are_said_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, asked = [], []

    def refuse(*_: object) -> PeerGather:
        asked.append(1)
        raise UnsupportedDevice("no gathering by stores: a rank is on another")

    monkeypatch.setattr(gather, "peer_gather", refuse)
    monkeypatch.setattr(gather._logger, "warning", lambda text, *rest: said.append(text % rest))
    for _ in range(3):
        gather.connect((8,), torch.bfloat16)
    assert len(asked) == len(said) == 1
    assert "a rank is on another; the kernels use vLLM's all-gather" in said[0]
    assert gather._peers == {ranks.unique_name: None}
