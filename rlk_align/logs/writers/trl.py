"""Log-probs of TRL's GRPOTrainer (1.16.0 was used).

TRL's callbacks do not receive log-probs, so the trainer's method that makes a batch is wrapped. A
step may have several batches, so a callback writes them when the step has ended.
"""

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.writers.batch import Record, batch_records
from rlk_align.logs.writers.step_file import write_step


def log_steps(trainer: Any, folder: str | Path, *, rollout_dtype: str, **sampling: Any) -> None:
    """Makes a GRPOTrainer write the samples of each training step into `folder`.

    `rollout_dtype` is the dtype in which the rollout's engine computes, e.g. `bfloat16`. `sampling`
    has fields of `Sampling` that the trainer's arguments lack, or that a `rollout_func` changes.
    Training raises DumpError at its first batch if TRL does not compute both sides' log-probs.
    """
    from transformers import TrainerCallback

    settings = _sampling(trainer, sampling)
    make_batch = trainer._generate_and_score_completions
    waiting: dict[int, list[Record]] = {}

    @wraps(make_batch)
    def made(inputs: Any) -> Any:
        batch = make_batch(inputs)
        if trainer.model.training:
            step = trainer.state.global_step
            waiting.setdefault(step, []).extend(
                _records(trainer, batch, step, settings, rollout_dtype)
            )
        return batch

    class StepEnd(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Writes the samples since the last step ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Writes the samples of the step."""
            ranks = {
                "rank": trainer.accelerator.process_index,
                "ranks": trainer.accelerator.num_processes,
            }
            while waiting:
                write_step(folder, *waiting.popitem(), **ranks)

    trainer._generate_and_score_completions = made
    trainer.add_callback(StepEnd())


def _records(
    trainer: Any, batch: Mapping[str, Any], step: int, sampling: Sampling, rollout_dtype: str
) -> list[Record]:
    if "sampling_per_token_logps" not in batch:
        raise DumpError(
            "TRL has no log-probs of the rollout: transformers' own generation gives none",
            "use_vllm=True, or a rollout_func that returns `logprobs`",
        )
    if "old_per_token_logps" not in batch:
        raise DumpError(
            "TRL did not compute the trainer's log-probs (old_per_token_logps)",
            "with use_vllm=True set vllm_importance_sampling_correction=True; else set "
            "steps_per_generation so that gradient_accumulation_steps is not a multiple of "
            "steps_per_generation * num_iterations",
        )
    args, completion_mask = trainer.args, np.array(batch["completion_mask"].tolist())
    mask = completion_mask
    if "tool_mask" in batch:
        # TRL pads the mask of tools with 1.
        mask = completion_mask * np.array(batch["tool_mask"].tolist())
    prompts = np.array(batch["prompt_mask"].tolist())
    ids = [np.array(batch[name].tolist()) for name in ("prompt_ids", "completion_ids")]
    return batch_records(
        token_ids=np.concatenate(ids, axis=1),
        attention_mask=np.concatenate([prompts, completion_mask], axis=1),
        mask=mask,
        rollout_logprobs=batch["sampling_per_token_logps"],
        train_logprobs=batch["old_per_token_logps"],
        prompt_lengths=prompts.sum(1),
        # The engine of a rollout_func does not report the version of its weights.
        rollout_version=trainer._last_loaded_step if trainer.use_vllm else None,
        train_version=step,
        sampling=sampling,
        rollout_dtype=rollout_dtype,
        train_dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else _dtype(trainer.model),
        mask_rewritten=bool(args.mask_truncated_completions),
    )


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _sampling(trainer: Any, given: Mapping[str, Any]) -> Sampling:
    args = trainer.args
    settings = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    if trainer.use_vllm and args.vllm_mode == "colocate":
        settings["logprobs_mode"] = "processed_logprobs"
    also = args.generation_kwargs or {}
    settings |= {name: also[name] for name in Sampling.model_fields if name in also}
    return Sampling(**settings | dict(given))
