"""Times the steps of TRL's GRPOTrainer on the problems of examples/grpo, with vLLM in its process.

    python scripts/loop_trl.py --model M --steps 25 --out trl.json [--dtype float32|bfloat16]
                               [--kernels rlk|off] [--sleep]

The model, problems, group, token limit, temperature, clip and token mean are those of train.py with
--turns 1; answers that are cut at the limit count as well. float32 means fp32 weights under
autocast to bf16, like train.py's master weights. The script needs trl 1.16, datasets and vLLM.
Seconds are medians past the first five steps; each stage ends with a synchronisation of the device,
as in train.py.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "grpo"))
import problems

WARM = 5
"""The first steps, which are not counted."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--model", type=Path, required=True)
    a.add_argument("--out", type=Path, default=Path("trl.json"))
    a.add_argument("--steps", type=int, default=25)
    a.add_argument("--problems", type=int, default=8)
    a.add_argument("--group", type=int, default=8)
    a.add_argument("--max-tokens", type=int, default=48)
    a.add_argument("--micro", type=int, help="answers of a forward; default: all of them")
    a.add_argument("--lr", type=float, default=1e-5)
    a.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    a.add_argument("--kernels", choices=["rlk", "off"], default="off")
    a.add_argument(
        "--correction", action=argparse.BooleanOptionalAction, default=True,
        help="against the rollout's log-probs, as TRL does by default",
    )  # fmt: skip
    a.add_argument("--memory", type=float, default=0.3, help="share of the GPU for vLLM")
    a.add_argument("--sleep", action="store_true", help="vLLM sleeps while the trainer works")
    return a.parse_args(words)


class Clock:
    """Seconds of each stage of each step; an outer stage includes the stages within it."""

    def __init__(self, gpu: bool) -> None:
        self.gpu, self.seconds = gpu, defaultdict(list)

    def now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, holder: Any, method: str, stage: str) -> None:
        """Times the calls of a method of this object."""
        inner: Callable = getattr(holder, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[stage].append(self.now() - start)

        setattr(holder, method, call)


def stop_ids(tokenizer: Any) -> list[int]:
    """The tokens that contain a line break or end the text: as in rollout.py, a line break ends an
    answer."""
    ends = [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]
    return sorted({*ends, tokenizer.eos_token_id} - {None})


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [
        problems.reward(BY_PROMPT[p], [text]) for p, text in zip(prompts, completions, strict=True)
    ]


BY_PROMPT: dict[str, problems.Problem] = {}
"""Prompt -> its problem, for every prompt of the training."""


def main() -> int:
    o = arguments()
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    kind = GRPOTrainer
    if o.kernels == "rlk":
        from rlk_kernels.integrations.trl import with_kernels

        kind = with_kernels(GRPOTrainer)
    gpu = torch.cuda.is_available()
    asked = [p for s in range(o.steps) for p in problems.training(0, s, o.problems, 0)]
    BY_PROMPT.update({problem.prompt: problem for problem in asked})
    tokenizer = AutoTokenizer.from_pretrained(o.model)
    batch = o.problems * o.group
    # For TRL an answer that a line break ends is cut, so that cut answers must not be masked.
    micro = o.micro or batch
    config = GRPOConfig(
        output_dir=str(o.out.with_suffix("")), per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro, num_generations=o.group, max_steps=o.steps,
        max_completion_length=o.max_tokens, learning_rate=o.lr, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, beta=0.0, loss_type="dapo", epsilon=0.2,
        epsilon_high=0.28, mask_truncated_completions=False, temperature=1.0, num_iterations=1,
        bf16=True, gradient_checkpointing=False, use_vllm=True, vllm_mode="colocate",
        vllm_gpu_memory_utilization=o.memory, vllm_max_model_length=1024, use_cpu=not gpu,
        vllm_enable_sleep_mode=o.sleep,
        vllm_importance_sampling_correction=o.correction, shuffle_dataset=False, logging_steps=1,
        generation_kwargs={"stop_token_ids": stop_ids(tokenizer)}, save_strategy="no",
        report_to="none", disable_tqdm=True, model_init_kwargs={"dtype": o.dtype},
    )  # fmt: skip
    start = time.perf_counter()
    trainer = kind(
        model=str(o.model), reward_funcs=reward, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in asked]),
    )  # fmt: skip
    clock = Clock(gpu)
    clock.timed(trainer.vllm_generation, "generate", "rollout")
    clock.timed(trainer.vllm_generation, "sync_weights", "sync")
    clock.timed(trainer, "_generate_and_score_completions", "rollout, rewards and old log-probs")
    clock.timed(trainer, "training_step", "all but the optimiser")
    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(clock.now())
            print(f"step {len(ends)}: {time.perf_counter() - start:.1f} s", flush=True)

    trainer.add_callback(Ends())
    trainer.train()
    steps = [b - a for a, b in pairwise(ends)]
    logs = [line for line in trainer.state.log_history if "reward" in line]
    record = {
        "trl": __import__("trl").__version__,
        "options": {name: str(value) for name, value in vars(o).items()},
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "step_s": statistics.median(steps[WARM - 1 :] or steps),
        "stages_s": {k: statistics.median(v[WARM:] or v) for k, v in clock.seconds.items()},
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "reward": [line["reward"] for line in logs],
        "length": [line["completions/mean_length"] for line in logs],
        "drift_mean": [line.get("sampling/sampling_logp_difference/mean") for line in logs],
        "drift_max": [line.get("sampling/sampling_logp_difference/max") for line in logs],
    }
    o.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shown = {key: record[key] for key in ("step_s", "stages_s", "peak_memory_bytes")}
    print(json.dumps(shown | {"steps_an_hour": 3600 / record["step_s"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
