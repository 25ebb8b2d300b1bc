#!/usr/bin/env python3
"""Makes healthy runs of many models: pairs of engines x dtypes x levels of the processor.

    python scripts/healthy_models.py --out models
    python scripts/healthy_runs.py --models models --out runs --workers 2
    python scripts/healthy_report.py --models models --runs runs --out table.md

A run contains the comparison and no captures, like the runs of scripts/calibration_runs.py. Its
folder is OUT/MODEL/DTYPE-PROCESSOR/PAIR/SEED. Existing runs are kept, so an interrupted command may
be repeated. If an engine cannot run a model, PAIR/skipped.json has the reason.

Engines are forked from processes that have imported the packages, as in the tests. A process that
has used a GPU cannot be forked; `--cold` starts each engine in a new process.
"""

import argparse
import fnmatch
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

import torch  # noqa: E402
import warm  # noqa: E402
from calibration_runs import keep, pair_name, sample, score  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from rlk_align.capture import supervise  # noqa: E402
from rlk_align.data import data_path  # noqa: E402
from rlk_align.engines.known_faults import FAULTS  # noqa: E402
from rlk_align.engines.registry import engine_info  # noqa: E402
from rlk_align.errors import EngineFailed, RlkError  # noqa: E402
from rlk_align.model.prompts import Prompt, load_prompts, save_prompts  # noqa: E402
from rlk_align.model.shape import ModelShape, read_shape  # noqa: E402
from rlk_align.progress import silent  # noqa: E402
from rlk_align.trace.run import Run  # noqa: E402

PAIRS = {
    "hf": ("hf:attn=eager", "fsdp", "megatron"),
    "vllm": ("hf", "megatron"),
}
"""Rollout engine -> training engines."""
HYBRID_PAIRS = {
    "hf": ("hf:attn=eager", "hf:batch=4,padding=left", "fsdp:dp=2"),
    "vllm": ("hf", "fsdp:dp=2"),
    "vllm:max_num_batched_tokens=37,max_num_seqs=3": ("hf:batch=4,padding=left",),
    "vllm:enable_prefix_caching=1,max_num_seqs=1": ("hf", "fsdp:dp=2"),
}
"""The same for models with gated delta nets, whose prefills are cut at odd lengths, or go on from a
cached prefix."""
LATENT_PAIRS = {
    "hf": ("hf:attn=eager", "hf:batch=4,padding=left", "fsdp:dp=2", "megatron"),
    "vllm": ("hf", "fsdp:dp=2", "megatron"),
    "vllm:max_num_batched_tokens=37,max_num_seqs=3": ("hf:batch=4,padding=left",),
    "vllm:enable_prefix_caching=1,max_num_seqs=1": ("hf", "fsdp:dp=2"),
}
"""The same for models with latent attention."""
PROCESSORS = {
    "scalar": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "native": {},
}
"""Level -> the environment that limits the kernels of torch and oneDNN to that level."""
DTYPES = ("bfloat16", "float16", "float32")
LONGEST = 260
"""Bytes of the longest prompt. A tokenizer of bytes makes a token of each byte."""
LENGTHS, SHARED = (5, 37, 65, 150, 290, 300), 280
"""Tokens of the prompts of hybrids, and of models with latent attention: within the first chunk of
64, at its border, and beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The runs of one model whose samples are the same."""

    model: Path
    prompts: Path
    dtype: str
    processor: str
    rollout: str
    trains: tuple[str, ...]

    def folder(self, out: Path, train: str) -> Path:
        setting = f"{self.dtype}-{self.processor}"
        return out / self.model.name / setting / pair_name(self.rollout, train)


