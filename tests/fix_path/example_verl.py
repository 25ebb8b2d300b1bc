# ruff: noqa: E402 (verl asks for its platform while it is imported)
"""Runs verl's FSDP2 engine on a CPU with the module of docs/fix-path.md, `rlk_verl`, on the path.
Needs verl 0.9.1, and of what it asks for ray, tensordict, torchdata, codetiming, hydra-core,
omegaconf, peft and msgpack.

    python -m torch.distributed.run --nproc-per-node 2 example_verl.py MODEL
"""

import sys
from types import SimpleNamespace

import torch
import verl.plugin.platform.platform_manager as platforms

MODEL = sys.argv[1]


class CPU(platforms.PlatformCUDA):
    """verl knows accelerators alone; other platforms are registered with it."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        mem_get_info=lambda *_: (1, 1), memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0, get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )  # fmt: skip

    def current_device(self):
        return "cpu"

    def empty_cache(self):
        pass


platforms.set_platform(CPU())

import verl.models.transformers.monkey_patch as monkey_patch
from rlk_kernels.integrations import hf
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

monkey_patch.is_trl_available = lambda: False  # it looks for what TRL no longer has


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(sequences, packed):
    data = {
        "input_ids": nested(sequences),
        "position_ids": nested(torch.arange(len(s)) for s in sequences),
        "loss_mask": nested(torch.ones(len(s)) for s in sequences),
    }
    data = TensorDict(data, batch_size=[len(sequences)])
    tensordict_utils.assign_non_tensor(
        data, temperature=1.0, use_remove_padding=packed, pad_mode="no_padding",
        use_dynamic_bsz=False, micro_batch_size_per_gpu=len(sequences),
        global_batch_size=len(sequences),
    )  # fmt: skip
    return data


def score(engine, sequences, packed):
    with engine.eval_mode():
        found = engine.forward_backward_batch(batch(sequences, packed), None, forward_only=True)
    return [row[:-1] for row in found["model_output"]["log_probs"].unbind()]


def loss(model_output, **_):
    return -model_output["log_probs"].values().mean(), {}


torch.distributed.init_process_group("gloo")
engine = FSDPEngineWithLMHead(
    HFModelConfig(
        path=MODEL, external_lib="rlk_verl", override_config={"attn_implementation": "sdpa"}
    ),
    FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
    FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
    CheckpointConfig(),
)
engine.initialize()
torch.manual_seed(torch.distributed.get_rank())
sequences = [torch.randint(5, 900, (n,)) for n in (5, 17, 9, 30)]
scored = score(engine, sequences, packed=True)
assert all(map(torch.equal, scored, score(engine, sequences, packed=False)))

alone = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)  # has the kernels too
for ids, found in zip(sequences, scored, strict=True):
    with torch.no_grad():
        logits = alone(ids[None], use_cache=False).logits[0, :-1]
    assert hf.token_logprobs(logits, ids[1:]).equal(found)

with engine.train_mode():
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batch(sequences, True), loss, forward_only=False)
    assert engine.optimizer_step() > 0
assert not any(map(torch.equal, scored, score(engine, sequences, packed=True)))
hf.check(hf.operators(engine.module))
