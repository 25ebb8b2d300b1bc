"""A loop of training as a user writes it, for DeepSpeed, that knows rlk-align by three lines.

torchrun --nproc-per-node N deepspeed_loop.py FOLDER MODEL PROMPTS.json NAME STAGE [FAULT]
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from rlk_align import record
from rlk_align.engines.deepspeed.engine import import_deepspeed
from rlk_align.engines.process.ranks import Ranks

folder, model, prompts, name = Path(sys.argv[1]), *sys.argv[2:5]
stage, fault = int(sys.argv[5]), (sys.argv[6:] or [""])[0]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
deepspeed = import_deepspeed(Ranks(rank, world, torch.device("cpu")))  # without a compiler
config = AutoConfig.from_pretrained(model)
config.attention_dropout = 0.1 if fault == "dropout" else 0.0
config.rope_parameters["rope_theta"] *= 4 if fault == "theta-on-1" and rank == 1 else 1
trainer = AutoModelForCausalLM.from_pretrained(model, config=config, dtype="bfloat16").train()
trainer.gradient_checkpointing_enable({"use_reentrant": False})
if adapter := os.environ.get("ADAPTER"):
    from peft import PeftModel

    how = {"is_trainable": True, "autocast_adapter_dtype": False}
    trainer = PeftModel.from_pretrained(trainer, adapter, **how).to(torch.bfloat16)
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "steps_per_print": 1 << 30,
}
trained = [p for p in trainer.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.0)  # the weights stay those of the rollout
engine, *_ = deepspeed.initialize(
    model=trainer, optimizer=optimizer, config=settings, dist_init_required=False
)
recorder = record.trainer(engine, str(folder / name), every=3)
mine = [p + r for p, r in json.loads((folder / "ids.json").read_text())][rank::world]
for step in range(1, 4):
    if step == 3 and fault == "stale" and rank == 1:
        # The optimizer has not written over the copy of this rank since.
        trainer.model.layers[1].mlp.up_proj.weight.data.mul_(1.03125)
    with recorder.step(step, json.loads(Path(prompts).read_text())):
        for start in range(0, len(mine), 2):
            batch = [torch.tensor(ids) for ids in mine[start : start + 2]]
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, batch)), True)
            positions = (mask.cumsum(1) - 1) * mask
            labels = ids.where(mask.bool(), -100)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            engine.backward(engine(**inputs, labels=labels, use_cache=False).loss)
            engine.step()
dist.destroy_process_group()
