"""Imports files of a test and returns their sequences."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.dumps.manifest import Manifest
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.readers.importing import import_dump

Import = Callable[..., tuple[Manifest, Sequences]]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Imports paths below the test's folder, and returns the content of the run."""
    monkeypatch.chdir(tmp_path)

    def run(format: str, *paths: str | Path) -> tuple[Manifest, Sequences]:
        command = ["rlk-align", "import", format, *map(str, paths), "-o", "run"]
        import_dump(format, [Path(path) for path in paths], Path("run"), command)
        opened = ImportedRun.open("run")
        (sequences,) = opened.sequences()
        return opened.manifest, sequences

    return run
