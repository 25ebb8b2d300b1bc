"""`rlk-align compare --tokens DUMP`: what a training run wrote, scored again by engines."""

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from rlk_align.api.rescoring import Rescoring, prepare
from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_document
from rlk_align.errors import BadOption
from rlk_align.progress import show_progress
from rlk_align.report.document_terminal import show_document
from rlk_align.report.formats import DOCUMENT_FORMATS
from rlk_align.report.rescored import rescored_document
from rlk_align.report.rescored_json import rescored_json

OF_SAMPLING: dict[str, Any] = {
    "runs": [],
    "prompts": None,
    "max_new_tokens": 32,
    "edges": None,
    "production": None,
    "probe": False,
    "attribute": False,
}
"""Flags of `compare` that mean nothing where ids are given, with their defaults."""


def rescore(
    rescoring: Rescoring, arguments: Mapping[str, Any], output: list[str] | None
) -> NoReturn:
    """Scores a dump again, prints what its mismatch consists of, and exits. `arguments` are those
    of `compare`."""
    given = [
        name
        for name, default in OF_SAMPLING.items()
        if (arguments[name] or None) != (default or None)
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given if name != "runs")
        raise BadOption(
            f"--tokens gives the ids to score: {flags or 'runs'} cannot be combined with it",
            "leave it out",
        )
    outputs = parse_outputs(output, ("json", *DOCUMENT_FORMATS))
    with show_progress("compare") as progress:
        prepared = prepare(rescoring, options.warn, progress, options.command_line())
        for run in (prepared.run, prepared.dump):
            check_outputs(outputs, run)
        rescored = prepared.start(progress)
    dump, scores = str(prepared.dump.folder), str(prepared.run.folder)
    document = rescored_document(rescored, dump, scores)
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    write_document(outputs, document, lambda: rescored_json(rescored, dump, scores))
    sys.exit(rescored.exit_code)
