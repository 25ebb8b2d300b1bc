"""Runs the loop of examples/grpo at a temperature and with a limit, on real engines, and writes
what it says. That folder is to be on the path.

python grpo_limits.py FOLDER FOUND.json
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from batch import Pack, packs
from options import arguments
from problems import training
from rlk_kernels import kept_tokens
from torch.nn.functional import pad
from train import Loop

WORDS = (
    *("--problems", "3", "--group", "4", "--seed", "10", "--max-tokens", "20"),
    *("--temperature", "0.7", "--top-p", "0.9", "--device", "cpu"),
)


def sequences(loop: Loop, step: int) -> str:
    """A digest of the sequences and log-probs of a step."""
    (path,) = loop.options.run.glob(f"log-probs/step_{step:06d}_*")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def trainer_with(loop: Loop, **changed: float) -> Iterator[None]:
    """Other options for the trainer's scores alone."""
    before = {name: getattr(loop.options, name) for name in changed}
    score = loop.trainer.score

    def scored(pack: Pack) -> Any:
        vars(loop.options).update(changed)
        try:
            return score(pack)
        finally:
            vars(loop.options).update(before)

    loop.trainer.passes._score = scored
    try:
        yield
    finally:
        loop.trainer.passes._score = score


def exact(loop: Loop, pack: Pack, limits: dict[str, float]) -> torch.Tensor:
    """The log-probs of a pack from its logits, by torch, over the tokens that `limits` keep."""
    logits = loop.trainer.model(pack.ids, position_ids=pack.positions, use_cache=False).logits[0]
    rows = logits[:-1]
    kept = kept_tokens(rows.detach(), temperature=0.7, **limits)
    logs = torch.log_softmax((rows.float() / 0.7).masked_fill(~kept, -torch.inf), -1)
    return pad(logs.gather(-1, pack.ids[0, 1:, None])[:, 0], (1, 0))


def gradient(loop: Loop, pack: Pack, logprobs: torch.Tensor) -> torch.Tensor:
    """That of the output layer, of the loss of these log-probs."""
    weight = loop.trainer.model.lm_head.weight
    loop.trainer.loss(logprobs, pack, 1.0).backward()
    found = weight.grad
    loop.trainer.model.zero_grad()
    assert found is not None
    return found.double()


def distances(loop: Loop) -> dict[str, float]:
    """How far the gradient of the loop's loss is from one that torch computes, over the kept tokens
    and over all, as shares of its norm."""
    answers = loop.rollout.answers(training(10, 9, 2, 0), "gradient")
    for number, answer in enumerate(answers):
        answer.reward = float(number % 2)
    (pack,) = packs(loop.samples(answers), 4096, loop.device)
    ours = gradient(loop, pack, loop.trainer.score(pack)[0])
    others = {"kept": {"top_p": 0.9}, "all": {}}
    return {
        name: float((gradient(loop, pack, exact(loop, pack, limits)) - ours).norm() / ours.norm())
        for name, limits in others.items()
    }


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    loop = Loop(arguments(["--run", str(folder), *WORDS]))
    folder.mkdir()
    loop.sync()
    loop.save()
    lines = [loop.train_step() for _ in range(2)]
    digests = [sequences(loop, step) for step in range(2)]
    state = loop.digests
    # From its beginning again, with other batches and other packs of the same tokens.
    loop.load()
    loop.sync()
    loop.options.rollout_batch, loop.options.pack_tokens = 5, 120
    loop.train_step()
    found: dict[str, Any] = {
        "steps": lines, "digests": digests, "cut otherwise": sequences(loop, 0),
        "weights changed": sum(state[name] != loop.digests[name] for name in state),
    }  # fmt: skip
    found["distances"] = distances(loop)
    loop.options.pack_tokens = 4096
    faults: dict[str, dict[str, float]] = {
        "no limit": {"top_p": 1.0}, "narrower": {"top_p": 0.5}, "temperature": {"temperature": 0.8},
    }  # fmt: skip
    found["faults"] = {}
    for name, changed in faults.items():
        loop.load()
        loop.sync()
        with trainer_with(loop, **changed):
            line = loop.train_step()
        found["faults"][name] = line["mismatch"] | {"gradient": line["gradient_norm"]}
    target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
