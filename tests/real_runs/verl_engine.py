"""verl's FSDP2 engine with the kernels, without Ray: see test_verl_loop.py.

python -m torch.distributed.run --nproc-per-node 2 verl_engine.py MODEL
"""

import sys

import torch
from rlk_kernels.integrations import hf
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

MODEL = sys.argv[1]


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
        path=MODEL, external_lib="rlk_kernels.integrations.verl",
        override_config={"attn_implementation": "sdpa"},
    ),
    FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
    FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
    CheckpointConfig(),
)  # fmt: skip
engine.initialize()
torch.manual_seed(torch.distributed.get_rank())
sequences = [torch.randint(5, 900, (n,)) for n in (5, 17, 9, 30)]
scored = score(engine, sequences, packed=True)
assert all(map(torch.equal, scored, score(engine, sequences, packed=False)))

alone = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
hf.use_kernels(alone)
tokens = len(engine.model_config.tokenizer)  # verl's rollout samples no others
for ids, found in zip(sequences, scored, strict=True):
    with torch.no_grad():
        logits = alone(ids[None], use_cache=False).logits[0, :-1]
    assert hf.token_logprobs(logits[:, :tokens], ids[1:]).equal(found)

with engine.train_mode():
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batch(sequences, True), loss, forward_only=False)
    assert engine.optimizer_step() > 0
assert not any(map(torch.equal, scored, score(engine, sequences, packed=True)))
hf.check(hf.operators(engine.module))
