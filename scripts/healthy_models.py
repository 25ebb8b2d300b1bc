#!/usr/bin/env python3
"""Makes many small models that differ in shape, vocabulary and training, for healthy runs.

    python scripts/healthy_models.py --out models                 # all of SPECS, on a GPU if any
    python scripts/healthy_models.py --out models --only 'w64*' --workers 2
    python scripts/healthy_models.py --list

Each model is trained with AdamW and weight decay on the problems of fixtures/corpus.py. Nothing
limits its logits, which grow as in models that others have published. Most vocabularies are larger
than the tokenizer's, so that many rows are never trained; weight decay and the softmax make these
rows nearly equal.
"""

import argparse
import fnmatch
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

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
"""Entries of a tokenizer of bytes: 256 bytes and two special tokens."""
EMBEDDED = 1024
"""Entries of the embedded model's tokenizer."""
POOL = 1 << 20
"""The number of different tokens that a model is trained on."""
ROW_LENGTH = 256
"""Tokens of a training row."""
DECAY, WARM_UP = 0.1, 50
PEAK = 0.03
"""The highest learning rate, for width 1; it falls with the square root of the width."""
EAGER_STEPS, AVERAGED = 3, 20
"""Steps before a CUDA graph is recorded; and the last steps, whose mean loss is reported."""
POSITIONS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The shape and the training of a model."""

    name: str
    family: str
    """Its model_type."""
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
    seed: int = 0
    decays: tuple[float, float] | None = None
    """The range of A_log at first, in a model with gated delta nets."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of its config.json."""

    @property
    def step_tokens(self) -> int:
        return 1024 if self.vocabulary > 100_000 else 2048

    @property
    def trained_in(self) -> torch.dtype:
        """bf16 for large models: AdamW needs four numbers for each weight, and several models are
        trained on one GPU at a time."""
        return torch.bfloat16 if self.hidden * self.vocabulary > 350e6 else torch.float32


