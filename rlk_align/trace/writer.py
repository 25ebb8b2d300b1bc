"""Writes one pass of a trace while the engine runs."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from rlk_align.errors import EngineFailed
from rlk_align.model.rotary import Rotary
from rlk_align.results import Cell, GraphReplays
from rlk_align.trace.boundaries import BoundaryCheck
from rlk_align.trace.checksums import FileRecord
from rlk_align.trace.digest import digest_rows, row_statistics
from rlk_align.trace.positions import PositionCheck
from rlk_align.trace.records import load_record, save_record, writing
from rlk_align.trace.schema import (
    BoundaryRecord,
    CacheRecord,
    DtypeName,
    HeldRows,
    PartRecord,
    PassRecord,
    PositionRecord,
    SiteRecord,
    site_of,
    sites_of_parts,
)
from rlk_align.trace.tables import ROWS_SCHEMA

FLUSH_BYTES = 1 << 27

KeepValues = Callable[[str, np.ndarray, np.ndarray], np.ndarray]
"""(site, samples `[N]`, positions `[N]`) -> mask of the rows that keep their values, bool `[N]`."""

PART_SHARDS = 100_000
"""The largest number of values files of one part of a pass."""

COMPACT: dict[str, Any] = {
    # Readers find a site's row groups by their statistics.
    "write_statistics": ["site"],
    # Magnitudes in a low precision repeat; digests and norms almost never do.
    "use_dictionary": ["site", "absmax"],
    "column_encoding": dict.fromkeys(
        ("sample", "position", "nonfinite", "shard", "index"), "DELTA_BINARY_PACKED"
    ),
}
"""The options for writing a table of rows."""

Buffered = tuple[torch.Tensor, np.ndarray, np.ndarray]


def _dtype_name(rows: torch.Tensor) -> DtypeName:
    names = {getattr(torch, name): name for name in get_args(DtypeName)}
    return names[rows.dtype]


@dataclass(frozen=True, slots=True)
class Checks:
    """The measurements of a pass's rows."""

    rotary: Rotary | None = None
    """The rotary embedding, to measure the position by which each row was rotated."""
    heads: tuple[int, int, bool, str, str] | None = None
    """The arguments of `BoundaryCheck`, to measure where each sequence begins."""
    cache: CacheRecord | None = None
    """The quantised cache that attention reads, if there is one."""


NO_CHECKS = Checks()


