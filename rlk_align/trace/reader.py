"""Reads a trace, site by site, and refuses one that is not what was written."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open

from rlk_align.errors import CorruptTrace
from rlk_align.prompts import TokenBatch
from rlk_align.trace.schema import (
    ROWS_SCHEMA,
    WEIGHTS_SCHEMA,
    PassRecord,
    TraceRecord,
    load_record,
)


@dataclass(frozen=True, slots=True)
class SiteRows:
    """What a pass recorded of one site; arrays of length N in the order of capture."""

    sample: np.ndarray
    position: np.ndarray
    digest: np.ndarray
    """int64 `[N, 2]`."""
    norm: np.ndarray
    """L2 norm of each row's finite entries, float64; 0 in digest-only passes."""
    nonfinite: np.ndarray
    """NaN or Inf entries in each row; 0 in digest-only passes."""
    shard: np.ndarray
    """Which values file holds the row, -1 for none."""
    index: np.ndarray
    """The row's number in that file's tensor."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One canonical parameter as the live engine held it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


class PassReader:
    """One complete pass of a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = load_record(PassRecord, folder / "pass.json")
        self.record.check_sizes(folder)

    @cached_property
    def _checked(self) -> Path:
        """The folder, once its files are known to be the ones that were written."""
        self.record.check_contents(self.folder)
        return self.folder

    @cached_property
    def _table(self) -> pq.ParquetFile:
        path = self._checked / "rows.parquet"
        try:
            table = pq.ParquetFile(path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise CorruptTrace(f"{path} cannot be read: {error}") from error
        if not table.schema_arrow.equals(ROWS_SCHEMA):
            raise CorruptTrace(f"{path} has other columns than a trace")
        return table

    @cached_property
    def _row_groups(self) -> dict[str, list[int]]:
        """Every row group holds rows of one site: the writer sees to that."""
        groups: dict[str, list[int]] = {}
        metadata = self._table.metadata
        for i in range(metadata.num_row_groups):
            statistics = metadata.row_group(i).column(0).statistics
            names = {statistics.min, statistics.max} if statistics is not None else set()
            if len(names) != 1:
                raise CorruptTrace(f"{self.folder / 'rows.parquet'}: row group {i} mixes sites")
            groups.setdefault(names.pop(), []).append(i)
        return groups

    def rows(self, site: str) -> SiteRows | None:
        """The rows of a site, or None where the pass has none."""
        groups = self._row_groups.get(site)
        if not groups:
            return None
        try:
            table = self._table.read_row_groups(groups)
        except (OSError, pa.ArrowException) as error:
            raise CorruptTrace(f"{self.folder / 'rows.parquet'}: {site}: {error}") from error

        def column(name: str, missing: int) -> np.ndarray:
            return table[name].fill_null(missing).to_numpy()

        return SiteRows(
            sample=column("sample", -1).astype(np.int64),
            position=column("position", -1).astype(np.int64),
            digest=np.stack([column("digest_0", 0), column("digest_1", 0)], axis=1),
            norm=column("norm", 0),
            nonfinite=column("nonfinite", 0),
            shard=column("shard", -1),
            index=column("index", -1),
        )

    def values(self, site: str, rows: SiteRows, at: np.ndarray) -> torch.Tensor:
        """Values `[len(at), F]` of the rows numbered `at`, in the engine's dtype.

        Raises CorruptTrace where a file is damaged.
        """
        record = self.record.sites.get(site)
        if record is None:
            raise CorruptTrace(f"{self.folder}/pass.json does not know {site}")
        out = torch.empty(len(at), record.features, dtype=getattr(torch, record.dtype))
        for shard in np.unique(rows.shard[at]):
            path = self._checked / f"values-{shard:05d}.safetensors"
            here = np.flatnonzero(rows.shard[at] == shard)
            index = rows.index[at][here]
            low, high = int(index.min()), int(index.max()) + 1
            try:
                with safe_open(path, framework="pt") as file:
                    block = file.get_slice(site)[low:high]
                out[torch.from_numpy(here)] = block[torch.from_numpy(index - low)]
            except (OSError, SafetensorError, IndexError, RuntimeError) as error:
                raise CorruptTrace(f"{path}: {site}: {error}") from error
        return out


class Trace:
    """One engine's capture."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = load_record(TraceRecord, folder / "trace.json")

    @cached_property
    def tokens(self) -> TokenBatch:
        return TokenBatch.load(self.folder / "tokens.parquet")

    @cached_property
    def weights(self) -> dict[str, Weight]:
        path = self.folder / "weights.parquet"
        try:
            table = pq.read_table(path, page_checksum_verification=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CorruptTrace(f"{path} cannot be read: {error}") from error
        if not table.schema.equals(WEIGHTS_SCHEMA):
            raise CorruptTrace(f"{path} has other columns than a table of weights")
        return {
            row["name"]: Weight(row["name"], tuple(row["shape"]), row["dtype"], row["digest"])
            for row in table.to_pylist()
        }

    def has_pass(self, name: str) -> bool:
        return (self.folder / name / "pass.json").is_file()

    def read_pass(self, name: str) -> PassReader:
        """Raises CorruptTrace where the pass is missing or incomplete."""
        return PassReader(self.folder / name)
