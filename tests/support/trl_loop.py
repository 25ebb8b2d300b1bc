"""Two steps of TRL's GRPOTrainer on the embedded model, in a process of its own.

    python tests/support/trl_loop.py rollout|both|act|stale OUT

It writes OUT.0.json, and under torchrun a file for each rank.

`rollout` puts the kernels into vLLM alone, `both` into both sides by `with_kernels`. `act` and
`stale` are `both` with a fault: the trainer computes its activations by itself; a weight does not
reach vLLM after the first step. Stock vLLM for the CPU packs its weights away and cannot take new
ones, so no loop runs without kernels there.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # What vLLM compiles for its sampler takes longer than the loop.
    "TORCHDYNAMO_DISABLE": "1",
}

import torch
import vllm
from datasets import Dataset
from rlk_kernels.integrations import hf
from rlk_kernels.integrations import vllm as vllm_kernels
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.trl import with_kernels
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

PROMPTS = ["Once upon a time", "The little dog", "One day a girl", "In the garden"]
STALE = "model.layers.1.mlp.down_proj.weight"


def settings(folder: Path, **changed: Any) -> Any:
    """The arguments of the loop; bf16 over fp32 weights, as TRL's defaults are."""
    values = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4,
        "max_steps": 2, "max_completion_length": 8, "learning_rate": 1e-4, "bf16": True,
        "use_vllm": True, "vllm_max_model_length": 256, "use_cpu": True, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "temperature": 0.8,
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    return GRPOConfig(**values | changed)


def lose_a_weight(trainer: Any) -> None:
    """A weight of later synchronisations does not reach vLLM."""
    (model,) = trainer.vllm_generation.llm.apply_model(lambda model: model)
    load, loads = model.load_weights, 0

    def load_weights(weights: Any) -> Any:
        nonlocal loads
        pairs = list(weights)
        loads += any(name == STALE for name, _ in pairs)
        return load([x for x in pairs if x[0] != STALE or loads < 2])

    model.load_weights = load_weights


def run(mode: str, folder: Path) -> dict[str, Any]:
    """The metrics of each step, the weights that changed, and the error that ended the loop."""
    # Otherwise vLLM compiles the model.
    vllm_generation.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    kind = GRPOTrainer if mode == "rollout" else with_kernels(GRPOTrainer)
    if mode == "rollout":
        vllm_kernels.register()
    if mode == "act":
        hf.use_kernels = functools.partial(hf.use_kernels, excluded=["act"])
    trainer = kind(
        model="fixtures/model", args=settings(folder),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 4]),
    )  # fmt: skip
    if mode == "stale":
        lose_a_weight(trainer)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    error = None
    try:
        trainer.train()
    except NotSupported as raised:
        error = str(raised)
    now = trainer.model.named_parameters()
    return {
        "error": error,
        "steps": trainer.state.log_history,
        "largest": trainer._metrics["train"]["sampling/sampling_logp_difference/max"],
        "changed": sum(not torch.equal(before[name], value) for name, value in now),
        "parameters": len(before),
    }


if __name__ == "__main__":
    out = Path(sys.argv[2]).with_suffix(f".{os.environ.get('RANK', 0)}.json")
    out.write_text(json.dumps(run(sys.argv[1], out.parent / "trl")), encoding="utf-8")
