"""verl's whole loop: Ray, agent loop, vLLM's server, an FSDP2 worker.

    python tests/support/verl_loop.py FOLDER [--device cuda] [--model M] [--steps 2] [SETTING ...]

On a CPU it runs in the environment that scripts/verl_env.sh makes, on a GPU in this one, where vLLM
is compiled, replays CUDA graphs and sleeps while the trainer works.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlk_align.data import data_path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("RLK_VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))
MAIN = "verl.trainer.main_ppo"
SWITCH = "actor_rollout_ref.model.external_lib=rlk_kernels.integrations.verl"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(len(set(solution_str)))
"""
PROMPTS = "Once upon a time", "The little dog", "One day a girl", "In the garden"


def settings(folder: Path, steps: int, v1: bool = True, device: str = "cpu") -> list[str]:
    """Of a run of main_ppo with what `prepare` has written into a folder. `v1`: by verl's V1
    trainer, which is its default, or by the one before, which starts fewer processes."""
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    on_cpu = [
        f"{rollout}.enforce_eager=True", f"{rollout}.free_cache_engine=False",
        f"++{rollout}.enable_sleep_mode=False",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=16",
    ]  # fmt: skip
    on_gpu = [f"{rollout}.enforce_eager=False", f"{rollout}.gpu_memory_utilization=0.3"]
    return [
        f"trainer.use_v1={v1}", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "algorithm.adv_estimator=grpo",
        *(f"data.{name}_files={folder}/data.parquet" for name in ("train", "val")),
        "data.train_batch_size=2", "data.max_prompt_length=16", "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        f"{model}.path={folder}/model", f"{model}.enable_gradient_checkpointing=False",
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2", f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.ppo_micro_batch_size_per_gpu=4", f"{actor}.optim.lr=1e-4",
        f"{actor}.use_torch_compile=False", f"{actor}.fsdp_config.use_torch_compile=False",
        f"{rollout}.name=vllm", f"{rollout}.n=2", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.max_model_len=64", f"{rollout}.max_num_batched_tokens=256",
        f"{rollout}.max_num_seqs=8", f"{rollout}.agent.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score", "reward.num_workers=1",
        f"trainer.device={device}", "trainer.n_gpus_per_node=1", "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", "trainer.test_freq=-1",
        "trainer.val_before_train=False", "trainer.logger=[console]",
        "trainer.balance_batch=False", "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1", "+ray_kwargs.ray_init.include_dashboard=False",
        *(on_cpu if device == "cpu" else on_gpu),
    ]  # fmt: skip


def prepare(folder: Path, checkpoint: Path | None = None) -> None:
    """Writes prompts, a reward and a model, by default the embedded one, with what verl asks of a
    tokenizer, and with more rows in its embedding than the tokenizer has tokens, as published
    models have."""
    import pandas as pd
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    shutil.copytree(checkpoint or data_path("model"), model := folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    # As unlikely as padding.
    more = embedding[tokenizer.pad_token_id].expand(16, -1)
    weights["model.embed_tokens.weight"] = torch.cat([embedding, more])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = len(embedding) + 16
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = [
        {
            "data_source": "story", "prompt": [{"role": "user", "content": text}], "ability": "",
            "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i},
        }
        for i, text in enumerate(PROMPTS)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


@dataclass(frozen=True)
class Loop:
    code: int
    said: str
    """stdout and stderr."""

    def metric(self, name: str) -> list[float]:
        """Of each step, as verl's console logger printed it."""
        pattern = rf"[ -]{re.escape(name)}:(?:np\.float64\()?([^\s)]+)"
        return [float(value) for value in re.findall(pattern, self.said)]


def run(
    folder: Path, *overrides: str, steps: int = 2, v1: bool = False, module: str = MAIN,
    device: str = "cpu", **variables: str,
) -> Loop:  # fmt: skip
    """Runs verl with `settings` and more, and further variables in its environment. Ray's
    processes end with their driver."""
    given = settings(folder, steps, v1, device)
    return python(folder, "-m", module, *given, *overrides, device=device, **variables)


COMMON = {
    "PYTHONWARNINGS": "ignore", "HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
CPU = {
    "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_ENGINE_DEVICE": "cuda", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "0",
}  # fmt: skip


def python(folder: Path, *arguments: str, device: str = "cpu", **variables: str) -> Loop:
    """Runs Python in verl's environment; what it says is in FOLDER/verl-N.log as it comes."""
    paths = [str(folder), str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]
    paths += filter(None, [os.environ.get("PYTHONPATH")]) if device != "cpu" else []
    given = {**COMMON, **(CPU if device == "cpu" else {}), "PYTHONPATH": os.pathsep.join(paths)}
    log = folder / f"verl-{len(list(folder.glob('verl-*.log')))}.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [PYTHON if device == "cpu" else sys.executable, *arguments], cwd=folder,
            env={**os.environ, **given, **variables}, stdout=file, stderr=subprocess.STDOUT,
            timeout=900,
        )  # fmt: skip
    return Loop(done.returncode, log.read_text(encoding="utf-8"))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("folder", type=Path)
    asked.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    asked.add_argument("--model", type=Path)
    asked.add_argument("--steps", type=int, default=2)
    given, overrides = asked.parse_known_args()
    folder = given.folder.resolve()
    if not folder.exists():
        folder.mkdir(parents=True)
        prepare(folder, given.model)
    loop = run(folder, *overrides, steps=given.steps, v1=True, device=given.device)
    print(loop.said)
    return loop.code


if __name__ == "__main__":
    sys.exit(main())
