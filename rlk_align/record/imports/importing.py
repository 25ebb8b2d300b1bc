"""Imports the files of another tool as the recording of one side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.record.imports.formats import reader
from rlk_align.record.imports.sequences import Known, place_rows
from rlk_align.record.imports.write import write_recording
from rlk_align.record.shared.shard import SideFolder
from rlk_align.results import SideName


@dataclass(frozen=True, slots=True)
class ImportedSide:
    """What was imported."""

    step: Path
    sequences: int
    tokens: int
    sites: list[str]
    """Those that the files have."""
    missing: list[str]
    """Those of the model that they lack."""
    notes: list[str]


def import_side(
    format: str,
    paths: Sequence[Path],
    out: Path,
    side: SideName,
    model: Path,
    known: Sequence[Known] | None,
    step: int,
) -> ImportedSide:
    """Writes the recording of a step of one side into `out`. format: one of `FORMATS`. model: the
    folder of the checkpoint, whose config.json says which sites there are. known: the sequences;
    None for those in the files.

    Raises DumpError for files that cannot be read or that do not fit the model, ModelError, and
    BadOption for a step that is there already."""
    shape = read_shape(model)
    source = reader(format)(paths, side)
    sequences = place_rows(source.forwards, known)
    folder = SideFolder(out, side, budget=0)
    try:
        with folder.shard(step) as shard:
            sites, notes = write_recording(shard, side, source, sequences, model, shape, format)
        return ImportedSide(
            step=shard.path.parent,
            sequences=len(sequences.samples),
            tokens=sum(len(s.ids) for s in sequences.samples),
            sites=sites,
            missing=[s.name for s in model_sites(shape) if s.name not in sites],
            notes=[*source.notes, *sequences.notes, *notes],
        )
    finally:
        folder.close()
