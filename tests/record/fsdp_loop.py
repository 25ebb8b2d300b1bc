"""A loop of training as a user writes it, for FSDP2, that knows rlk-align by three lines.

torchrun --nproc-per-node N fsdp_loop.py FOLDER MODEL PROMPTS.json NAME [FAULT]

ADAPTER in the environment is the folder of a LoRA adapter that is trained.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jumping_clock
import torch
import torch.distributed as dist
from full_disk import fill_disk
from peft import PeftModel
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from rlk_align import record


def padded(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    tensors = [torch.tensor(ids) for ids in batch]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in tensors], True)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1) * mask,
        "labels": ids.where(mask.bool(), -100),
    }


def packed(batch: list[list[int]], shift: int) -> dict[str, torch.Tensor]:
    """One row, whose mask has a block for each sequence. `shift`: by how much blocks are off."""
    lengths = torch.tensor([len(ids) for ids in batch])
    owner = torch.repeat_interleave(torch.arange(len(batch)), lengths)
    block = owner.roll(shift)
    seen = (block[:, None] == block[None]).tril()
    ids = torch.tensor([token for ids in batch for token in ids])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    mask = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, float("-inf"))
    return {"input_ids": ids, "attention_mask": mask[None, None], "position_ids": positions}


folder, model, prompts, name = Path(sys.argv[1]), *sys.argv[2:5]
fault = (sys.argv[5:] or [""])[0]
if fault == "clock":
    jumping_clock.plugin()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = AutoConfig.from_pretrained(model)
config.attention_dropout = 0.1 if fault == "dropout" else 0.0
far = fault == "theta" or (fault == "theta-on-1" and rank == 1)
config.rope_parameters["rope_theta"] *= 4 if far else 1
trainer = AutoModelForCausalLM.from_pretrained(model, config=config, dtype="float32").train()
trainer.gradient_checkpointing_enable({"use_reentrant": False})
layers = trainer.model.layers
if adapter := os.environ.get("ADAPTER"):
    trainer = PeftModel.from_pretrained(trainer, adapter, is_trainable=True)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(trainer, mp_policy=policy)
if fault == "stale" and rank == 1:
    if hasattr(layers[1].mlp, "experts"):
        # Its first expert is the one after those of rank 0; the rows of up_proj follow gate_proj's.
        layers[1].mlp.experts.gate_up_proj.to_local().data[0].chunk(2)[1].mul_(1.03125)
    else:
        layers[1].mlp.up_proj.weight.to_local().data.mul_(1.03125)
trained = [p for p in trainer.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.0)  # the weights stay those of the rollout
recorder = record.trainer(trainer, str(folder / name), every=3)
mine = [p + r for p, r in json.loads((folder / "ids.json").read_text())][rank::world]
for step in range(0 if fault == "undelivered" else 1, 4):
    if fault == "undelivered" and step == 3:
        # An update that the rollout does not get.
        trainer.reshard()
        layers[1].mlp.up_proj.weight.to_local().data.mul_(1.03125)
    if step == 3 and fault == "full-weights" and rank == 0:
        fill_disk(10_000)
    with recorder.step(step, json.loads(Path(prompts).read_text())):
        if step == 3 and fault == "full" and rank == 1:
            fill_disk(10_000)
        for start in range(0, len(mine), 2):
            batch = mine[start : start + 2]
            pack = fault in ("packed", "mask")
            inputs = packed(batch, int(fault == "mask")) if pack else padded(batch)
            output = trainer(**inputs, use_cache=False)
            (output.logits.float().square().mean() if pack else output.loss).backward()
        if step == 3 and fault == "killed" and rank == 1:
            while not (folder / name / "step-00000003/rank-0").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
