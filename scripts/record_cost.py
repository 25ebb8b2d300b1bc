#!/usr/bin/env python3
"""Measures what `rlk_align.record` costs a trainer: seconds of a step, and bytes of a recording.

    python scripts/record_cost.py llama-3-8b:layers=4 --out cost.json

A step is the forward and the backward of all sequences, in micro-batches, and AdamW. It is timed
without a recorder, with a recorder that does not record the step, and recording some of the
sequences, without and with the weights. The model has random weights. It is plain transformers in
bfloat16, or (`--trainer fsdp`) float32 that FSDP2 shards over one rank and computes in bfloat16.

Bytes are those of one layer for one sequence, at the shapes of --bytes: the files of a recording of
two layers less those of a recording of one layer. Arithmetic gives the values, in bfloat16, and the
rows with their digests.
"""

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "fixtures"))

from make_large_model import make_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlk_align import record
from rlk_align.data import data_path
from rlk_align.errors import BadOption
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.record.shared.layout import RECORDING, RecordingRecord, step_folder
from rlk_align.record.train.recorder import Recorder
from rlk_align.trace.records import load_record

Row = dict[str, Any]
Seconds = dict[str, float]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOT_THIS_STEP = 1 << 30
"""`every` of a recorder that records none of the timed steps."""
UNLIMITED = 1 << 50
VALUE_BYTES = 2
ROW_BYTES = 80
"""Bytes of a row of an operator with its digests and statistics, in all passes together."""
BYTES_SEQUENCES = 2


def config_of(shape: str) -> Any:
    """The config of SHAPE[:layers=N], or that of a folder with a config.json."""
    if Path(shape).is_dir():
        return AutoConfig.from_pretrained(shape)
    return make_config(shape, PreTrainedTokenizerFast.from_pretrained(data_path("model")))


def make_model(config: Any, trainer: str) -> torch.nn.Module:
    """A model with random weights."""
    dtype = torch.bfloat16 if trainer == "hf" else torch.float32
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if trainer == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def random_ids(vocab: int, sequences: int, tokens: int) -> Tensor:
    """Token ids int64[sequences, tokens]."""
    size = (sequences, tokens)
    return torch.randint(2, vocab, size, generator=torch.Generator().manual_seed(0))


def prompts_of(ids: Tensor) -> list[list[int]]:
    """A prompt of each sequence: the first quarter of its tokens."""
    return ids[:, : ids.shape[1] // 4].tolist()


class Loop:
    """A trainer whose steps all have the same sequences."""

    def __init__(self, model: torch.nn.Module, ids: Tensor, batch: int) -> None:
        """batch: sequences of a micro-batch."""
        self.model, self.prompts = model, prompts_of(ids)
        self._batches = ids.to(DEVICE).split(batch)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-6, fused=DEVICE.type == "cuda"
        )

    def step(self, recorder: Recorder | None = None, number: int = 0) -> Seconds:
        """Seconds of a step, and of entering and of leaving the recorder's context."""
        start = now()
        if recorder is None:
            self._gradients()
            entered, left = start, now()
            scored = left
        else:
            with recorder.step(number, self.prompts):
                entered = now()
                self._gradients()
                scored = now()
            left = now()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"step": now() - start, "entering": entered - start, "leaving": left - scored}

    def _gradients(self) -> None:
        for ids in self._batches:
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / len(self._batches)).backward()


