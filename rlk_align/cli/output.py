"""How a verdict leaves the process: on the terminal, in files, as an exit code."""

import json
import sys
from pathlib import Path

from rich.console import Console

from rlk_align.errors import TraceNotWritten
from rlk_align.report.terminal import show
from rlk_align.run import Run
from rlk_align.verdict import Verdict


def finish(verdict: Verdict, run: Run, outputs: list[Path]) -> None:
    """Prints the verdict on stdout, writes each output, and exits with its code."""
    show(verdict, run.folder, Console(highlight=False, soft_wrap=True))
    text = json.dumps(verdict.to_json(), indent=1, allow_nan=False) + "\n"
    for path in outputs:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TraceNotWritten(f"{path} could not be written: {error}") from error
    sys.exit(verdict.exit_code)
