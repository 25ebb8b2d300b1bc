"""Times `rlk-align` on dumps of a million tokens, and on a neutral file that is larger.

    python scripts/time_dumps.py FOLDER [--large GIGABYTES]

It makes the dumps in FOLDER and prints the table of reports/dumps.md: CPU seconds, elapsed seconds
and the peak of memory of each process, and whether it imported torch.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from neutral_records import records
from simulate_dumps import healthy

from rlk_align.logs.dumps.sequences import Sequences

TOKENS = 1_000_000
_RUN = """
import atexit, sys
from pathlib import Path
from rlk_align.cli.main import main

def said():
    (peak,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    print("yes" if "torch" in sys.modules else "no", peak.split()[1], file=sys.stderr)

atexit.register(said)
main()
"""


def jsonl(run: Sequences, folder: Path) -> Path:
    path = folder / "neutral.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records(run)), encoding="utf-8")
    return path


def parquet(run: Sequences, folder: Path) -> Path:
    path = folder / "neutral.parquet"
    pq.write_table(pa.Table.from_pylist(list(records(run))), path)
    return path


def nemo_rl(run: Sequences, folder: Path) -> Path:
    lines = []
    for k in range(len(run)):
        at = slice(run.offsets[k], run.offsets[k + 1])
        prompt, ids = int(run.prompt_lengths[k]), run.token_ids[at].tolist()
        mask = [0.0] * prompt + [1.0] * (len(ids) - prompt)
        sides = {
            "generation_logprobs": np.nan_to_num(run.rollout[at]).tolist(),
            "prev_logprobs": np.nan_to_num(run.train[at]).tolist(),
        }
        row = {
            "idx": k,
            "token_ids": ids,
            "token_loss_mask": mask,
            "sample_loss_mask": 1.0,
            **sides,
        }
        lines.append(json.dumps(row | {"input_lengths": len(ids)}) + "\n")
    path = folder / "train_data_step1.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def prime_rl(run: Sequences, folder: Path) -> Path:
    step = folder / "token_exports" / "step_0"
    step.mkdir(parents=True)
    with (step / "rank_0.jsonl").open("w", encoding="utf-8") as file:
        for k in range(len(run)):
            at = slice(run.offsets[k], run.offsets[k + 1])
            total, prompt = int(run.offsets[k + 1] - run.offsets[k]), int(run.prompt_lengths[k])
            row = {
                **dict.fromkeys(("step", "export_step", "rank", "micro_sequence_idx"), 0),
                **{"schema_version": 1, "micro_step": k, "export_sequence_idx": k, "run_id": None},
                "env_name": "math",
                "token_ids": run.token_ids[at].tolist(),
                "position_ids": list(range(total)),
                "loss_mask": [False] * prompt + [True] * (total - prompt),
                **{"advantages": [0.5] * total, "rewards": [1.0] * total},
                "inference_logprobs": np.nan_to_num(run.rollout[at]).tolist(),
                "trainer_logprobs": np.nan_to_num(run.train[at], nan=-11.9).tolist(),
                **{"entropy": [0.7] * total, "mismatch_kl": [0.0] * total},
                "is_masked": [False] * total,
            }
            file.write(json.dumps(row) + "\n")
    (step / "STABLE").touch()
    return folder / "token_exports"


def _columns(run: Sequences) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for k in range(len(run)):
        at = slice(run.offsets[k], run.offsets[k + 1])
        prompt = int(run.prompt_lengths[k])
        length = int(run.offsets[k + 1] - run.offsets[k])
        row = {
            "tokens": torch.from_numpy(run.token_ids[at].copy()),
            "total_lengths": length,
            "response_lengths": length - prompt,
            "loss_masks": torch.ones(length - prompt, dtype=torch.int64),
            "rollout_log_probs": torch.from_numpy(run.rollout[at][prompt:]).float(),
            "log_probs": torch.from_numpy(run.train[at][prompt:]).float(),
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def slime(run: Sequences, folder: Path) -> Path:
    columns = _columns(run) | {"rewards": [0.0] * len(run)}
    samples = [
        {"data_parallel_rank": 0, "sample_index": k, "rollout_position": k}
        | {name: column[k] for name, column in columns.items()}
        for k in range(len(run))
    ]
    shards = [{"rank": 0, "micro_batch_indices": [[k] for k in range(len(run))]}]
    value = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples}
    path = folder / "slime" / "train_data" / "0.pt"
    path.parent.mkdir(parents=True)
    torch.save(value | {"dp_shards": shards, "raw_reward": [0.0] * len(run)}, path)
    return path


def miles(run: Sequences, folder: Path) -> Path:
    path = folder / "miles" / "train_data" / "0_0.pt"
    path.parent.mkdir(parents=True)
    value = {"rollout_id": 0, "rank": 0, "rollout_data": _columns(run)}
    torch.save(value | {"cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}, path)
    return path.parent


FORMATS: dict[str, tuple[str, Callable[[Sequences, Path], Path]]] = {
    "jsonl": ("jsonl", jsonl),
    "jsonl (Parquet)": ("jsonl", parquet),
    "nemo-rl": ("nemo-rl", nemo_rl),
    "prime-rl": ("prime-rl", prime_rl),
    "slime": ("slime", slime),
    "miles": ("miles", miles),
}
"""Row of the table -> (the format's name, what writes it)."""


def timed(label: str, log: Path, *words: str) -> None:
    """Runs a command and prints its row."""
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        child = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", _RUN, *words],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, file.fileno(), n) for n in (1, 2)],
        )
        _, status, usage = os.wait4(child, 0)
    said = log.read_text(encoding="utf-8").splitlines()
    if status:
        print("\n".join(said[-20:]), file=sys.stderr)
    # The kernel's own peak, ru_maxrss, is that of this process before the command was loaded.
    torch_imported, peak = said[-1].split()
    cpu, wall = usage.ru_utime + usage.ru_stime, time.monotonic() - started
    row = (f"`{label}`", f"{cpu:.1f} s", f"{wall:.1f} s", f"{int(peak) / 1000:.0f} MB")
    code = os.waitstatus_to_exitcode(status)
    print(f"| {' | '.join((*row, torch_imported, str(code)))} |", flush=True)


def large(run: Sequences, path: Path, size: int) -> None:
    """Writes the sequences again and again, as new ones of later steps, up to so many bytes."""
    lines = [json.dumps(r) + "\n" for r in records(run)]
    with path.open("w", encoding="utf-8") as file:
        for k in count(1):
            for line in lines:
                later = line.replace('"id": "s', f'"id": "{k}-s', 1)
                file.write(later.replace('"step": ', f'"step": {k}', 1))
            if file.tell() >= size:
                return


def main() -> None:
    """Makes the dumps, runs the commands and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--large", type=float, default=1.1)
    asked = parser.parse_args()
    folder: Path = asked.folder
    folder.mkdir(parents=True)
    run, log = healthy(0, TOKENS), folder / "log.txt"
    print(f"{run.compared.sum():,} compared tokens of {len(run):,} sequences\n")
    print("| command | CPU | elapsed | peak | torch imported | exit code |")
    print("| --- |" + " ---: |" * 5)
    for label, (format, write) in FORMATS.items():
        path, out = write(run, folder), folder / f"run-{label}"
        timed(f"import {label}", log, "import", format, str(path), "-o", str(out))
    made = str(folder / "run-jsonl")
    timed("explain", log, "explain", made)
    timed("gate", log, "gate", made)
    timed("monitor --once", log, "monitor", "--once", made)
    timed("report html", log, "report", "html", made, "-o", str(folder / "page.html"))
    big, out = folder / "large.jsonl", folder / "run-large"
    large(run, big, int(asked.large * 1e9))
    size = f"{big.stat().st_size / 1e9:.2f} GB"
    timed(f"import jsonl, {size}", log, "import", "jsonl", str(big), "-o", str(out))
    timed(f"explain, {size}", log, "explain", str(out))
    timed(f"monitor --once, {size}", log, "monitor", "--once", str(out))


if __name__ == "__main__":
    main()
