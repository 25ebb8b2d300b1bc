"""Runs the loop of examples/grpo on real engines, with faults and without, and writes what
it says. That folder is to be on the path.

python grpo_loop.py FOLDER FOUND.json
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import problems
import torch
from batch import Answer, Sample, to_sample
from checks import LoopFault
from options import arguments
from record import STATE
from train import Loop


def bits(loop: Loop, step: int) -> list[str]:
    """Digests of the state, and of the sequences and log-probs of a step."""
    files = [loop.options.run / STATE, *loop.options.run.glob(f"log-probs/step_{step:06d}_*")]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def go_back(loop: Loop, state: Path) -> None:
    """Return to the files of a killed run; engines and tensors have other values by then."""
    with torch.no_grad():
        for master in loop.trainer.masters.values():
            master.fill_(0.5)
    shutil.copy(state, loop.options.run / STATE)
    loop.load()
    loop.sync()


def steps(loop: Loop) -> list[dict[str, Any]]:
    """Two steps, each saved; the state after the first is kept too."""
    found = []
    for number in range(2):
        line = loop.train_step()
        loop.save()
        shutil.copy(loop.options.run / STATE, loop.options.run / f"after-{number + 1}")
        found.append({"metrics": line, "bits": bits(loop, number)})
    return found


def counted(answer: Answer) -> Sample:
    """As if a truncated answer were complete."""
    sample = to_sample(answer, 1.0)
    return replace(sample, mask=[value is not None for value in sample.rollout_logprobs])


def shifted(answer: Answer, by: int = 1) -> Sample:
    sample = to_sample(answer, 1.0)
    longer = [False, *sample.mask, False]
    return replace(sample, mask=longer[1 - by : len(sample.mask) + 1 - by])


def with_token(sample: Sample, index: int, on: bool) -> Sample:
    return replace(sample, mask=[*sample.mask[:index], on, *sample.mask[index + 1 :]])


def of_prompt(answer: Answer) -> Sample:
    return with_token(to_sample(answer, 1.0), answer.prompt_length - 1, True)


def of_tool(answer: Answer) -> Sample:
    """The first token after the first try, if there is another try."""
    sample = to_sample(answer, 1.0)
    if len(answer.spans) == 1:
        return sample
    return with_token(sample, answer.spans[0].indices[-1] + 1, True)


def left_out(answer: Answer) -> Sample:
    sample = to_sample(answer, 1.0)
    return with_token(sample, answer.spans[0].indices[-1], False)


def of_another(answer: Answer) -> Sample:
    """The mask of an answer that is one token longer."""
    sample = to_sample(answer, 1.0)
    return replace(sample, mask=[*sample.mask, False])


def without_logprob(answer: Answer) -> Sample:
    """The last token would count with a log-prob of 0, without a comparison."""
    sample = to_sample(answer, 1.0)
    return replace(sample, rollout_logprobs=[*sample.rollout_logprobs[:-1], None])


def late_logprobs(answer: Answer) -> Sample:
    sample = to_sample(answer, 1.0)
    return replace(sample, rollout_logprobs=[None, *sample.rollout_logprobs[:-1]])


MASKS: dict[str, Callable[[Answer], Sample]] = {
    "none": lambda answer: to_sample(answer, 1.0),
    "shift": shifted,
    "shift back": lambda answer: shifted(answer, -1),
    "prompt": of_prompt,
    "tool": of_tool,
    "left out": left_out,
    "cut": counted,
    "another": of_another,
    "no log-prob": without_logprob,
    "late log-probs": late_logprobs,
}


def fault(loop: Loop) -> str:
    """The error that ends the next step, or an empty text."""
    try:
        loop.train_step()
    except LoopFault as found:
        return str(found)
    return ""


def of_gspo(loop: Loop, answers: list[Answer]) -> dict[str, Any]:
    """GSPO's loss of answers with an advantage of 1, before and after the first one's tokens are
    likelier by 0.1 % in the trainer: what is clipped, and each sequence's counted tokens and their
    gradients."""
    dapo = vars(loop.options).copy()
    vars(loop.options).update(loss="gspo", clip=(3e-4, 4e-4), pack_tokens=4096)
    (pack,) = row = loop.packs([to_sample(answer, 1.0) for answer in answers])
    with torch.no_grad():
        logprobs, entropies = loop.trainer.score(pack)
    first, *others = (slice(a, b) for a, b in pairwise(pack.starts[: len(answers) + 1].tolist()))
    likelier = logprobs.clone()
    likelier[first] += 1e-3
    likelier.requires_grad_()
    loop.trainer.loss(likelier, pack, 0.5).backward()
    gradient, on = likelier.grad, pack.mask
    assert gradient is not None
    found = {
        "clipped": [
            loop.trainer.clip_fraction(row, [(x.detach(), entropies)]) for x in (logprobs, likelier)
        ],
        "tokens": [int(on[one].sum()) for one in (first, *others)],
        "gradients": [gradient[one][on[one]].tolist() for one in (first, *others)],
        "not counted": int(gradient[~on].count_nonzero()),
    }
    vars(loop.options).update(dapo)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    words = "--problems 2 --group 4 --seed 10 --max-tokens 20 --pack-tokens 120 --device cpu"
    loop = Loop(arguments(["--run", str(folder), *words.split()]))
    folder.mkdir(exist_ok=True)
    loop.sync()
    loop.save()
    shutil.copy(folder / STATE, folder / "before")
    found: dict[str, Any] = {"once": steps(loop)}
    go_back(loop, folder / "after-1")
    loop.options.rollout_batch = 3
    loop.train_step()
    loop.save()
    found["resumed, cut otherwise"] = bits(loop, 1)
    loop.options.resume, loop.options.steps = True, 2
    found["resumed at its end"] = {"code": loop.run(), "bits": bits(loop, 1)}

    # The faults, on answers of vLLM: some truncated, some wrong and tried again.
    loop.options.group, loop.options.max_tokens = 4, 24
    answers = loop.rollout.answers(problems.training(0, 7, 2, 0), "faults")
    loop.options.max_tokens = 3
    cut = loop.rollout.answers(problems.training(0, 7, 1, 0), "faults")
    found["tries"] = [len(answer.spans) for answer in answers]
    found["cut"] = [answer.cut for answer in cut]
    whole = [answer for answer in answers if not answer.cut]
    found["gspo"] = of_gspo(loop, whole)
    loop.options.group, found["masks"] = 1, {}
    for name, mask in MASKS.items():
        some = cut[:2] if name == "cut" else whole
        loop.rollout.answers = lambda *_, some=some, **__: some
        loop.samples = lambda some, mask=mask: [mask(answer) for answer in some]
        if name == "none":
            loop.samples = lambda some: [to_sample(answer, 1.0) for answer in some]
            continue
        found["masks"][name] = fault(loop)

    loop.samples = lambda some: [to_sample(answer, 1.0) for answer in some]
    loop.rollout.answers = lambda *_, **__: whole[:1]
    weights = loop.trainer.weights
    loop.trainer.weights = lambda: (x for x in weights() if "layers.2.mlp" not in x[0])
    found["stale"] = fault(loop)
    loop.trainer.weights = weights
    loop.sync()
    # A trainer that computes differently: weights do not show it, but log-probs do.
    loop.trainer.model.model.layers[1].mlp.register_forward_hook(lambda _m, _a, out: out * 1.01)
    found["drift"] = loop.train_step()["mismatch"]
    name = next(name for name in loop.trainer.parameters if "layers.2.mlp.down_proj" in name)
    before = {n: master.clone() for n, master in loop.trainer.masters.items()}
    loop.trainer.parameters[name].register_hook(lambda gradient: gradient * float("nan"))
    found["not finite"] = {"parameter": name, "fault": fault(loop)}
    masters = loop.trainer.masters
    found["not finite"]["unchanged"] = all(masters[n].equal(before[n]) for n in before)
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
