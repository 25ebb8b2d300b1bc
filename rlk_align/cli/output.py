"""How a verdict leaves the process: on the terminal, in files, as an exit code."""

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from rlk_align.cli.options import warn
from rlk_align.errors import TraceNotWritten
from rlk_align.judge.verdict import Verdict
from rlk_align.probe.record import Probe
from rlk_align.report.terminal import show
from rlk_align.report.verdict_json import verdict_json
from rlk_align.trace.run import Run


def silence_stdout() -> None:
    """Nothing more is said there: nobody reads on (`| head`), or the disk behind it is full."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it at its end


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        silence_stdout()


def finish(verdict: Verdict, run: Run, outputs: list[Path], probe: Probe | None = None) -> None:
    """Prints the verdict on stdout, writes each output, and exits with its code, whether anybody
    could read it or not."""
    console = _Stdout(highlight=False, soft_wrap=True)
    try:
        show(verdict, run.folder, console, probe)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        warn([f"the verdict could not be printed: {error.strerror}"])
        silence_stdout()
    text = json.dumps(verdict_json(verdict, probe), indent=1, allow_nan=False) + "\n"
    for path in outputs:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TraceNotWritten(f"{path} could not be written: {error}") from error
    sys.exit(verdict.exit_code)
