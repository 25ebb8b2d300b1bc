#!/usr/bin/env python3
"""Makes many small models that differ in shape, vocabulary and training, for healthy runs.

    python scripts/healthy_models.py --out models                 # all of SPECS, on a GPU if any
    python scripts/healthy_models.py --out models --only 'w64*' --workers 2
    python scripts/healthy_models.py --list

Each model is trained with AdamW and weight decay on the problems of fixtures/corpus.py, by nothing
that flattens it: its logits grow as those of other people's models do. Its vocabulary is larger
than its tokenizer's, so that many of its rows are never trained; weight decay and the softmax make
these rows nearly equal.
"""

import argparse
import fnmatch
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "fixtures"))

from train_model import (  # noqa: E402
    HELD_OUT_SEED,
    TRAIN_SEED,
    next_token_loss,
    rows,
    train_tokenizer,
)

BYTES = 258
"""Entries of a tokenizer of bytes: 256 and two special ones."""
EMBEDDED = 1024
"""Entries of the embedded model's tokenizer."""
POOL = 1 << 20
"""Tokens that a model is trained on, over and over."""
ROW_LENGTH = 256
"""Tokens of a training row."""
DECAY, WARM_UP = 0.1, 50
POSITIONS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What a model is made from."""

    name: str
    family: str
    """llama, qwen2 or qwen3."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    stored: str
    """The dtype of its weights on disk."""
    tokenizer: int
    """Entries of its tokenizer, BYTES or EMBEDDED; the rows beyond are never trained."""
    steps: int
    """0 is a random model."""
    step_tokens: int = 2048
    seed: int = 0


COLUMNS = (
    "name family hidden layers heads kv_heads head_dim inner vocabulary tied stored tokenizer steps"
)
TABLE = """
stories-64 llama 64 5 8 4 8 172 512 tied float32 258 4500
w64-d2-untied llama 64 2 4 4 16 176 512 untied float32 258 800
w128-random llama 128 4 8 4 16 344 512 untied bfloat16 258 0
w128-d4 llama 128 4 8 4 16 344 512 untied float32 258 400
w96-mqa qwen3 96 3 3 1 32 256 4096 tied float32 1024 250
w128-d6 qwen2 128 6 4 2 32 352 2048 untied bfloat16 1024 200
w256-h128 qwen3 256 3 2 1 128 704 1024 untied bfloat16 1024 150
w256-h256 qwen2 256 2 1 1 256 512 512 tied float32 258 200
w192-d12 llama 192 12 12 12 16 512 512 tied bfloat16 258 80
w64-d36 qwen3 64 36 2 1 32 128 512 untied float32 258 80
w512-v32000 llama 512 2 8 8 64 1024 32000 untied bfloat16 1024 20
"""


def parse(line: str) -> ModelSpec:
    fields = dict(zip(COLUMNS.split(), line.split(), strict=True))
    numbers = {k: int(v) for k, v in fields.items() if v.isdigit()}
    return ModelSpec(**{**fields, **numbers, "tied": fields["tied"] == "tied"})


SPECS = {spec.name: spec for spec in map(parse, TABLE.strip().splitlines())}
"""Every model. To add one, add a line to TABLE."""


def make_config(spec: ModelSpec, tokenizer: PreTrainedTokenizerFast) -> AutoConfig:
    own = {} if spec.family == "qwen2" else {"head_dim": spec.head_dim}
    if spec.family == "qwen2" and spec.head_dim * spec.heads != spec.hidden:
        raise ValueError(f"{spec.name}: heads of qwen2 divide the hidden size")
    return AutoConfig.for_model(
        spec.family,
        vocab_size=spec.vocabulary,
        hidden_size=spec.hidden,
        intermediate_size=spec.inner,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5 if spec.family == "llama" else 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=spec.tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype=spec.stored,
        **own,
    )


