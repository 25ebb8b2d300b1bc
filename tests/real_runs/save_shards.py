"""Saves three sharded checkpoints of the embedded model as trainers do; run by torchrun.

    torchrun --nproc-per-node 2 save_shards.py fsdp|megatron FOLDER

FOLDER/step-1: the embedded model; step-2: every parameter moved; synced: step 2, but for one
matrix, of which rank 1 still has its slice of step 1.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from rlk_align.data import data_path
from rlk_align.engines.hf.fsdp import FSDPEngine
from rlk_align.engines.megatron.engine import MegatronEngine
from rlk_align.engines.process.ranks import destroy_process_group, join
from rlk_align.engines.spec import EngineSpec
from rlk_align.model.shape import read_shape

STALE = {
    "fsdp": "model.layers.1.self_attn.q_proj.weight",
    "megatron": "decoder.layers.1.mlp.linear_fc1.weight",
}


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def save(kind: str, model: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "megatron":
        from megatron.core import dist_checkpointing

        torch.cuda.synchronize = lambda *_: None  # it asks for a GPU to wait for
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        return
    state = model.state_dict()
    moments = {f"{name}.exp_avg": torch.zeros_like(p) for name, p in state.items()}
    dcp.save({"model": state, "optimizer": moments, "steps": 3}, checkpoint_id=folder)


def main(kind: str, folder: Path) -> None:
    model_path = data_path("model")
    shape = read_shape(model_path)
    made = {"fsdp": (FSDPEngine, "fsdp:dp=2"), "megatron": (MegatronEngine, "megatron:tp=2")}
    engine_class, spec = made[kind]
    engine = engine_class(EngineSpec.parse(spec), model_path, shape)
    engine.ranks = join("cpu", 60)
    engine.open()
    parameters = dict(engine.model.named_parameters())
    before = {name: local(p).clone() for name, p in parameters.items()}
    save(kind, engine.model, folder / "step-1")
    for p in parameters.values():
        local(p).add_(0.0625)
    save(kind, engine.model, folder / "step-2")
    if engine.ranks.rank == 1:
        local(parameters[STALE[kind]]).copy_(before[STALE[kind]])
    save(kind, engine.model, folder / "synced")
    destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    for child in multiprocessing.active_children():
        child.terminate()  # megatron-core's writer holds this process's output open
    os._exit(0)  # gloo's threads may abort a rank that ends in order after the group is gone