def cells(models: Sequence[Path], options: argparse.Namespace) -> Iterator[Cell]:
    """Every dtype of every model. The processor's level changes from cell to cell; with
    `--all-processors`, each cell has every level."""
    levels = options.processors
    for number, model in enumerate(models):
        shape = read_shape(model)
        family = shape.family
        pairs = HYBRID_PAIRS if family.hybrid else LATENT_PAIRS if family.latent else PAIRS
        if family.latent and named_in_vllm(model, shape):
            pairs = {rollout: pairs[rollout] for rollout in pairs if rollout == "hf"}
        write = write_long_prompts if family.hybrid or family.latent else write_prompts
        prompts = write(options.out, options.prompt_count)
        for k, dtype in enumerate(options.dtypes):
            used = levels if options.all_processors else [levels[(number + k) % len(levels)]]
            for processor in used:
                for rollout, every in pairs.items():
                    asked = options.train or every
                    trains = tuple(t for t in every if t in asked and installed(t))
                    if matches(rollout, options.rollout) and installed(rollout) and trains:
                        yield Cell(
                            model=model,
                            prompts=prompts,
                            dtype=dtype,
                            processor=processor,
                            rollout=rollout,
                            trains=trains,
                        )


def named_in_vllm(model: Path, shape: ModelShape) -> bool:
    """Whether a comparison with vLLM 0.32 names a known fault of it in a model with latents: the
    tied head, which it does not load, or the router of sparse layers."""
    tied = json.loads((model / "made.json").read_text())["tied"]
    routers = {f.family for f in FAULTS if f.operator == "router"}
    return tied or bool(shape.sparse_layers and shape.model_type in routers)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def installed(spec: str) -> bool:
    return engine_info(spec.partition(":")[0]).installed


def missing(cell: Cell, train: str, options: argparse.Namespace) -> bool:
    folder = cell.folder(options.out, train)
    whole = all((folder / str(seed) / "checksums.json").exists() for seed in options.seeds)
    return not (whole or refused(folder / "skipped.json"))


def refused(record: Path) -> bool:
    """Whether an engine cannot run the model. An engine that failed is tried again."""
    return record.exists() and json.loads(record.read_text())["kind"] != EngineFailed.__name__


def run_cell(cell: Cell, servers: Mapping[str, str], options: argparse.Namespace) -> str:
    """Makes the missing runs of a cell, unless the time is over; returns a line about them."""
    start = time.monotonic()
    name = f"{cell.model.name} {cell.dtype} {cell.processor} {cell.rollout}"
    if start > options.deadline:
        return f"{name}: no time was left"
    torch.set_num_threads(1)
    trains = [t for t in cell.trains if missing(cell, t, options)]
    work = Run(cell.folder(options.out, "").with_name(f"captures-{cell.rollout}"))
    settings = argparse.Namespace(**vars(options) | asdict(cell))
    skipped = 0
    with engines_started(cell.processor, servers):
        try:
            sampled = sample(cell.rollout, options.seeds, work, settings, silent)
        except RlkError as error:
            sampled, skipped = [], len(trains)
            for train in trains:
                skip(cell, train, error, options.out)
        for train in trains if sampled else ():
            try:
                scored = score(train, options.seeds, sampled, work, settings, silent)
            except RlkError as error:
                skip(cell, train, error, options.out)
                skipped += 1
                continue
            (cell.folder(options.out, train) / "skipped.json").unlink(missing_ok=True)
            for seed, a, b in zip(options.seeds, sampled, scored, strict=True):
                # The precheck may report a mismatch of attributes for a healthy pair.
                keep(a, b, cell.folder(options.out, train) / str(seed), silent, ("attributes",))
                shutil.rmtree(b.folder)
    shutil.rmtree(work.folder, ignore_errors=True)
    seconds = time.monotonic() - start
    return f"{name}: {len(trains) - skipped} pairs, {skipped} skipped, {seconds:.0f} s"


@contextmanager
def engines_started(level: str, servers: Mapping[str, str]) -> Iterator[None]:
    """Starts engines under a level's environment, from its server if there is one."""
    real = supervise.start_process
    warmly = partial(warm.start_worker, real) if level in servers else real

    def start(command: Sequence[str], environment: Mapping[str, str], output: IO[str]) -> Any:
        return warmly(command, {**environment, **PROCESSORS[level]}, output)

    os.environ[warm.FOLDER] = servers.get(level, "")
    supervise.start_process = start
    try:
        yield
    finally:
        supervise.start_process = real


