"""Writes one pass of a trace while the engine runs."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from rlk_align.digest import digest_rows, row_statistics
from rlk_align.trace.schema import (
    ROWS_SCHEMA,
    DtypeName,
    FileRecord,
    PassRecord,
    SiteRecord,
    save_record,
    writing,
)

FLUSH_BYTES = 1 << 27

KeepValues = Callable[[str, np.ndarray, np.ndarray], np.ndarray]
"""(site, samples `[N]`, positions `[N]`) -> which rows keep their values, bool `[N]`."""

Buffered = tuple[torch.Tensor, np.ndarray, np.ndarray]


def _dtype_name(rows: torch.Tensor) -> DtypeName:
    names = {getattr(torch, name): name for name in get_args(DtypeName)}
    return names[rows.dtype]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Many small reductions on cached blocks: on a shared CPU the threads of a pool would mostly
    wait for each other. The engine gets its number of threads back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PassWriter:
    """Collects rows site by site, and writes them in blocks of about FLUSH_BYTES.

    The folder appears under its final name only when the pass is complete; an interrupted
    pass leaves `PASS.partial`, which the next attempt replaces.
    """

    def __init__(self, folder: Path, keep: KeepValues, statistics: bool = True) -> None:
        """`statistics`: whether rows get their norm, magnitude and count of NaN and Inf."""
        self._final = folder
        self._folder = folder.with_name(folder.name + ".partial")
        self._keep = keep
        self._statistics = statistics
        self._buffers: dict[str, list[Buffered]] = {}
        self._buffered_bytes = 0
        self._shards = 0
        self._sites: dict[str, SiteRecord] = {}
        self._started = time.perf_counter()
        with writing(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._table = pq.ParquetWriter(
                self._folder / "rows.parquet", ROWS_SCHEMA, write_page_checksum=True
            )

    def __enter__(self) -> "PassWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and self._table.is_open:
            # The pass failed: its own error matters, not one about closing half a table.
            try:
                self._table.close()
            except (OSError, pa.ArrowException):
                return

    def add(self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray) -> None:
        """Rows `[N, F]` of a site at (sample, position), int `[N]` each.

        The rows are copied: engines reuse and overwrite their buffers.
        """
        assert rows.dim() == 2, f"{site}: {tuple(rows.shape)}"
        assert rows.shape[0] == len(sample) == len(position), (site, rows.shape, len(sample))
        if not len(sample):
            return
        self._buffers.setdefault(site, []).append((rows.detach().clone(), sample, position))
        self._buffered_bytes += rows.numel() * rows.element_size()
        if self._buffered_bytes >= FLUSH_BYTES:
            self._flush()

    def finish(self, unexposed: dict[str, str]) -> None:
        """Writes what is left and gives the folder its final name."""
        seconds = time.perf_counter() - self._started
        self._flush()
        with writing(self._folder):
            self._table.close()
            files = {p.name: FileRecord.of(p) for p in sorted(self._folder.iterdir())}
        record = PassRecord(sites=self._sites, unexposed=unexposed, files=files, seconds=seconds)
        save_record(record, self._folder / "pass.json")
        with writing(self._final):
            shutil.rmtree(self._final, ignore_errors=True)
            os.replace(self._folder, self._final)

    def _flush(self) -> None:
        values: dict[str, torch.Tensor] = {}
        buffers, self._buffers, self._buffered_bytes = self._buffers, {}, 0
        with writing(self._folder), _one_thread():
            for site, parts in buffers.items():
                rows = torch.cat([r for r, _, _ in parts])
                sample = np.concatenate([s for _, s, _ in parts])
                position = np.concatenate([p for _, _, p in parts])
                self._write_rows(site, rows, sample, position, values)
            if values:
                save_file(values, self._folder / f"values-{self._shards:05d}.safetensors")
                self._shards += 1

    def _write_rows(
        self,
        site: str,
        rows: torch.Tensor,
        sample: np.ndarray,
        position: np.ndarray,
        values: dict[str, torch.Tensor],
    ) -> None:
        count = len(sample)
        digest = digest_rows(rows).cpu().numpy()
        statistics: list[pa.Array] = [pa.nulls(count)] * 3
        if self._statistics:
            norm, absmax, nonfinite = row_statistics(rows).cpu().numpy().T
            statistics = [pa.array(norm), pa.array(absmax), pa.array(nonfinite.astype(np.int64))]
        kept = self._keep(site, sample, position)
        if kept.any():
            values[site] = rows[torch.from_numpy(kept)].cpu().contiguous()
        index = np.cumsum(kept) - 1
        columns = [
            pa.array([site]).take(pa.array(np.zeros(count, dtype=np.int64))),
            pa.array(sample.astype(np.int32)),
            pa.array(position.astype(np.int32)),
            pa.array(digest[:, 0]),
            pa.array(digest[:, 1]),
            *[s.cast(f.type) for s, f in zip(statistics, list(ROWS_SCHEMA)[5:8], strict=True)],
            pa.array(np.full(count, self._shards, dtype=np.int32), mask=~kept),
            pa.array(index, mask=~kept),
        ]
        self._table.write_table(pa.Table.from_arrays(columns, schema=ROWS_SCHEMA))
        before = self._sites[site].rows if site in self._sites else 0
        self._sites[site] = SiteRecord(
            dtype=_dtype_name(rows),
            features=rows.shape[1],
            rows=before + count,
        )
