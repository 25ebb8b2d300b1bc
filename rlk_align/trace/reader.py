"""Reads a trace, site by site, and refuses files that were changed after they were written."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open

from rlk_align.errors import CorruptTrace
from rlk_align.model.prompts import TokenBatch
from rlk_align.trace.checksums import check_files, check_sizes
from rlk_align.trace.records import REPAIR, load_record
from rlk_align.trace.schema import PassRecord, TraceRecord, checked_trace, finished_passes
from rlk_align.trace.tables import ROWS_SCHEMA, WEIGHTS_SCHEMAS, with_added


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The rows of one site in a pass: arrays of length N in the order of capture."""

    sample: np.ndarray
    position: np.ndarray
    digest: np.ndarray
    """int64 `[N, 2]`."""
    absmax: np.ndarray
    """The largest magnitude of each row's finite entries, float64; 0 in digest-only passes."""
    norm: np.ndarray
    """The L2 norm of each row's finite entries, float64; 0 in digest-only passes."""
    nonfinite: np.ndarray
    """The number of NaN or Inf entries in each row; 0 in digest-only passes."""
    shard: np.ndarray
    """The number of the values file with the row, -1 for none."""
    index: np.ndarray
    """The row's number in that file's tensor."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One canonical parameter of the live engine."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    shards: list[tuple[int, int, int, int]]
    """(rank, dimension, start, stop); empty if each rank has the whole parameter."""
    replicas: list[str]
    """Digests of the copies of ranks 1, 2, ...; empty for a rank that has none."""
    casts: Mapping[str, str] = field(default_factory=dict)
    """Dtype -> the digest of the parameter rounded to it."""
    derived: str = ""
    """The module that computes with a copy of the parameter, whose values these are; empty if the
    forward reads the parameter itself."""
    held: str = ""
    """The digest of the parameter beside such a copy; empty if there is none."""

    @property
    def copies(self) -> dict[int, str]:
        """Rank -> digest of its copy, for the ranks that have one."""
        copies = {0: self.digest} | {r: d for r, d in enumerate(self.replicas, 1) if d}
        holders = {rank for rank, *_ in self.shards} or copies.keys()
        return {rank: digest for rank, digest in copies.items() if rank in holders}

    def rounded(self, dtype: str) -> "Weight | None":
        """The parameter rounded to a narrower dtype; None if that was not recorded. A replica that
        differs from rank 0's keeps its digest."""
        if dtype not in self.casts:
            return None
        digest = {self.digest: self.casts[dtype]}
        replicas = [digest.get(r, r) for r in self.replicas]
        return replace(self, dtype=dtype, digest=self.casts[dtype], replicas=replicas, casts={})


def _is_rows(name: str) -> bool:
    return name.startswith("rows.") and name.endswith(".parquet")


