"""The files of a step: its sequences in the form `rlk-align/logprobs/1`, its metrics as a line of
JSON, and the state from which the run can continue."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""The folder with the sequences."""


def mismatch(row: Sequence[Pack], scored: Scored) -> dict[str, float | int]:
    """The difference between the trainer's and the rollout's log-probs over all sampled tokens: the
    number of tokens with other bits, that of tokens which the trainer's limits drop, k3, the
    largest difference and the largest ratio, in float64. NaN counts as different."""
    at = torch.cat([pack.sampled for pack in row]).nonzero()[:, 0]
    rollout = torch.cat([pack.rollout_logprobs for pack in row])[at]
    train = torch.cat([logprobs for logprobs, _ in scored])[at]
    other = (rollout.view(torch.int32) != train.view(torch.int32)) | ~rollout.isfinite()
    d = train.double() - rollout.double()
    k3 = (torch.expm1(d) - d).mean()
    largest = [x.amax() if len(d) else k3 for x in (d.abs(), d.exp())]
    counts = [x.sum().double() for x in (other, train.isneginf())]
    # A single transfer, because each one waits for the trainer's device.
    other_bits, dropped, *rest = torch.stack([*counts, k3, *largest]).tolist()
    counted = {"tokens": len(d), "other_bits": int(other_bits), "dropped": int(dropped)}
    return counted | dict(zip(("k3", "max", "ratio_max"), rest, strict=True))


def records(
    answers: Sequence[Answer], samples: Sequence[Sample], row: Sequence[Pack], scored: Scored,
    version: int, sampled_by: Callable[[Answer], Mapping[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """A record of the neutral file for each sequence; the lists cover all of its tokens.
    sampled_by: what it says of how an answer was sampled."""
    train = _unpadded([logprobs for logprobs, _ in scored], row)
    entropies = [entropies for _, entropies in scored if entropies is not None]
    entropy = _unpadded(entropies, row) if entropies else None
    lines, start = [], 0
    for answer, sample in zip(answers, samples, strict=True):
        end = start + len(sample.ids)
        sampled = [value is not None for value in sample.rollout_logprobs]
        lines.append(
            {
                "group": answer.group,
                "token_ids": sample.ids,
                "prompt_length": sample.prompt_length,
                "mask": sample.mask,
                "rollout_logprobs": sample.rollout_logprobs,
                "train_logprobs": _where(sampled, train[start:end]),
                "entropy": None if entropy is None else _where(sampled, entropy[start:end]),
                "reward": answer.reward,
                "rollout_version": version,
                "train_version": version,
                **sampled_by(answer),
                "rollout_dtype": "bfloat16",
                "train_dtype": "bfloat16",
            }
        )
        start = end
    return lines


def _unpadded(values: Sequence[Tensor], row: Sequence[Pack]) -> list[float]:
    """The values of all packs, without those of their padding."""
    parts = (x[: pack.tokens] for x, pack in zip(values, row, strict=True))
    return torch.cat([*parts]).tolist()


def _where(sampled: list[bool], values: list[float]) -> list[float | None]:
    return [x if on else None for on, x in zip(sampled, values, strict=True)]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context whose write errors become an OSError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be written: {error}; free some space, and continue from the last "
            "saved state with --resume"
        ) from error


def append(path: Path, line: dict[str, Any]) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def forget_after(folder: Path, log_probs: Path, step: int) -> None:
    """Removes the lines and files of `step` and later steps, which will be repeated."""
    for path in (folder / METRICS, folder / HELD_OUT):
        if path.exists():
            # A last line without a line break is incomplete, and its step was not saved.
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
    """Saves the state after `step` steps, completely or not at all. `wait` is called when the new
    state is written and before it replaces the previous one."""
    tensors = {f"master {name}": value for name, value in masters.items()}
    for name, value in masters.items():
        for part, moment in optimizer.state[value].items():
            tensors[f"{part} {name}"] = moment
    cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with writing(folder / STATE), whole_file(folder / STATE) as partial:
        # One key, because safetensors writes several keys in random order.
        save_file(cpu, partial, {"about": json.dumps({"step": step, "settings": settings})})
        wait()


def load(
    folder: Path, settings: dict[str, Any], masters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> int:  # fmt: skip
    """Loads the saved state into `masters` and the optimiser; returns the number of steps done.
    Raises ValueError if no state was saved, the file is damaged, or the settings have changed."""
    path = folder / STATE
    if not path.exists():
        raise ValueError(f"{path} does not exist: there is no state to resume from; omit --resume")
    try:
        return _load(path, settings, masters, optimizer)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged: {error}; restore a copy of it, or begin another run"
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
            changes = [f"{name} {before.get(name)} became {settings[name]}" for name in other]
            raise ValueError(f"{path} has a run with other settings: {', '.join(changes)}")
        for name, value in masters.items():
            value.copy_(file.get_tensor(f"master {name}"))
            parts = [key.split(" ")[0] for key in names if key.endswith(f" {name}")]
            moments = {part: file.get_tensor(f"{part} {name}") for part in parts}
            moments.pop("master")
            optimizer.state[value] = {
                # AdamW keeps the step on the CPU, and fused AdamW on the device of the moments.
                part: moment if part == "step" and not fused else moment.to(value.device)
                for part, moment in moments.items()
            }
    return about["step"]
