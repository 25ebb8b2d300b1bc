"""`rlk-align monitor --output wandb=FOLDER` with the real package: its file, read back."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlk_align.cli.monitor_outputs import StepOutputs
from rlk_align.cli.outputs import OutputTarget
from rlk_align.logs.monitor.export import scalars
from rlk_align.logs.monitor.run_monitor import RunMonitor

pytest.importorskip("wandb")


def test_every_step_is_in_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    monitor = RunMonitor()
    with StepOutputs([OutputTarget("wandb", tmp_path / "out")]) as written:
        records = []
        for step in (3, 4, 7):
            rollout = -rng.exponential(size=(4, 32))
            record = monitor.arrays(
                step, rollout, rollout + 0.01 * rng.normal(size=(4, 32)), np.ones((4, 32))
            )
            written.add("/runs/first", record)
            records.append(record)
    logged = history(next((tmp_path / "out").rglob("*.wandb")))
    assert [row["step"] for row in logged] == [3, 4, 7]
    for row, record in zip(logged, records, strict=True):
        wanted = {f"runs_first/{name}": value for name, value in scalars(record).items()}
        assert {name: row[name] for name in wanted} == wanted
        assert len(wanted) > 50


def history(path: Path) -> list[dict]:
    """The rows that were logged. wandb's own process may write on after `finish`."""
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(100):
        records = [Record.FromString(data) for data in chunks(path.read_bytes())]
        if any(r.WhichOneof("record_type") == "exit" for r in records):
            break
        time.sleep(0.1)
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


HEAD, BLOCK = 7, 32768


def chunks(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind a head of 7 bytes: blocks of 32 KiB, in which a piece has
    a checksum (4 bytes), a length (2) and a type (1: whole, 2: first, 3: middle, 4: last)."""
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):
            yield parts
            parts = b""