def batches(
    tokenizer: PreTrainedTokenizerFast, spec: ModelSpec, device: str
) -> Iterator[torch.Tensor]:
    """Id batches of rows cut out of one text anywhere."""
    pool = torch.tensor(next(rows(tokenizer, TRAIN_SEED, POOL)), device=device)
    generator = torch.Generator().manual_seed(spec.seed)
    offsets = torch.arange(ROW_LENGTH)
    while True:
        shape = (spec.step_tokens // ROW_LENGTH, 1)
        start = torch.randint(POOL - ROW_LENGTH, shape, generator=generator)
        yield pool[(start + offsets).to(device)]


def peak_rate(spec: ModelSpec) -> float:
    return min(4e-3, 0.25 / spec.hidden)


def train(model: PreTrainedModel, spec: ModelSpec, stream: Iterator[torch.Tensor]) -> float:
    """AdamW in fp32; linear warm-up, then a cosine to a tenth. Returns the last mean loss."""
    device = model.device
    peak = peak_rate(spec)
    rate = torch.zeros((), device=device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": gains, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.95),
        fused=True,
        capturable=device.type == "cuda",
    )
    id_BT = torch.zeros(
        (spec.step_tokens // ROW_LENGTH, ROW_LENGTH), dtype=torch.long, device=device
    )
    last = torch.zeros((), device=device)

    def step() -> None:
        loss = next_token_loss(model(input_ids=id_BT, use_cache=False).logits, id_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        last.copy_(loss.detach())

    model.train()
    run = step
    recent: list[float] = []
    for number in range(spec.steps):
        warm = min((number + 1) / min(WARM_UP, spec.steps / 5), 1.0)
        rate.fill_(peak * warm * (0.55 + 0.45 * math.cos(math.pi * number / spec.steps)))
        id_BT.copy_(next(stream))
        if number == 3 and device.type == "cuda":
            run = recorded(step)
        run()
        if number >= spec.steps - 20 or number % 500 == 0:
            recent.append(last.item())
            if number % 500 == 0:
                print(f"{spec.name}: step {number}, loss {recent[-1]:.4f}", flush=True)
    return sum(recent[-20:]) / len(recent[-20:])


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph: small models spend their time in starting kernels."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def measured(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """What the table of models tells of it, on text that training did not see."""
    stream = rows(tokenizer, HELD_OUT_SEED, ROW_LENGTH)
    id_BT = torch.tensor([next(stream) for _ in range(4)], device=model.device)
    logits_BTV = model(input_ids=id_BT, use_cache=False).logits.float()
    head_VD = model.get_output_embeddings().weight.float()
    unused_VD = head_VD[len(tokenizer) :]
    spread = (unused_VD - unused_VD.mean(0)).norm() / unused_VD.norm() if len(unused_VD) else 1.0
    return {
        "held_out_loss": next_token_loss(logits_BTV, id_BT).item(),
        "median_top_logit": logits_BTV.amax(-1).median().item(),
        "unused_rows": len(unused_VD),
        "spread_of_unused_rows": float(spread),
    }


def make(spec: ModelSpec, out: Path, device: str) -> dict[str, object]:
    """Writes the model, its tokenizer and `made.json`. Random weights are made on the CPU."""
    start = time.monotonic()
    torch.manual_seed(spec.seed)
    tokenizer = train_tokenizer(spec.tokenizer)
    config = make_config(spec, tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    loss = train(model, spec, batches(tokenizer, spec, device)) if spec.steps else None
    told = measured(model.eval(), tokenizer)
    model.to(getattr(torch, spec.stored)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    record = {
        **asdict(spec),
        **told,
        "training_loss": loss,
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": (time.monotonic() - start) / 60,
        "device": device,
    }
    (out / "made.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def make_in_process(spec: ModelSpec, out: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    return make(spec, out, "cuda" if torch.cuda.is_available() else "cpu")


def make_all(specs: Sequence[ModelSpec], out: Path, workers: int) -> None:
    """The largest work first; what is there already is left as it is."""
    missing = [s for s in specs if not (out / s.name / "made.json").exists()]
    missing.sort(key=lambda s: -s.steps * s.hidden * s.layers)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        made = [pool.submit(make_in_process, spec, out / spec.name) for spec in missing]
        for future in as_completed(made):
            print(json.dumps(future.result()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    specs = [s for s in SPECS.values() if any(fnmatch.fnmatch(s.name, p) for p in options.only)]
    if options.list or options.out is None:
        print(*specs, sep="\n")
    else:
        make_all(specs, options.out, options.workers)


if __name__ == "__main__":
    main()
