"""What a step leaves on disk: its sequences in the form `rlk-align/logprobs/1`, its metrics as a
line of JSON, and the state to go on from."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from batch import Answer, Pack, Sample
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from trainer import Scored

from rlk_align.files import whole_file

STATE, METRICS, HELD_OUT = "state.safetensors", "metrics.jsonl", "held_out.jsonl"
LOG_PROBS = "log-probs"
"""The folder of the sequences."""


def mismatch(row: Sequence[Pack], scored: Scored) -> dict[str, float | int]:
    """How the trainer's log-probs differ from the rollout's, over all sampled tokens: how many have
    other bits, k3 and the largest difference, in float64. What is not a number differs."""
    at = torch.cat([pack.sampled for pack in row]).nonzero()[:, 0]
    rollout = torch.cat([pack.rollout_logprobs for pack in row])[at]
    train = torch.cat([logprobs for logprobs, _ in scored])[at]
    other = (rollout.view(torch.int32) != train.view(torch.int32)) | ~rollout.isfinite()
    d = train.double() - rollout.double()
    k3 = (torch.expm1(d) - d).mean()
    largest = [x.amax() if len(d) else k3 for x in (d.abs(), d.exp())]
    # One transfer: the trainer's device is waited for at each.
    other_bits, *found = torch.stack([other.sum().double(), k3, *largest]).tolist()
    names = ("k3", "max", "ratio_max")
    return {"tokens": len(d), "other_bits": int(other_bits), **dict(zip(names, found, strict=True))}


def records(
    answers: Sequence[Answer], samples: Sequence[Sample], row: Sequence[Pack], scored: Scored,
    version: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A line of the neutral file for each sequence; lists are about all of its tokens."""
    whole = [[x[: pack.tokens] for x in both] for pack, both in zip(row, scored, strict=True)]
    train, entropy = (torch.cat(some).tolist() for some in zip(*whole, strict=True))
    lines, start = [], 0
    for answer, sample in zip(answers, samples, strict=True):
        end = start + len(sample.ids)
        there = [value is not None for value in sample.rollout_logprobs]
        lines.append(
            {
                "group": answer.group,
                "token_ids": sample.ids,
                "prompt_length": sample.prompt_length,
                "mask": sample.mask,
                "rollout_logprobs": sample.rollout_logprobs,
                "train_logprobs": _where(there, train[start:end]),
                "entropy": _where(there, entropy[start:end]),
                "reward": answer.reward,
                "rollout_version": version,
                "train_version": version,
                "sampling": {"temperature": 1.0, "logprobs_mode": "raw_logprobs"},
                "rollout_dtype": "bfloat16",
                "train_dtype": "bfloat16",
            }
        )
        start = end
    return lines


def _where(there: list[bool], values: list[float]) -> list[float | None]:
    return [x if on else None for on, x in zip(there, values, strict=True)]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises OSError that names `path` where what writes it fails."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be written: {error}; free some space, and go on with --resume from "
            "what was saved before"
        ) from error


def append(path: Path, line: dict[str, Any]) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def forget_after(folder: Path, log_probs: Path, step: int) -> None:
    """Leaves out what was written of steps that are done again."""
    for path in (folder / METRICS, folder / HELD_OUT):
        if path.exists():
            # A last line without an end was cut while it was written: its step was not saved.
            lines = [x for x in path.read_text("utf-8").splitlines(True) if x.endswith("\n")]
            before = [line for line in lines if json.loads(line)["step"] < step]
            with writing(path), whole_file(path) as partial:
                partial.write_text("".join(before), encoding="utf-8")
    for path in log_probs.glob("step_*.jsonl"):
        if int(path.name.split("_")[1]) >= step:
            path.unlink(missing_ok=True)


def save(
    folder: Path, step: int, settings: dict[str, Any], masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer, wait: Callable[[], object],
) -> None:  # fmt: skip
    """The state after `step` steps, whole or not at all. `wait` comes between the writing of a new
    state and the end of the one before."""
    tensors = {f"master {name}": value for name, value in masters.items()}
    for name, value in masters.items():
        for part, moment in optimizer.state[value].items():
            tensors[f"{part} {name}"] = moment
    cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with writing(folder / STATE), whole_file(folder / STATE) as partial:
        # Under one key: the order of several in the file is chance.
        save_file(cpu, partial, {"about": json.dumps({"step": step, "settings": settings})})
        wait()


def load(
    folder: Path, settings: dict[str, Any], masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> int:  # fmt: skip
    """Puts the saved state into `masters` and the optimiser; returns how many steps are done.
    Raises ValueError where none was saved, the file is damaged, or the run was made with other
    settings."""
    path = folder / STATE
    if not path.exists():
        raise ValueError(f"{path} does not exist: nothing was saved to resume; leave --resume out")
    try:
        return _load(path, settings, masters, optimizer)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged: {error}; put a copy in its place, or begin another run"
        ) from error


def _load(
    path: Path, settings: dict[str, Any], masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> int:  # fmt: skip
    fused = optimizer.defaults["fused"]
    with safe_open(path, "pt") as file:
        about, names = json.loads(file.metadata()["about"]), list(file.keys())
        before = about["settings"]
        other = sorted(name for name in settings if before.get(name) != settings[name])
        if other:
            said = ", ".join(f"{name} {before.get(name)} became {settings[name]}" for name in other)
            raise ValueError(f"{path} is of a run with other settings: {said}")
        for name, value in masters.items():
            value.copy_(file.get_tensor(f"master {name}"))
            parts = [key.split(" ")[0] for key in names if key.endswith(f" {name}")]
            moments = {part: file.get_tensor(f"{part} {name}") for part in parts}
            moments.pop("master")
            optimizer.state[value] = {
                # AdamW counts steps on the CPU, and fused where the moments are.
                part: moment if part == "step" and not fused else moment.to(value.device)
                for part, moment in moments.items()
            }
    return about["step"]
