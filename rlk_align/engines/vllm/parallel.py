"""vLLM's tensor-parallel ranks."""

from rlk_align.engines.process.ranks import Ranks


def tensor_parallel() -> Ranks:
    """The rank of this worker process among vLLM's tensor-parallel ranks."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return Ranks(group.rank_in_group, group.world_size, group.device, group.device_group)
