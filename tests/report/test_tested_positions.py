"""A pass says how far into its context the model was tested, in every format."""

import io
import json
from pathlib import Path

import pytest
from report_runs import report_run
from rich.console import Console

from rlk_align.report.document_terminal import show_document
from rlk_align.report.formats import FORMATS, renderer
from rlk_align.report.github import workflow_commands
from rlk_align.report.source import ReportSource, load_source
from rlk_align.report.verdict import verdict_document

WORDS = "positions up to 173 of 4,096 tested"
ADVICE = "--prompts"


def every_format(source: ReportSource) -> dict[str, str]:
    out = io.StringIO()
    show_document(
        verdict_document(source.verdict, source.folder),
        Console(file=out, width=100, soft_wrap=True),
    )
    texts = {name: renderer(name)(source) for name in FORMATS}
    return texts | {"terminal": out.getvalue(), "commands": workflow_commands(source)}


def texts(folder: Path, **changes: int) -> dict[str, str]:
    return every_format(load_source(str(report_run(folder, **changes).folder), None))


def test_every_format_says_it(tmp_path: Path) -> None:
    said = texts(tmp_path / "run", longest_sequence=173, context=4096)
    assert json.loads(said.pop("json"))["positions"] == {"tested": 173, "context": 4096}
    for name, text in said.items():
        assert WORDS in text, name
        assert ADVICE in text, name


@pytest.mark.parametrize(("longest", "context"), [(4096, 4096), (0, 0)])
def test_nothing_is_said_where_all_was_tested_or_nothing_is_known(
    longest: int, context: int, tmp_path: Path
) -> None:
    said = texts(tmp_path / "run", longest_sequence=longest, context=context)
    assert not [name for name, text in said.items() if "positions up to" in text]
