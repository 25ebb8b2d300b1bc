"""A loop of reinforcement learning as a user writes it, that knows rlk-align by two lines.

loop.py rollout FOLDER MODEL PROMPTS.json       vLLM samples, with RLK_RECORD in the environment
loop.py train FOLDER MODEL PROMPTS.json [stale | theta | unsaved]       a transformers model scores

ADAPTER in the environment is the folder of a LoRA adapter that the part computes with.
"""

import json
import os
import sys
from pathlib import Path


def rollout(folder: Path, model: str, prompts: list[list[int]]) -> None:
    import torch

    from rlk_align.engines.vllm.registered import register_without_torchvision

    register_without_torchvision()  # which this machine may lack
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}
    llm = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=100_000_000,
        gpu_memory_utilization=0.01,
        **(settings if ADAPTER else {}),
    )
    torch.manual_seed(0)
    params = SamplingParams(temperature=1.0, max_tokens=24, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    lora = LoRARequest("policy", 1, ADAPTER) if ADAPTER else None
    outputs = llm.generate(inputs, params, lora_request=lora, use_tqdm=False)
    ids = [[list(o.prompt_token_ids), list(o.outputs[0].token_ids)] for o in outputs]
    (folder / "ids.json").write_text(json.dumps(ids))


def train(folder: Path, model: str, prompts: list[list[int]], fault: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlk_align import record

    config = AutoConfig.from_pretrained(model)
    if fault == "theta":
        config.rope_parameters["rope_theta"] *= 4
    trainer = AutoModelForCausalLM.from_pretrained(model, config=config, dtype="bfloat16")
    if ADAPTER:
        from peft import PeftModel

        trainer = PeftModel.from_pretrained(trainer, ADAPTER)
    if fault == "stale":
        with torch.no_grad():
            trainer.model.layers[1].mlp.up_proj.weight.mul_(1.03125)
    out = str(folder / f"train{fault}")
    recorder = record.trainer(trainer, out, every=1, weights=fault != "unsaved")
    pairs = json.loads((folder / "ids.json").read_text())
    with recorder.step(0, prompts), torch.no_grad():
        for start in range(0, len(pairs), 2):
            batch = [torch.tensor(p + response) for p, response in pairs[start : start + 2]]
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, batch)), True)
            positions = (mask.cumsum(1) - 1) * mask
            trainer(ids, attention_mask=mask, position_ids=positions, use_cache=False)


ADAPTER = os.environ.get("ADAPTER", "")
if __name__ == "__main__":
    part, folder, model, prompts, *fault = sys.argv[1:]
    given = json.loads(Path(prompts).read_text())
    if part == "rollout":
        rollout(Path(folder), model, given)
    else:
        train(Path(folder), model, given, *fault or [""])