COLUMNS = (
    "name family hidden layers heads kv_heads head_dim inner vocabulary tied stored tokenizer steps"
)
TABLE = """
stories-64 llama 64 5 8 4 8 172 512 tied float32 258 6000
stories-64-untied llama 64 5 8 4 8 172 512 untied float32 258 6000
w64-d2 llama 64 2 4 4 16 176 512 untied float32 258 1500
w96-mqa qwen3 96 3 3 1 32 256 4096 tied float32 1024 1500
w128-random llama 128 4 8 4 16 344 512 untied bfloat16 258 0
w128-d4 llama 128 4 8 4 16 344 512 untied float32 258 2000
w128-d6 qwen2 128 6 4 2 32 352 2048 untied bfloat16 1024 1500
w256-h128 qwen3 256 3 2 1 128 704 1024 untied bfloat16 1024 1000
w256-h256 qwen2 256 2 1 1 256 512 512 tied float32 258 1000
w192-d12 llama 192 12 12 12 16 512 512 tied bfloat16 258 500
w64-d36 qwen3 64 36 2 1 32 128 512 untied float32 258 500
w512-v32000 llama 512 2 8 8 64 1024 32000 untied bfloat16 1024 200
w384-h96 llama 384 6 4 2 96 1024 8192 tied bfloat16 1024 500
w320-h80 qwen2 320 4 4 4 80 864 1024 untied float16 1024 500
llama-w64-d36-h256-v151936-s60 llama 64 36 1 1 256 256 151936 tied bfloat16 1024 60
llama-w64-d36-h8-v512-s60 llama 64 36 8 2 8 172 512 untied float16 258 60
llama-w64-d4-h128-v151936-s600 llama 64 4 1 1 128 256 151936 tied bfloat16 1024 600
qwen2-w64-d16-h16-v151936-s60 qwen2 64 16 4 1 16 64 151936 tied float32 258 60
qwen2-w64-d4-h32-v4096-s3000 qwen2 64 4 2 2 32 64 4096 tied float16 1024 3000
qwen3-w64-d16-h64-v512-s3000 qwen3 64 16 1 1 64 172 512 tied float16 258 3000
qwen3-w64-d2-h8-v32000-s0 qwen3 64 2 8 4 8 64 32000 untied float16 1024 0
qwen3-w64-d8-h32-v4096-s600 qwen3 64 8 2 2 32 172 4096 tied float16 1024 600
llama-w128-d16-h256-v4096-s600 llama 128 16 1 1 256 344 4096 untied float16 1024 600
llama-w128-d16-h32-v32000-s600 llama 128 16 4 1 32 512 32000 untied float16 258 600
llama-w128-d36-h32-v151936-s0 llama 128 36 4 2 32 344 151936 untied bfloat16 1024 0
qwen2-w128-d2-h32-v512-s60 qwen2 128 2 4 1 32 344 512 tied float32 258 60
qwen2-w128-d4-h8-v512-s600 qwen2 128 4 16 16 8 512 512 untied float32 258 600
qwen3-w128-d16-h128-v32000-s60 qwen3 128 16 1 1 128 128 32000 untied float16 1024 60
qwen3-w128-d2-h8-v151936-s600 qwen3 128 2 16 4 8 512 151936 untied float32 1024 600
qwen3-w128-d4-h64-v151936-s600 qwen3 128 4 2 1 64 128 151936 untied float16 1024 600
qwen3-w128-d8-h16-v4096-s3000 qwen3 128 8 8 8 16 128 4096 untied float32 258 3000
llama-w256-d16-h64-v4096-s60 llama 256 16 4 2 64 684 4096 untied bfloat16 1024 60
llama-w256-d2-h32-v151936-s0 llama 256 2 8 8 32 256 151936 tied bfloat16 258 0
llama-w256-d36-h16-v512-s600 llama 256 36 16 4 16 684 512 untied bfloat16 258 600
llama-w256-d4-h256-v4096-s3000 llama 256 4 1 1 256 684 4096 untied bfloat16 258 3000
qwen2-w256-d2-h8-v512-s3000 qwen2 256 2 32 16 8 684 512 tied float16 258 3000
qwen2-w256-d36-h128-v32000-s60 qwen2 256 36 2 2 128 1024 32000 tied float32 1024 60
qwen3-w256-d36-h64-v4096-s600 qwen3 256 36 4 1 64 684 4096 tied float16 258 600
qwen3-w256-d8-h128-v151936-s0 qwen3 256 8 2 1 128 684 151936 tied float16 258 0
llama-w512-d16-h8-v32000-s0 llama 512 16 32 32 8 2048 32000 tied float32 1024 0
llama-w512-d2-h128-v512-s3000 llama 512 2 4 1 128 2048 512 untied bfloat16 258 3000
qwen2-w512-d2-h64-v4096-s0 qwen2 512 2 8 8 64 2048 4096 untied bfloat16 258 0
qwen2-w512-d8-h256-v32000-s600 qwen2 512 8 2 1 256 2048 32000 tied float16 1024 600
qwen3-w512-d4-h16-v32000-s600 qwen3 512 4 32 8 16 512 32000 untied bfloat16 1024 600
qwen3-w512-d8-h32-v512-s60 qwen3 512 8 16 4 32 1368 512 tied bfloat16 258 60
llama-w1024-d2-h128-v4096-s0 llama 1024 2 8 8 128 1024 4096 untied float32 1024 0
llama-w1024-d2-h32-v512-s60 llama 1024 2 32 16 32 2048 512 untied float32 258 60
llama-w1024-d8-h8-v4096-s60 llama 1024 8 32 32 8 2048 4096 tied bfloat16 1024 60
qwen2-w1024-d2-h256-v32000-s60 qwen2 1024 2 4 4 256 1024 32000 tied float32 1024 60
qwen2-w1024-d8-h64-v32000-s0 qwen2 1024 8 16 4 64 2048 32000 untied bfloat16 1024 0
qwen3-w1024-d4-h16-v512-s60 qwen3 1024 4 32 16 16 2048 512 tied float16 258 60
llama-w2048-d4-h128-v4096-s0 llama 2048 4 16 16 128 4096 4096 tied float16 258 0
qwen2-w2048-d2-h32-v512-s60 qwen2 2048 2 64 16 32 2048 512 tied float32 258 60
qwen2-w2048-d4-h256-v512-s0 qwen2 2048 4 8 2 256 2048 512 untied bfloat16 258 0
qwen3-w2048-d2-h16-v4096-s0 qwen3 2048 2 16 4 16 2048 4096 tied float32 1024 0
qwen3-w2048-d2-h64-v32000-s60 qwen3 2048 2 16 8 64 2048 32000 tied float32 1024 60
qwen3-w2048-d2-h8-v512-s0 qwen3 2048 2 16 16 8 4096 512 untied float16 258 0
llama-w4096-d2-h16-v512-s0 llama 4096 2 16 8 16 2048 512 untied bfloat16 258 0
llama-w4096-d2-h8-v4096-s0 llama 4096 2 16 16 8 2048 4096 tied float16 258 0
qwen2-w4096-d2-h128-v4096-s0 qwen2 4096 2 32 8 128 2048 4096 tied bfloat16 1024 0
qwen3-w4096-d2-h256-v4096-s0 qwen3 4096 2 16 16 256 2048 4096 tied float32 1024 0
qwen3-w4096-d2-h32-v4096-s0 qwen3 4096 2 16 16 32 2048 4096 tied float16 1024 0
qwen3-w4096-d2-h64-v4096-s0 qwen3 4096 2 16 16 64 2048 4096 tied float16 1024 0
gpu-qwen2.5-0.5b qwen2 896 24 14 2 64 4864 151936 tied bfloat16 1024 100
gpu-qwen3-0.6b qwen3 1024 28 16 8 128 3072 151936 tied bfloat16 1024 100
gpu-qwen2.5-1.5b qwen2 1536 12 12 2 128 8960 151936 tied bfloat16 1024 100
gpu-llama-3.2-1b llama 2048 16 32 8 64 8192 128256 tied bfloat16 1024 100
gpu-qwen3-1.7b qwen3 2048 10 16 8 128 6144 151936 tied bfloat16 1024 100
gpu-qwen3-4b qwen3 2560 8 32 8 128 9728 151936 tied bfloat16 1024 100
gpu-qwen2.5-7b qwen2 3584 3 28 4 128 18944 152064 untied bfloat16 1024 100
gpu-llama-3-8b llama 4096 4 32 8 128 14336 128256 untied bfloat16 1024 100
gpu-qwen3-8b qwen3 4096 4 32 8 128 12288 151936 untied bfloat16 1024 100
gpu-llama-3-8b-random llama 4096 2 32 8 128 14336 128256 untied bfloat16 1024 0
"""


