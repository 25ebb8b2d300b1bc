"""Steps that were written, as the run that an import makes of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_align.dumps.run import ImportedRun
from rlk_align.dumps.sequences import Sequences, join
from rlk_align.readers.importing import import_dump
from rlk_align.writers.batch import Record
from rlk_align.writers.step_file import write_step


@pytest.fixture
def imported_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Sequences]:
    """Imports what lies in a folder of steps."""

    def run(folder: Path) -> Sequences:
        made = tmp_path_factory.mktemp("imported")
        import_dump("auto", [folder], made, ["rlk-align", "import"])
        return join(list(ImportedRun.open(str(made)).sequences()))

    return run


@pytest.fixture
def imported_step(tmp_path: Path, imported_folder) -> Callable[[list[Record]], Sequences]:
    """Writes records as step 7 and imports them."""

    def run(records: list[Record]) -> Sequences:
        write_step(tmp_path / "steps", 7, records)
        return imported_folder(tmp_path / "steps")

    return run