def skip(cell: Cell, train: str, error: RlkError, out: Path) -> None:
    folder = cell.folder(out, train)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"kind": type(error).__name__, "reason": error.message}
    (folder / "skipped.json").write_text(json.dumps(record) + "\n")


def run_all(todo: Sequence[Cell], options: argparse.Namespace) -> None:
    """Runs all cells, the costliest first. Each level has a server of its own, whose processes have
    imported the packages, because libraries choose their kernels when they are first used."""
    levels = set() if options.cold else {c.processor for c in todo}
    started = {level: server_of(level) for level in sorted(levels)}
    folders = {level: server.folder.name for level, server in started.items()}
    try:
        with ProcessPoolExecutor(options.workers, get_context("fork")) as pool:
            made = {pool.submit(run_cell, c, folders, options): c for c in sorted(todo, key=cost)}
            for future in as_completed(made):
                error = future.exception()
                print(f"{made[future]}: {error!r}" if error else future.result(), flush=True)
    finally:
        for server in started.values():
            server.end()


def server_of(level: str) -> warm.Server:
    before = dict(os.environ)
    os.environ.update(PROCESSORS[level])
    try:
        return warm.Server()
    finally:
        os.environ.clear()
        os.environ.update(before)


def cost(cell: Cell) -> float:
    """A negative number, lowest for the slowest model: it follows from layers and weights."""
    made = json.loads((cell.model / "made.json").read_text())
    return -(made["layers"] + made["parameters"] / 3e6)


def write_prompts(out: Path, count: int) -> Path:
    """The first embedded prompts that are short enough."""
    path = out / f"prompts-{count}.jsonl"
    if not path.exists():
        short = [
            p
            for p in load_prompts(data_path("prompts.jsonl"))
            if len((p.text or "").encode()) <= LONGEST
        ]
        out.mkdir(parents=True, exist_ok=True)
        save_prompts(short[:count], path)
    return path


def write_long_prompts(out: Path, count: int) -> Path:
    """`count` texts of LENGTHS tokens by the embedded tokenizer, of which the long ones begin with
    the same SHARED tokens."""
    path = out / f"long-prompts-{count}.jsonl"
    if not path.exists():
        every = [p.text or "" for p in load_prompts(data_path("prompts.jsonl"))]
        encode = PreTrainedTokenizerFast.from_pretrained(data_path("model")).encode
        start = encode(" ".join(every))[:SHARED]
        prompts = []
        for n, length in zip(range(count), itertools.cycle(LENGTHS), strict=False):
            ids = encode(" ".join(every[n:]))
            ids = ids[:length] if length <= SHARED else start + ids[: length - SHARED]
            prompts.append(Prompt(f"{n}-{length}", None, tuple(ids)))
        out.mkdir(parents=True, exist_ok=True)
        save_prompts(prompts, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="a folder of models")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollout", nargs="+", default=["*"], help="patterns of specs")
    parser.add_argument("--train", nargs="+", help="default: all of the model's pairs")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--processors", nargs="+", default=list(PROCESSORS), choices=PROCESSORS)
    parser.add_argument("--all-processors", action="store_true", help="each with each dtype")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--prompt-count", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--engine-options", default="", help="for every engine, as ,key=value")
    parser.add_argument("--vllm-options", default="", help="for vLLM, in addition")
    parser.add_argument("--controls", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--pass-budget", type=float, default=4e9, help="bytes of a pass's values")
    parser.add_argument("--cold", action="store_true", help="start each engine in a new process")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after these minutes"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # All of them, because a model's number decides the level of the processor.
    models = [p.parent for p in sorted(options.models.glob("*/made.json"))]
    todo = [
        cell
        for cell in cells(models, options)
        if matches(cell.model.name, options.only)
        and any(missing(cell, t, options) for t in cell.trains)
    ]
    options.deadline = time.monotonic() + 60 * options.minutes
    run_all(todo, options)


if __name__ == "__main__":
    main()