def now() -> float:
    """Seconds, once the device has done all its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def step_rows(loop: Loop, folder: Path, recorded: int, repeat: int) -> Iterator[Row]:
    """Yields a row for each way of recording; the first is without a recorder."""
    loop.step()  # warms up
    armed = record.trainer(loop.model, str(folder), sequences=recorded, every=NOT_THIS_STEP)
    times: dict[str, list[Seconds]] = {"off": [], "armed, not recording": []}
    for number in range(1, repeat + 1):
        # In turns, so that a change of the clock affects both.
        times["off"].append(loop.step())
        times["armed, not recording"].append(loop.step(armed, number))
    armed.close()
    off = statistics.median(some["step"] for some in times["off"])
    for name, some in times.items():
        yield medians(name, some, off)
    yield recording_row(loop, folder, recorded, False, 2, off)
    yield recording_row(loop, folder, recorded, True, 1, off)


def medians(name: str, times: list[Seconds], off: float) -> Row:
    """A row with the median of each kind of seconds. off: seconds of a step without a recorder."""
    median = {kind: statistics.median(some[kind] for some in times) for kind in times[0]}
    row: Row = {"recorder": name, "ratio to off": median["step"] / off}
    return row | {f"{kind}, s": seconds for kind, seconds in median.items()}


def recording_row(
    loop: Loop, folder: Path, recorded: int, weights: bool, steps: int, off: float
) -> Row:
    """The row of steps that record `recorded` sequences, with the weights or without."""
    recorder = record.trainer(loop.model, str(folder), sequences=recorded, every=1, weights=weights)
    times = []
    for number in range(steps):
        times.append(loop.step(recorder, number))
        shard = step_folder(folder, number) / "rank-0"
        found, size = load_record(RecordingRecord, shard / RECORDING), size_of(shard)
        tapped = len(TokenBatch.load(shard / "tokens.parquet").samples)
        shutil.rmtree(shard.parent)
    recorder.close()
    saved = "with the weights" if weights else "without the weights"
    name = f"recording {len(found.chosen)} of {found.seen}, {saved}"
    return medians(name, times, off) | {"sequences tapped": tapped, "GB written": size / 1e9}


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def byte_row(shape: str, folder: Path, tokens: int) -> Row:
    """The bytes of one layer for one sequence, by arithmetic and measured."""
    config_of(f"{shape}:layers=1").save_pretrained(folder)
    in_layer = [s for s in model_sites(read_shape(folder)) if s.layer == 0]
    values = VALUE_BYTES * tokens * sum(site.features for site in in_layer)
    rows = ROW_BYTES * tokens * len(in_layer)
    row: Row = {"layer of": shape, "tokens of a sequence": tokens, "operators": len(in_layer)}
    row |= {"values, MB": values / 1e6, "rows, MB": rows / 1e6}
    try:
        one, two = (recorded_bytes(f"{shape}:layers={n}", folder / f"{n}", tokens) for n in (1, 2))
    except BadOption as error:
        return row | {"measured, MB": f"{error}"}
    measured = (two - one) / BYTES_SEQUENCES
    return row | {"measured, MB": measured / 1e6, "ratio": measured / (values + rows)}


def recorded_bytes(shape: str, folder: Path, tokens: int) -> int:
    """The bytes of a recording of all rows of some sequences, without weights."""
    model = make_model(config_of(shape), "hf")
    ids = random_ids(model.config.vocab_size, BYTES_SEQUENCES, tokens)
    recorder = record.trainer(model, str(folder), every=1, budget=UNLIMITED, weights=False)
    with recorder.step(0, prompts_of(ids)), torch.no_grad():
        for each in ids.to(DEVICE):
            model(input_ids=each[None], use_cache=False)
    recorder.close()
    return size_of(folder)


def table(rows: list[Row]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)
    for row in rows:
        values = [row.get(column, "") for column in columns]
        cells = [f"{v:.4g}" if isinstance(v, float) else f"{v}" for v in values]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help="SHAPE[:layers=N], or a folder with a config.json")
    parser.add_argument("--trainer", choices=("hf", "fsdp"), default="hf")
    parser.add_argument("--sequences", type=int, default=64, help="of a step")
    parser.add_argument("--recorded", type=int, default=8, help="of these sequences")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--repeat", type=int, default=3, help="steps off and armed")
    parser.add_argument(
        "--bytes", nargs="*", default=["llama-3-8b", "qwen3-30b-a3b"], metavar="SHAPE"
    )
    parser.add_argument("--out", type=Path, help="a file for the same in JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.trainer == "fsdp":
        torch.distributed.init_process_group(
            "nccl" if DEVICE.type == "cuda" else "gloo",
            store=torch.distributed.HashStore(), rank=0, world_size=1,
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="record-cost-") as work:
        config = config_of(options.shape)
        ids = random_ids(config.vocab_size, options.sequences, options.tokens)
        loop = Loop(make_model(config, options.trainer), ids, options.batch)
        steps = list(step_rows(loop, Path(work) / "steps", options.recorded, options.repeat))
        del loop
        gc.collect()
        layers = [byte_row(name, Path(work) / name, options.tokens) for name in options.bytes]
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    asked = {k: v for k, v in vars(options).items() if k not in ("out", "bytes")}
    report = {**asked, "device": device, "torch": torch.__version__}
    if options.out:
        text = json.dumps({**report, "steps": steps, "bytes": layers}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    print(", ".join(f"{name} {value}" for name, value in report.items()), end="\n\n")
    print(*table(steps), sep="\n")
    if layers:
        print("", *table(layers), sep="\n")
    if options.trainer == "fsdp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
