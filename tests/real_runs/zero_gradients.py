"""Gradients under ZeRO against those of HF transformers, and DeepSpeed's own checkpoints.

    python -m torch.distributed.run --nproc-per-node N zero_gradients.py OUT [STAGE,... [ADAPTER]]

Two sequences: with one rank two micro-batches, with two ranks one each. OUT/gradients.json has, by
`MODE STAGE`, how many gradients are those of HF: the fp32 mean of both sequences', and with
`mixed=bf16` that rounded to bf16. OUT/stageN is the checkpoint after a step with the kernels, and
OUT/liveN what the model then computed with. With ADAPTER, gradients are those of its factors, with
the kernels alone, and there are no checkpoints.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rlk_kernels.integrations import hf
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rlk_align.data import data_path
from rlk_align.engines.deepspeed.engine import import_deepspeed
from rlk_align.engines.hf.lora import add_adapters
from rlk_align.engines.process.ranks import join

OUT = Path(sys.argv[1])
STAGES = [int(stage) for stage in (sys.argv[2:] or ["0,1,2,3"])[0].split(",")]
ADAPTER = (sys.argv[3:] or [""])[0]
MODES = ("bf16 rlk", "autocast rlk", "bf16 off")[: 2 if ADAPTER else 3]
torch.set_num_threads(1)
ranks = join("cpu", 60.0)
deepspeed = import_deepspeed(ranks)
from deepspeed.utils import safe_get_full_grad  # noqa: E402

ids = torch.randint(2, 1000, (2, 33), generator=torch.Generator().manual_seed(7))


def loaded(mode: str):
    dtype = torch.float32 if "autocast" in mode else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype=dtype).train()
    # One matrix that is not trained, and shards of it beside those of the others.
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    if ADAPTER:
        add_adapters(model, [ADAPTER], in_float32=dtype == torch.float32)
    if "rlk" in mode:
        hf.use_kernels(model)
    return model


def loss(run, i: int) -> torch.Tensor:
    logits = run(input_ids=ids[i][None], use_cache=False).logits[0, :-1]
    return -hf.token_logprobs(logits.float(), ids[i][1:]).mean()


def wanted(mode: str) -> dict[str, torch.Tensor]:
    model, each = loaded(mode), []
    for i in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in mode):
            value = loss(model, i)
        value.backward()
        each.append({n: p.grad.float() for n, p in model.named_parameters() if p.requires_grad})
    mean = {n: (each[0][n] + each[1][n]) / 2 for n in each[0]}
    return {n: x.bfloat16().float() if "bf16" in mode else x for n, x in mean.items()}


# Before ZeRO-3 replaces a function of torch for good.
of_hf = {mode: wanted(mode) for mode in MODES}
found: dict[str, tuple[int, int]] = {}
for stage in STAGES:
    for mode in MODES:
        model = loaded(mode)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2 // ranks.world,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        if "autocast" in mode:
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        else:
            config["bf16"] = {"enabled": True}
        trained = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(trained, lr=1e-2),
            config=config,
            dist_init_required=False,
        )
        for i in range(ranks.rank, 2, ranks.world):
            engine.backward(loss(engine, i))
            if ranks.world == 1 and i == 0:
                engine.step()
        gradients = {
            n: safe_get_full_grad(p).float() for n, p in model.named_parameters() if p.requires_grad
        }
        right = of_hf[mode]
        assert gradients.keys() == right.keys()
        assert all(bool(g.any()) for g in gradients.values())
        equal = sum(torch.equal(gradients[n], right[n]) for n in right)
        found[f"{mode} {stage}"] = (equal, len(right))
        engine.step()
        if mode == "bf16 rlk" and not ADAPTER:
            engine.save_checkpoint(str(OUT / f"stage{stage}"))
            parameters = dict(model.named_parameters())
            with deepspeed.zero.GatheredParameters([*parameters.values()], enabled=stage == 3):
                live = {n: p.detach().clone().contiguous() for n, p in parameters.items()}
            if ranks.rank == 0:
                (OUT / f"live{stage}").mkdir()
                save_file(live, OUT / f"live{stage}/model.safetensors")
                for folder in ("stage", "live"):
                    config_json = (data_path("model") / "config.json").read_bytes()
                    (OUT / f"{folder}{stage}/config.json").write_bytes(config_json)
        engine.destroy()
if ranks.rank == 0:
    (OUT / "gradients.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
os._exit(0)
