"""Runs the loop of examples/grpo with an adapter on real engines, and writes what it says. That
folder is to be on the path.

python grpo_lora.py FOLDER FOUND.json
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from checks import LoopFault
from options import arguments
from train import Loop


def stale(loop: Loop) -> str:
    """The fault of a step whose adapter vLLM does not get."""
    load = loop.rollout.load_adapter
    loop.rollout.load_adapter = lambda folder: None  # type: ignore[method-assign]
    try:
        loop.train_step()
    except LoopFault as fault:
        return str(fault)
    finally:
        loop.rollout.load_adapter = load  # type: ignore[method-assign]
    return ""


def greedy(loop: Loop) -> list[float]:
    """The log-probs of greedy answers."""
    from problems import held_out

    answers = loop.rollout.answers(list(held_out(4, ("count", "sort"))), "", greedy=True)
    return [x for answer in answers for span in answer.spans for x in span.logprobs]


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    words = "--problems 2 --group 4 --seed 10 --max-tokens 20 --lora 8 --lr 1e-2 --device cpu"
    options = arguments(["--run", str(folder), *words.split()])
    torch.set_num_threads(1)
    loop = Loop(options)
    loop.folder.mkdir(parents=True)
    loop.sync()
    before = [loop.digests]
    steps = []
    for _ in range(2):
        steps.append(loop.train_step())
        before.append(loop.digests)
    changed = [sorted(n for n in old if old[n] != new[n]) for old, new in pairwise(before)]
    found: dict[str, Any] = {"steps": steps, "changed": changed, "stale": stale(loop)}
    with_it = greedy(loop)
    loop.rollout.adapter = None
    without = greedy(loop)
    found["with and without"] = sum(a != b for a, b in zip(with_it, without, strict=False))
    target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
