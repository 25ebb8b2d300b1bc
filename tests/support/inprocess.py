"""A command of the tool in this process: quick, where no engine is started."""

import contextlib
import io
import sys

from rlk_align.cli.main import main


def command(*words: object) -> tuple[int, str]:
    """Exit code and all that `rlk-align` printed, in this process."""
    said = io.StringIO()
    argv, sys.argv = sys.argv, ["rlk-align", *map(str, words)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    finally:
        sys.argv = argv
    raise AssertionError("a command ends by its exit code")
