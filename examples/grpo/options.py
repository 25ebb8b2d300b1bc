"""The options of train.py, and which of them exclude each other."""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import problems
import torch
from record import STATE
from sampling import limits, processed

from rlk_align.data import data_path
from rlk_align.engines.vllm.limits import LORA_RANKS

CLIPS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}
"""Loss -> the clip of its paper."""


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is an integer of at least `least`."""

    def count(word: str) -> int:
        if (number := int(word)) < least:
            raise argparse.ArgumentTypeError(f"{number} is below {least}")
        return number

    return count


def arguments(words: list[str] | None = None, about: str | None = None) -> argparse.Namespace:
    """The options in `words`, or on the command line. Ends the process with exit code 2 if they
    exclude each other. about: the first text of --help."""
    a = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--run", type=Path, required=True, help="folder of the run")
    a.add_argument("--model", type=Path, default=data_path("model"))
    a.add_argument("--kernels", choices=["rlk", "off"], default="rlk")
    a.add_argument("--steps", type=at_least(0), default=3, help="of the run, earlier ones included")
    a.add_argument("--problems", type=at_least(1), default=8, help="of a step")
    a.add_argument(
        "--families", nargs="+", choices=problems.FAMILIES, default=problems.LEARNABLE,
        metavar="FAMILY", help=f"of problems: {', '.join(problems.FAMILIES)}; add and multiply "
        "have the longest answers",
    )  # fmt: skip
    a.add_argument("--group", type=at_least(2), default=8, help="answers to a problem")
    a.add_argument(
        "--turns",
        type=at_least(1),
        default=2,
        help="tries for an answer; a checker replies between them",
    )
    a.add_argument("--max-tokens", type=at_least(1), default=48, help="token limit of a try")
    a.add_argument(
        "--temperature", type=float, default=1.0,
        help="of the rollout and of the trainer's log-probs. With the kernels, their sampler draws "
        "at another temperature than 1, or within a limit",
    )  # fmt: skip
    a.add_argument("--top-k", type=at_least(0), default=0, help="limit; 0 for none")
    a.add_argument("--top-p", type=float, default=1.0, help="limit; 1 for none")
    a.add_argument("--min-p", type=float, default=0.0, help="limit; 0 for none")
    a.add_argument(
        "--rollout-batch", type=at_least(1), help="answers sampled at a time; changes no bit"
    )
    a.add_argument("--pack-tokens", type=at_least(1), default=4096, help="token limit of a forward")
    a.add_argument("--updates", type=at_least(1), default=1, help="on each rollout")
    a.add_argument(
        "--lora", type=at_least(1), metavar="RANK",
        help="train an adapter of this rank on every projection, beside frozen weights",
    )  # fmt: skip
    a.add_argument("--lr", type=float, default=1e-5)
    a.add_argument(
        "--loss", choices=CLIPS, default="dapo",
        help="DAPO clips each token's ratio, GSPO the ratio of each sequence's mean",
    )  # fmt: skip
    a.add_argument(
        "--clip", type=float, nargs=2, metavar=("LOW", "HIGH"),
        help="default: the paper's, " + ", ".join(f"{k} {v}" for k, v in CLIPS.items()),
    )  # fmt: skip
    a.add_argument(
        "--held-out", type=at_least(0), default=32, help="problems that measure the reward"
    )
    a.add_argument("--eval-every", type=at_least(0), default=0, help="steps; 0 for never")
    a.add_argument("--save-every", type=at_least(0), default=1, help="steps; 0 for never")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a.add_argument("--cache-gib", type=float, default=8, help="vLLM's, on a GPU")
    a.add_argument(
        "--sleep", action=argparse.BooleanOptionalAction, default=True,
        help="on a GPU, vLLM gives its memory to the trainer during an update",
    )  # fmt: skip
    a.add_argument(
        "--master-dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of the weights that AdamW updates, and of its moments",
    )  # fmt: skip
    a.add_argument(
        "--graphs", action="store_true",
        help="run the trainer's forward and backward as CUDA graphs; changes no bit",
    )  # fmt: skip
    a.add_argument(
        "--kv-cache", choices=["auto", "fp8"], default="auto",
        help="dtype of vLLM's cache of keys and values; fp8 without the kernels alone",
    )  # fmt: skip
    a.add_argument("--resume", action="store_true")
    options = a.parse_args(words)
    options.clip = tuple(options.clip or CLIPS[options.loss])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for wrong, why in _conflicts(options, ranks):
        if wrong:
            a.error(why)
    return options


def _conflicts(o: argparse.Namespace, ranks: int) -> Iterator[tuple[bool, str]]:
    """Yields (whether options exclude each other, the error message)."""
    gpu, kernels = o.device.startswith("cuda"), o.kernels == "rlk"
    yield (
        not 0 < o.temperature < float("inf"),
        f"--temperature {o.temperature}: a number above 0 is needed",
    )
    yield not 0 < o.top_p <= 1, f"--top-p {o.top_p}: it must be above 0, and at most 1"
    yield not 0 <= o.min_p <= 1, f"--min-p {o.min_p}: it must be from 0 to 1"
    yield (
        bool(limits(o)) and not kernels,
        "--kernels off: without the kernels the trainer has no log-probs within limits; omit "
        + ", ".join(f"--{name.replace('_', '-')}" for name in limits(o)),
    )
    yield (
        o.graphs and processed(o),
        "--graphs: no run with a temperature or a limit was captured; omit --graphs",
    )
    yield (
        kernels and o.kv_cache != "auto",
        f"--kv-cache {o.kv_cache}: the kernels store keys and values in the model's dtype",
    )
    yield (
        o.graphs and not (gpu and ranks == 1 and kernels),
        "--graphs: capturing needs the kernels, and one GPU in one process; omit it",
    )
    yield (
        o.graphs and o.lora is not None,
        "--graphs: no run with --lora was captured; omit one of them",
    )
    yield (
        o.lora is not None and o.lora > LORA_RANKS[-1],
        f"--lora {o.lora}: vLLM supports ranks up to {LORA_RANKS[-1]}",
    )
    yield (
        o.graphs and o.loss != "dapo",
        f"--graphs: the loss {o.loss} waits for the GPU, which a graph cannot do",
    )
    low, high = o.clip
    yield (
        not (0 <= low <= 1 and high >= 0),
        f"--clip {low} {high}: neither may be negative, and LOW is at most 1",
    )
    yield (
        o.problems < ranks,
        f"--problems {o.problems}: each of the {ranks} ranks needs a problem",
    )
    yield (
        o.eval_every > 0 and o.held_out == 0,
        f"--eval-every {o.eval_every}: --held-out 0 leaves no problems to measure the reward by",
    )
    yield (
        not (o.model / "config.json").is_file(),
        f"--model {o.model}: no config.json is there; name a model's folder",
    )
    yield (
        not o.resume and any((*o.run.glob(STATE), *o.run.glob(f"rank-*/{STATE}"))),
        f"--run {o.run}: this folder has a saved run; continue it with --resume, or name another "
        "folder",
    )
    yield gpu and not torch.cuda.is_available(), f"--device {o.device}: torch finds no GPU"