class PassReader:
    """One complete pass of a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = load_record(PassRecord, folder / "pass.json")
        check_sizes(folder, self.record.files)

    @cached_property
    def _checked(self) -> Path:
        """The folder, after its files were compared with their checksums."""
        check_files(self.folder, self.record.files)
        return self.folder

    @cached_property
    def _tables(self) -> list[pq.ParquetFile]:
        """A table for each part of the pass."""
        return [self._open(self._checked / n) for n in self.record.files if _is_rows(n)]

    def _open(self, path: Path) -> pq.ParquetFile:
        try:
            table = pq.ParquetFile(path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise CorruptTrace(f"{path} cannot be read: {error}") from error
        if not table.schema_arrow.equals(ROWS_SCHEMA):
            raise CorruptTrace(f"{path} does not have the columns of a trace")
        return table

    @cached_property
    def _row_groups(self) -> dict[str, dict[int, list[int]]]:
        """Site -> table -> row groups; the writer puts the rows of one site into each group."""
        groups: dict[str, dict[int, list[int]]] = {}
        for t, table in enumerate(self._tables):
            for i in range(table.metadata.num_row_groups):
                statistics = table.metadata.row_group(i).column(0).statistics
                names = {statistics.min, statistics.max} if statistics is not None else set()
                if len(names) != 1:
                    raise CorruptTrace(f"{self.folder}: row group {i} of table {t} mixes sites")
                groups.setdefault(names.pop(), {}).setdefault(t, []).append(i)
        return groups

    def rows(self, site: str) -> SiteRows | None:
        """The rows of a site; None if the pass has none."""
        groups = self._row_groups.get(site)
        if not groups:
            return None
        try:
            table = pa.concat_tables(
                self._tables[t].read_row_groups(numbers) for t, numbers in groups.items()
            )
        except (OSError, pa.ArrowException) as error:
            raise CorruptTrace(f"{self.folder}: rows of {site}: {error}") from error

        def column(name: str, missing: int) -> np.ndarray:
            return table[name].fill_null(missing).to_numpy()

        return SiteRows(
            sample=column("sample", -1).astype(np.int64),
            position=column("position", -1).astype(np.int64),
            digest=np.stack([column("digest_0", 0), column("digest_1", 0)], axis=1),
            absmax=column("absmax", 0),
            norm=column("norm", 0),
            nonfinite=column("nonfinite", 0),
            shard=column("shard", -1),
            index=column("index", -1),
        )

    def values(self, site: str, rows: SiteRows, at: np.ndarray) -> torch.Tensor:
        """Values `[len(at), F]` of the rows numbered `at`, in the engine's dtype.

        Raises CorruptTrace for a damaged file.
        """
        return self.values_at(site, rows.shard[at], rows.index[at])

    def values_at(self, site: str, shards: np.ndarray, index: np.ndarray) -> torch.Tensor:
        """Values `[N, F]` by the numbers of their values files and of the rows in the tensors."""
        record = self.record.sites.get(site)
        if record is None:
            raise CorruptTrace(f"{self.folder}/pass.json does not list {site}")
        out = torch.empty(len(index), record.features, dtype=getattr(torch, record.dtype))
        for shard in np.unique(shards):
            path = self._checked / f"values-{shard:05d}.safetensors"
            here = np.flatnonzero(shards == shard)
            low, high = int(index[here].min()), int(index[here].max()) + 1
            try:
                with safe_open(path, framework="pt") as file:
                    block = file.get_slice(site)[low:high]
                out[torch.from_numpy(here)] = block[torch.from_numpy(index[here] - low)]
            except (OSError, SafetensorError, IndexError, RuntimeError) as error:
                raise CorruptTrace(f"{path}: {site}: {error}") from error
        return out


class Trace:
    """One engine's capture."""

    def __init__(self, folder: Path) -> None:
        """Raises CorruptTrace if a file outside the passes is missing or was changed."""
        self.folder = folder
        self.checksums = checked_trace(folder)
        self.passes = finished_passes(self.checksums)
        self.record = load_record(TraceRecord, folder / "trace.json")
        self._readers: dict[str, PassReader] = {}

    @cached_property
    def tokens(self) -> TokenBatch:
        return TokenBatch.load(self.folder / "tokens.parquet")

    @cached_property
    def weights(self) -> dict[str, Weight]:
        columns = ["name", "shape", "dtype", "digest", "shards", "replicas", "derived", "held"]
        table = self._weights_table(columns)
        return {
            row["name"]: Weight(**row | {"shape": tuple(row["shape"]), "casts": casts})
            for row, casts in zip(table.to_pylist(), self._casts(), strict=True)
        }

    def _casts(self) -> list[dict[str, str]]:
        """For each parameter: dtype -> the digest of the parameter rounded to it."""
        casts = self._weights_table(["casts"])["casts"]
        fields = ((c.values.field("dtype"), c.values.field("digest")) for c in casts)
        return [dict(zip(*(f.to_pylist() for f in two), strict=True)) for two in fields]

    def weight_slices(self, name: str, cast: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Digests of a parameter's slices along dimensions 0 and 1, int64; the second may be empty.
        `cast`: one of its casts, to read the digests of the rounded parameter."""
        table = self._weights_table(["name", "rows", "columns", *(["casts"] if cast else [])])
        at = table["name"].to_pylist().index(name)
        if not cast:
            return tuple(table[c][at].values.to_numpy() for c in ("rows", "columns"))
        casts = table["casts"][at].values
        number = casts.field("dtype").to_pylist().index(cast)
        return tuple(casts.field(c)[number].values.to_numpy() for c in ("rows", "columns"))

    def weight_rows(self) -> dict[str, np.ndarray]:
        """Parameter -> digests of its slices along dimension 0, int64."""
        table = self._weights_table(["name", "rows"])
        rows = (row.values.to_numpy() for row in table["rows"])
        return dict(zip(table["name"].to_pylist(), rows, strict=True))

    def _weights_table(self, columns: list[str]) -> pa.Table:
        path = self.folder / "weights.parquet"
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                if not any(file.schema_arrow.equals(schema) for schema in WEIGHTS_SCHEMAS):
                    raise CorruptTrace(f"{path} does not have the columns of a table of weights")
                table = file.read([c for c in columns if c in file.schema_arrow.names])
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CorruptTrace(f"{path} cannot be read: {error}") from error
        return with_added(table, columns, file.metadata.num_rows)

    def has_pass(self, name: str) -> bool:
        return name in self.passes

    def read_pass(self, name: str) -> PassReader:
        """Raises CorruptTrace if the pass is missing, did not finish, or lacks a file."""
        if not self.has_pass(name):
            raise CorruptTrace(f"{self.folder} has no finished pass {name}", REPAIR)
        # All callers share a reader, which compares the files with their checksums once.
        if name not in self._readers:
            self._readers[name] = PassReader(self.folder / name)
        return self._readers[name]
