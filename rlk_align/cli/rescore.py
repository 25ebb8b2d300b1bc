"""`rlk-align compare --tokens DUMP`: what a training run wrote, scored again by engines."""

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from rlk_align.api.rescoring import Rescoring, prepare
from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_text
from rlk_align.errors import BadOption
from rlk_align.progress import show_progress
from rlk_align.report.formats import RESCORED_FORMATS, renderer
from rlk_align.report.rescored_terminal import show_rescored

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
    outputs = parse_outputs(output, tuple(RESCORED_FORMATS))
    with show_progress("compare") as progress:
        prepared = prepare(rescoring, options.warn, progress, options.command_line())
        for run in (prepared.run, prepared.dump):
            check_outputs(outputs, run)
        rescored = prepared.start(progress)
    dump, scores = str(prepared.dump.folder), str(prepared.run.folder)
    print_report(lambda c: show_rescored(rescored, dump, scores, c), takes_stdout(outputs))
    for target in outputs:
        render = renderer(target.format, RESCORED_FORMATS)
        write_text(target.path, render(rescored, dump, scores))
    sys.exit(rescored.exit_code)