@contextmanager
def one_thread() -> Iterator[None]:
    """Sets torch's number of threads to 1 while entered: in many small reductions on cached blocks,
    the threads of a shared CPU would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PassWriter:
    """Collects rows site by site, and writes them in blocks of about FLUSH_BYTES.

    Several processes may each write a part of one pass: part 0 creates the folder before the others
    start, and finishes it after they have closed their parts. The folder has its final name only
    when the pass is complete; an interrupted pass leaves `PASS.partial`, which the next attempt
    replaces.
    """

    def __init__(
        self,
        folder: Path,
        keep: KeepValues,
        statistics: bool = True,
        checks: Checks = NO_CHECKS,
        vocab: int | None = None,
        part: int = 0,
    ) -> None:
        """`statistics`: whether to record each row's norm, magnitude and count of NaN and Inf;
        `checks`: further measurements; `vocab`: the number of columns of logits that belong to
        tokens, after which there is padding."""
        self._final = folder
        self._folder = folder.with_name(folder.name + ".partial")
        self._keep = keep
        self._statistics = statistics
        self._checks = checks
        self._vocab = vocab
        self._padding: Counter[str] = Counter()
        measurable = checks.rotary is not None and checks.rotary.tells_positions
        self._positions = PositionCheck(checks.rotary) if measurable and checks.rotary else None
        self._boundaries: BoundaryCheck | None = None
        if checks.heads:
            heads, kv_heads, sinks, *sites = checks.heads
            self._boundaries = BoundaryCheck(heads, kv_heads, sinks, *sites, cache=checks.cache)
        self._part = part
        self._buffers: dict[str, list[Buffered]] = {}
        self._buffered_bytes = 0
        self._shards = part * PART_SHARDS
        self._sites: dict[str, SiteRecord] = {}
        self._overwritten: Counter[str] = Counter()
        self._held: list[HeldRows] = []
        self._cached: dict[int, int] = {}
        self._started = time.perf_counter()
        with writing(self._folder):
            if part == 0:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
            name = f"rows.{part}.parquet" if part else "rows.parquet"
            self._table = pq.ParquetWriter(
                self._folder / name, ROWS_SCHEMA, write_page_checksum=True, **COMPACT
            )

    def part(self, number: int) -> "Callable[[], PassWriter]":
        """A function that opens another part of this pass, in any process."""
        return partial(
            PassWriter,
            self._final,
            self._keep,
            self._statistics,
            self._checks,
            self._vocab,
            part=number,
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
            # The pass failed, so its error matters, and not an error on closing the table.
            try:
                self._table.close()
            except (OSError, pa.ArrowException):
                return

    def __call__(
        self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        """Takes rows `[N, F]` of a site at (sample, position), int `[N]` each, and copies them,
        because engines overwrite their buffers."""
        assert rows.dim() == 2, f"{site}: {tuple(rows.shape)}"
        assert rows.shape[0] == len(sample) == len(position), (site, rows.shape, len(sample))
        if not len(sample):
            return
        if site == "logits" and self._vocab and rows.shape[1] > self._vocab:
            self._padding[site] = rows.shape[1] - self._vocab
            rows = rows[:, : self._vocab]
        for check in (self._positions, self._boundaries):
            if check:
                check.see(site, rows, sample, position)
        self._buffers.setdefault(site, []).append((rows.detach().clone(), sample, position))
        self._buffered_bytes += rows.numel() * rows.element_size()
        if self._buffered_bytes >= FLUSH_BYTES:
            self._flush()

    def overwritten(self, site: str, rows: int) -> None:
        """Takes the number of live rows of a site that an intervention overwrote."""
        self._overwritten[site] += rows

    def computes(self, rank: int, sample: int, rows: range, sharing: Sequence[int] = ()) -> None:
        """Records that a rank computes these rows of a sample; several ranks may compute the same
        rows. `sharing`: the ranks that share the features of these rows; empty for all ranks."""
        run = HeldRows(
            sample=sample, start=rows.start, stop=rows.stop, rank=rank, sharing=list(sharing)
        )
        self._held.append(run)

    def took_from_cache(self, sample: int, tokens: int) -> None:
        """Records that the engine, by its own count, did not compute the first tokens of a sample,
        because its cache had them from another one."""
        if tokens:
            self._cached[sample] = tokens

    def close(self) -> None:
        """Writes the remaining rows and the record of this part."""
        seconds = time.perf_counter() - self._started
        self._flush()
        with writing(self._folder):
            self._table.close()
        positions = self._positions.record() if self._positions else PositionRecord()
        boundaries = self._boundaries.record() if self._boundaries else BoundaryRecord()
        record = PartRecord(
            sites=self._sites,
            positions=positions,
            boundaries=boundaries,
            overwritten=self._overwritten,
            held=self._held,
            cached=self._cached,
            seconds=seconds,
        )
        save_record(record, self._folder / f"part-{self._part}.json")

    def finish(
        self,
        unexposed: dict[str, str],
        graphs: GraphReplays | None = None,
        parted: Sequence[Cell] = (),
    ) -> None:
        """Closes part 0, merges the records of all parts and gives the folder its final name."""
        self.close()
        paths = sorted(self._folder.glob("part-*.json"))
        parts = [load_record(PartRecord, path) for path in paths]
        with writing(self._folder):
            for path in paths:
                path.unlink()
            names = sorted(p.name for p in self._folder.iterdir())
            files = FileRecord.of_files(self._folder, names)
        record = PassRecord(
            sites=sites_of_parts((p.sites for p in parts), EngineFailed, "ranks"),
            positions=PositionRecord.together([p.positions for p in parts]),
            boundaries=BoundaryRecord.together([p.boundaries for p in parts]),
            unexposed=unexposed,
            overwritten=sum((Counter(p.overwritten) for p in parts), Counter()),
            held=[rows for p in parts for rows in p.held],
            cached={sample: tokens for p in parts for sample, tokens in p.cached.items()},
            graphs=graphs,
            parted=list(parted),
            files=files,
            seconds=max(p.seconds for p in parts),
        )
        save_record(record, self._folder / "pass.json")
        with writing(self._final):
            shutil.rmtree(self._final, ignore_errors=True)
            os.replace(self._folder, self._final)

    def _flush(self) -> None:
        values: dict[str, torch.Tensor] = {}
        buffers, self._buffers, self._buffered_bytes = self._buffers, {}, 0
        with writing(self._folder), one_thread():
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
        selected = self._keep(site_of(site), sample, position)
        if selected.any():
            values[site] = rows[torch.from_numpy(selected)].cpu().contiguous()
        index = np.cumsum(selected) - 1
        columns = [
            pa.array([site]).take(pa.array(np.zeros(count, dtype=np.int64))),
            pa.array(sample.astype(np.int32)),
            pa.array(position.astype(np.int32)),
            pa.array(digest[:, 0]),
            pa.array(digest[:, 1]),
            *[s.cast(f.type) for s, f in zip(statistics, list(ROWS_SCHEMA)[5:8], strict=True)],
            pa.array(np.full(count, self._shards, dtype=np.int32), mask=~selected),
            pa.array(index, mask=~selected),
        ]
        self._table.write_table(pa.Table.from_arrays(columns, schema=ROWS_SCHEMA))
        before = self._sites[site].rows if site in self._sites else 0
        self._sites[site] = SiteRecord(
            dtype=_dtype_name(rows),
            features=rows.shape[1],
            rows=before + count,
            padding=self._padding[site],
        )
