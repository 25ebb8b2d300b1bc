"""Imports steps that a writer wrote."""

from collections.abc import Callable
from pathlib import Path

import pytest
from imported_runs import sequences_in

from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.writers.batch import Record
from rlk_align.logs.writers.step_file import write_step


@pytest.fixture
def imported_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Sequences]:
    """Imports a folder of steps."""
    return lambda folder: sequences_in(folder, tmp_path_factory.mktemp("imported"))


@pytest.fixture
def imported_step(tmp_path: Path, imported_folder) -> Callable[[list[Record]], Sequences]:
    """Writes records as step 7 and imports them."""

    def run(records: list[Record]) -> Sequences:
        write_step(tmp_path / "steps", 7, records)
        return imported_folder(tmp_path / "steps")

    return run
