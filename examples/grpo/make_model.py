"""Trains the model with which the loop begins on a GPU: it has a published shape and solves some of
the problems.

    python examples/grpo/make_model.py --out runs/model                  # Qwen3-0.6B's shape

The weights are random at first. They are trained on solved problems, with the embedded model's
tokenizer, until the model solves a share of problems that it has not seen, or until the time is up.
"""

import argparse
import itertools
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import problems
import torch
from make_large_model import SHAPES, make_config
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlk_align.data import data_path

ROW, ASKED_EVERY, ASKED = 128, 40, 256
"""Tokens of a row; steps between two evaluations; problems of an evaluation."""
MATRIX_RATE, OTHER_RATE, WARM_UP, DECAY = 3e-3, 1e-3, 20, 0.3
"""The rates of Muon and of AdamW; warm-up steps; the last share of the time, in which rates
fall."""
NOT_COUNTED = -100


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--out", type=Path, required=True)
    a.add_argument("--shape", default="qwen3-0.6b", help=f"of {', '.join(SHAPES)}[:layers=N]")
    a.add_argument("--until", type=float, default=0.5, help="share of problems solved")
    a.add_argument("--seconds", type=float, default=60, help="time limit of the training")
    a.add_argument("--step-tokens", type=int, default=4096)
    a.add_argument("--seed", type=int, default=0)
    return a.parse_args(words)


def sequence(tokenizer: PreTrainedTokenizerFast, problem: problems.Problem) -> tuple[list, list]:
    """Token ids of (the prompt, the solution)."""
    return tuple(tokenizer(text)["input_ids"] for text in (problem.prompt, problem.solution))


def rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (ids, targets): solved problems one after another, cut to ROW tokens; a row begins
    with a question. Only the solutions are targets, because the questions are random."""
    rng = random.Random(f"solved {seed}")
    held_out = {problem.prompt for problem in problems.held_out(ASKED)}
    while True:
        row: list[int] = []
        targets: list[int] = []
        while len(row) < ROW:
            problem = problems.draw(rng)
            if problem.prompt not in held_out:
                prompt, solution = sequence(tokenizer, problem)
                row += [*prompt, *solution, tokenizer.eos_token_id]
                targets += [*[NOT_COUNTED] * len(prompt), *solution, NOT_COUNTED]
        yield row[:ROW], targets[:ROW]


@torch.no_grad()
def solved(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, count: int) -> float:
    """The share of held-out problems that the model solves: each token of the solution is the most
    likely one."""
    right = 0
    asked = problems.held_out(count)
    for start in range(0, count, 64):
        some = [sequence(tokenizer, problem) for problem in asked[start : start + 64]]
        longest = max(len(p) + len(s) for p, s in some)
        ids = torch.tensor([[*p, *s, *[0] * (longest - len(p) - len(s))] for p, s in some])
        greedy = model(ids.to(model.device), use_cache=False).logits.argmax(-1).cpu()
        for row, likeliest, (p, s) in zip(ids, greedy, some, strict=True):
            first, end = len(p), len(p) + len(s)
            right += bool((row[first:end] == likeliest[first - 1 : end - 1]).all())
    return right / count


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [embedding, *(p for p in model.parameters() if p.ndim != 2)]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, o: argparse.Namespace
) -> float:
    """Trains in bf16; returns the share of problems that the model solves at the end."""
    optimizers = make_optimizers(model)
    rates = [(group, group["lr"]) for x in optimizers for group in x.param_groups]
    stream, start, share = rows(tokenizer, o.seed), time.monotonic(), 0.0
    for step in itertools.count(1):
        passed = (time.monotonic() - start) / max(o.seconds, 1e-9)
        for group, rate in rates:
            group["lr"] = rate * min(step / WARM_UP, 1.0, max((1 - passed) / DECAY, 0.0))
        some = list(itertools.islice(stream, max(o.step_tokens // ROW, 1)))
        ids, targets = (torch.tensor(x).to(model.device) for x in zip(*some, strict=True))
        logits = model(ids, use_cache=False).logits[:, :-1]
        # Only counted rows, because a row of logits has 152 thousand numbers.
        counted = targets[:, 1:] != NOT_COUNTED
        loss = cross_entropy(logits[counted].float(), targets[:, 1:][counted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        over = passed >= 1
        if step % ASKED_EVERY == 0 or over:
            share, now = solved(model, tokenizer, ASKED), time.monotonic() - start
            words = f"step {step}: loss {loss.item():.3f}, {share:.1%} solved"
            print(f"{words}, {now:.1f} s", flush=True)
        if over or share >= o.until:
            break
    return share


def main() -> int:
    o = arguments()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data_path("model"))
    torch.manual_seed(o.seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = make_config(o.shape, tokenizer)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    share = train(model, tokenizer, o)
    o.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(o.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data_path("model") / name, o.out / name)
    print(f"{o.out}: {o.shape}, solves {share:.1%} of {ASKED} held-out problems")
    return int(share < o.until)


if __name__ == "__main__":
    sys.exit(main())