def parse(line: str) -> ModelSpec:
    fields = dict(zip(COLUMNS.split(), line.split(), strict=True))
    numbers = {k: int(v) for k, v in fields.items() if v.isdigit()}
    return ModelSpec(**{**fields, **numbers, "tied": fields["tied"] == "tied"})


SPECS = {spec.name: spec for spec in map(parse, TABLE.strip().splitlines())}
"""Every model. To add one, add a line to TABLE."""


def make_config(spec: ModelSpec, tokenizer: PreTrainedTokenizerFast) -> AutoConfig:
    head = {} if spec.family == "qwen2" else {"head_dim": spec.head_dim}
    if spec.family == "qwen2" and spec.head_dim * spec.heads != spec.hidden:
        raise ValueError(f"{spec.name}: qwen2's heads must divide the hidden size")
    settings = {
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.inner,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5 if spec.family == "llama" else 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": spec.tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "dtype": spec.stored,
    }
    return AutoConfig.for_model(spec.family, **settings | head | dict(spec.more))


tokenizer_of = functools.cache(train_tokenizer)


@functools.cache
def text_of(entries: int) -> torch.Tensor:
    """POOL tokens in one row: the same text for all models whose tokenizer has `entries`."""
    return torch.tensor(next(rows(tokenizer_of(entries), TRAIN_SEED, POOL)))


