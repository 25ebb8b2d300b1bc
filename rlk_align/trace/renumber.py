"""Copies a pass, or the shards of one, with other numbers of its samples."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlk_align.errors import CorruptTrace
from rlk_align.trace.checksums import FileRecord, check_files
from rlk_align.trace.records import load_record, save_record, writing
from rlk_align.trace.schema import (
    BoundaryRecord,
    Measured,
    PassRecord,
    PositionRecord,
    sites_of_parts,
)
from rlk_align.trace.tables import ROWS_SCHEMA
from rlk_align.trace.writer import COMPACT, PART_SHARDS

M = TypeVar("M", bound=Measured)


def renumber_passes(sources: Sequence[tuple[Path, Mapping[int, int]]], target: Path) -> None:
    """Copies a pass, or the shards of one that several ranks wrote, to a new folder. sources: the
    folder of each, and sample there -> sample in `target`; rows of other samples are left out.
    Values are linked where the file system can. Raises CorruptTrace for a changed file or for
    shards that disagree, TraceNotWritten if the copy fails."""
    records = [load_record(PassRecord, source / "pass.json") for source, _ in sources]
    rows: list[dict[str, int]] = []
    with writing(target):
        target.mkdir(parents=True)
        for part, ((source, numbers), record) in enumerate(zip(sources, records, strict=True)):
            check_files(source, record.files)
            rows.append(_copy(source, target, numbers, record, part))
        files = FileRecord.of_files(target, sorted(p.name for p in target.iterdir()))
    parts = [
        _renumbered(record, numbers, of_sites)
        for record, (_, numbers), of_sites in zip(records, sources, rows, strict=True)
    ]
    save_record(_together(parts, target, files), target / "pass.json")


def _copy(
    source: Path, target: Path, numbers: Mapping[int, int], record: PassRecord, part: int
) -> dict[str, int]:
    """Copies the files of one shard, as that part of the pass; returns the rows of each site."""
    rows: dict[str, int] = {}
    first = part * PART_SHARDS
    for name in record.files:
        if name.endswith(".parquet"):
            renamed = f"rows.{part}.parquet" if part else name
            assert part == 0 or name == "rows.parquet", (source, name)
            _renumber_table(source / name, target / renamed, numbers, rows, first)
        else:
            number = int(name.removeprefix("values-").removesuffix(".safetensors"))
            _link(source / name, target / f"values-{first + number:05d}.safetensors")
    return rows


def _renumbered(
    record: PassRecord, numbers: Mapping[int, int], rows: Mapping[str, int]
) -> PassRecord:
    """The record of a shard with the new numbers of its samples."""
    kept = {
        site: r.model_copy(update={"rows": rows[site]})
        for site, r in record.sites.items()
        if rows.get(site)
    }
    held = [
        h.model_copy(update={"sample": numbers[h.sample]})
        for h in record.held
        if h.sample in numbers
    ]
    return record.model_copy(
        update={
            "sites": kept,
            "positions": _measured(record.positions, numbers),
            "boundaries": _measured(record.boundaries, numbers),
            "held": held,
            "cached": {numbers[s]: n for s, n in record.cached.items() if s in numbers},
        }
    )


def _together(
    parts: Sequence[PassRecord], target: Path, files: dict[str, FileRecord]
) -> PassRecord:
    """The record of the pass of which these are parts. Raises CorruptTrace if they disagree on the
    dtype or the width of a site."""
    if len(parts) == 1:
        return parts[0].model_copy(update={"files": files})
    who = f"{target}: the shards of a step"
    sites = sites_of_parts((part.sites for part in parts), CorruptTrace, who)
    # Shards without rows measured nothing.
    measured = [part for part in parts if part.sites] or parts[:1]
    return PassRecord(
        sites=sites,
        positions=PositionRecord.together([p.positions for p in measured if p.positions.checked]),
        boundaries=BoundaryRecord.together([p.boundaries for p in measured]),
        unexposed={site: why for p in parts for site, why in p.unexposed.items()},
        held=[held for p in parts for held in p.held],
        cached={sample: n for p in parts for sample, n in p.cached.items()},
        files=files,
        seconds=max(p.seconds for p in parts),
    )


def _renumber_table(
    source: Path, target: Path, numbers: Mapping[int, int], rows: dict[str, int], first: int
) -> None:
    """Copies a table of rows, group by group, and counts the rows of each site. first: the number
    of the first values file in `target`."""
    old = pa.array(list(numbers), ROWS_SCHEMA.field("sample").type)
    new = pa.array(list(numbers.values()), ROWS_SCHEMA.field("sample").type)
    shard = ROWS_SCHEMA.get_field_index("shard")
    try:
        table = pq.ParquetFile(source, page_checksum_verification=True)
        with pq.ParquetWriter(target, ROWS_SCHEMA, write_page_checksum=True, **COMPACT) as writer:
            for number in range(table.num_row_groups):
                group = table.read_row_group(number)
                at = pc.index_in(group["sample"], old)
                group = group.set_column(
                    1, ROWS_SCHEMA.field("sample"), new.take(at.combine_chunks())
                )
                moved = pc.add(group["shard"], pa.scalar(first, ROWS_SCHEMA.field("shard").type))
                group = group.set_column(shard, ROWS_SCHEMA.field("shard"), moved)
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
