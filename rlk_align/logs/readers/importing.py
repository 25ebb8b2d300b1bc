"""Imports a framework's dump as a run."""

from pathlib import Path

from rlk_align.logs.dumps.batches import batches
from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.dumps.manifest import Findings, Manifest
from rlk_align.logs.readers.registry import AUTO, detect, files_of, reader, recognised_files
from rlk_align.progress import Progress, silent


def import_dump(
    format: str,
    paths: list[Path],
    folder: Path,
    command: list[str],
    progress: Progress = silent,
) -> Manifest:
    """Reads the dump at these paths, and writes it to `folder` as a run. Raises BadOption for an
    unknown format, and DumpError if the dump cannot be read."""
    findings = Findings()
    if format == AUTO:
        chosen = detect(paths)
        files = recognised_files(chosen, paths, findings)
    else:
        chosen = reader(format)
        files = files_of(chosen, paths)
    rows = chosen.read(files, findings, progress)
    return ImportedRun(folder).write(
        batches(rows), findings, command=command, format=chosen.name, framework=chosen.framework
    )
