"""A live causal LM of transformers whose parameters FSDP2 shards over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rlk_align.engines.info import OptionValue
from rlk_align.engines.process.ranks import Ranks
from rlk_align.errors import BadOption
from rlk_align.record.train.recorded_engine import RecordedFSDP
from rlk_align.record.train.replicas import LiveReplicas


class LiveFSDP(LiveReplicas):
    """A model after `fully_shard`."""

    recorded = ("fsdp", RecordedFSDP)

    def __init__(self, model: Any, *, temperature: float, weights: bool) -> None:
        super().__init__(model, temperature=temperature, weights=weights)
        ranks, self._compute, self._mixed = _sharding(model)
        self.among(ranks)

    def _dtype(self) -> str:
        return str(self._compute).removeprefix("torch.")

    def _options(self) -> dict[str, OptionValue]:
        options = super()._options()
        recomputes = bool(self.model.is_gradient_checkpointing)
        own = {"dp": self.ranks.world, "mixed": self._mixed, "checkpointing": recomputes}
        return options | own


def _sharding(model: Any) -> tuple[Ranks, torch.dtype, bool]:
    """The ranks that share the parameters, the dtype that they compute in, and whether the
    parameters are kept in another one. Raises BadOption for what is not recorded."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        # After a forward the root's parameters stay gathered.
        module.reshard()
    states = [module._get_fsdp_state() for module in modules]
    parameters = dict(model.named_parameters())
    whole = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    if whole or not states:
        raise BadOption(
            f"FSDP2 does not shard {len(whole)} of {len(parameters)} parameters, e.g. {whole[0]}",
            "call fully_shard on the model itself too, and give that model",
        )
    first = next(iter(parameters.values()))
    mesh, world = first.device_mesh, dist.get_world_size()
    others = [
        name
        for name, p in parameters.items()
        if p.device_mesh != mesh or tuple(p.placements) != (Shard(0),)
    ]
    if others or mesh.size() != world or mesh.mesh.flatten().tolist() != list(range(world)):
        raise BadOption(
            f"a mesh of {list(mesh.shape)} among {world} ranks is not recorded: so far FSDP2 "
            "shards every parameter by rows over all ranks",
            "rlk-align compare --train fsdp:dp=N scores the same ids with ranks of its own",
        )
    if first.device.type != mesh.device_type:
        raise BadOption(
            f"parameters on the {first.device.type}, of a mesh of {mesh.device_type} "
            "(CPUOffloadPolicy), are not recorded",
            "record without offloading",
        )
    computed = {s._mp_policy.param_dtype or first.dtype for s in states}
    kept = {p.dtype for p in parameters.values()}
    if len(computed) > 1 or len(kept) > 1:
        raise BadOption(
            "parameters of several dtypes are not recorded: "
            + ", ".join(sorted(str(d) for d in computed | kept)),
            "give every fully_shard the same mp_policy",
        )
    ranks = Ranks(dist.get_rank(), world, first.device, mesh.get_group())
    [compute] = computed
    return ranks, compute, compute != first.dtype
