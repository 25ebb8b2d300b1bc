"""Copies a pass with other numbers of its samples."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlk_align.errors import CorruptTrace
from rlk_align.trace.checksums import FileRecord, check_files
from rlk_align.trace.records import load_record, save_record, writing
from rlk_align.trace.schema import Measured, PassRecord
from rlk_align.trace.tables import ROWS_SCHEMA
from rlk_align.trace.writer import COMPACT

M = TypeVar("M", bound=Measured)


def renumber_pass(source: Path, target: Path, numbers: Mapping[int, int]) -> None:
    """Copies a pass to a new folder. numbers: sample in `source` -> sample in `target`; rows of
    other samples are left out. Values are linked where the file system can. Raises CorruptTrace for
    a changed file, TraceNotWritten if the copy fails."""
    record = load_record(PassRecord, source / "pass.json")
    check_files(source, record.files)
    rows: dict[str, int] = {}
    with writing(target):
        target.mkdir(parents=True)
        for name in record.files:
            if name.endswith(".parquet"):
                _renumber_table(source / name, target / name, numbers, rows)
            else:
                _link(source / name, target / name)
        files = FileRecord.of_files(target, sorted(record.files))
    kept = {
        site: r.model_copy(update={"rows": rows[site]})
        for site, r in record.sites.items()
        if rows.get(site)
    }
    renumbered = record.model_copy(
        update={
            "sites": kept,
            "positions": _measured(record.positions, numbers),
            "boundaries": _measured(record.boundaries, numbers),
            "cached": {numbers[s]: n for s, n in record.cached.items() if s in numbers},
            "files": files,
        }
    )
    save_record(renumbered, target / "pass.json")


def _renumber_table(
    source: Path, target: Path, numbers: Mapping[int, int], rows: dict[str, int]
) -> None:
    """Copies a table of rows, group by group, and counts the rows of each site."""
    old = pa.array(list(numbers), ROWS_SCHEMA.field("sample").type)
    new = pa.array(list(numbers.values()), ROWS_SCHEMA.field("sample").type)
    try:
        table = pq.ParquetFile(source, page_checksum_verification=True)
        with pq.ParquetWriter(target, ROWS_SCHEMA, write_page_checksum=True, **COMPACT) as writer:
            for number in range(table.num_row_groups):
                group = table.read_row_group(number)
                at = pc.index_in(group["sample"], old)
                group = group.set_column(
                    1, ROWS_SCHEMA.field("sample"), new.take(at.combine_chunks())
                )
                group = group.filter(pc.is_valid(at))
                if group.num_rows:
                    site = group["site"][0].as_py()
                    rows[site] = rows.get(site, 0) + group.num_rows
                    writer.write_table(group)
    except pa.ArrowInvalid as error:
        raise CorruptTrace(f"{source} cannot be read: {error}") from error


def _measured(record: M, numbers: Mapping[int, int]) -> M:
    """The measurements with the new numbers of the wrong rows that remain."""
    first = [
        row.model_copy(update={"sample": numbers[row.sample]})
        for row in record.first
        if row.sample in numbers
    ]
    return record.model_copy(update={"first": first})


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