def batches(spec: ModelSpec, device: str) -> Iterator[torch.Tensor]:
    """Yields batches of token ids: rows that begin at random positions of one text."""
    pool = text_of(spec.tokenizer).to(device)
    generator = torch.Generator().manual_seed(spec.seed)
    offsets = torch.arange(ROW_LENGTH)
    while True:
        shape = (spec.step_tokens // ROW_LENGTH, 1)
        start = torch.randint(POOL - ROW_LENGTH, shape, generator=generator)
        yield pool[(start + offsets).to(device)]


def make_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    """AdamW whose learning rate is a tensor, which a CUDA graph reads in each step."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": gains, "weight_decay": 0.0}],
        lr=torch.zeros((), device=model.device),
        betas=(0.9, 0.95),
        fused=True,
        capturable=model.device.type == "cuda",
    )


def train(
    model: PreTrainedModel, spec: ModelSpec, stream: Iterator[torch.Tensor], graphs: bool
) -> float:
    """Trains with a linear warm-up and then a cosine to a tenth of the rate. Returns the mean loss
    of the last steps."""
    device = model.device
    optimizer = make_optimizer(model)
    id_BT, last = next(stream), torch.zeros((), device=device)
    mask = None
    if graphs:
        # With a mask of ours transformers computes none, which would copy values from the device: a
        # CUDA graph must not do that.
        mask = torch.ones(ROW_LENGTH, ROW_LENGTH, dtype=torch.bool, device=device).tril()
        mask = mask[None, None]

    def step() -> None:
        logits_BTV = model(input_ids=id_BT, attention_mask=mask, use_cache=False).logits
        loss = next_token_loss(logits_BTV.float(), id_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        last.copy_(loss.detach())

    model.train()
    run, recent = step, []
    for number in range(spec.steps):
        warm = min((number + 1) / min(WARM_UP, spec.steps / 5), 1.0)
        cosine = 0.55 + 0.45 * math.cos(math.pi * number / spec.steps)
        for group in optimizer.param_groups:
            group["lr"].fill_(PEAK / math.sqrt(spec.hidden) * warm * cosine)
        id_BT.copy_(next(stream))
        if graphs and number == EAGER_STEPS:
            run = recorded(step)
        run()
        if number >= spec.steps - AVERAGED:
            recent.append(last.item())
        elif number % 500 == 0:
            print(f"{spec.name}: step {number}, loss {last.item():.4f}", flush=True)
    return sum(recent) / len(recent)


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph, because small models spend most time on launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def measured(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """The model's figures in the table, on text that it was not trained on."""
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


def make(spec: ModelSpec, out: Path, device: str, graphs: bool) -> dict[str, object]:
    """Writes the model, its tokenizer and `made.json`. An untrained model has the same weights on
    every device."""
    start = time.monotonic()
    torch.manual_seed(spec.seed)
    tokenizer = tokenizer_of(spec.tokenizer)
    config = make_config(spec, tokenizer)
    with torch.device(device if spec.steps else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=spec.trained_in)
    if spec.decays:
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                torch.nn.init.uniform_(parameter, *spec.decays)
    model.to(device)
    loss = train(model, spec, batches(spec, device), graphs) if spec.steps else None
    figures = measured(model.eval(), tokenizer)
    model.to(getattr(torch, spec.stored)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    record = {
        **asdict(spec),
        **figures,
        "training_loss": loss,
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": (time.monotonic() - start) / 60,
        "device": device,
    }
    (out / "made.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def make_in_process(spec: ModelSpec, out: Path, graphs: bool) -> dict[str, object]:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        return make(spec, out, "cpu", graphs=False)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return make(spec, out, "cuda", graphs)
    finally:
        torch.cuda.empty_cache()


def make_all(specs: Sequence[ModelSpec], out: Path, workers: int, graphs: bool) -> None:
    """Makes the models that do not exist yet, those with the most work first. A model that fails is
    reported, and does not stop the others."""
    missing = [s for s in specs if not (out / s.name / "made.json").exists()]
    missing.sort(key=lambda s: -s.steps * s.hidden * s.layers)
    failed = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        made = {pool.submit(make_in_process, s, out / s.name, graphs): s for s in missing}
        for future in as_completed(made):
            if error := future.exception():
                failed.append(made[future].name)
                print(f"{made[future].name} failed: {error!r}", flush=True)
            else:
                x = future.result()
                words = f"loss {x['held_out_loss']:.3f}, {x['minutes']:.2f} minutes"
                print(f"{x['name']}: {words}", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} models were not made: {', '.join(failed)}")


def make_or_list(specs: Sequence[ModelSpec], description: str) -> None:
    """The command of a script that makes these models, or lists them without --out."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.out is None:
        print(*specs, sep="\n")
    else:
        make_all(specs, options.out, options.workers, graphs=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, help="of every model, for a trial")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    specs = [s for s in SPECS.values() if any(fnmatch.fnmatch(s.name, p) for p in options.only)]
    if options.list or options.out is None:
        print(*specs, sep="\n")
    else:
        if options.steps is not None:
            specs = [replace(s, steps=options.steps) for s in specs]
        make_all(specs, options.out, options.workers, options.graphs)


if __name__ == "__main__":
    main()
