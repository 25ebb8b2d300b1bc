"""`rlk-align`: the commands, and the exit code and message of each error."""

import importlib.util
import io
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rlk_align.cli.capture import capture
from rlk_align.cli.compare import compare
from rlk_align.cli.contract import app as contract
from rlk_align.cli.doctor import doctor
from rlk_align.cli.explain import explain
from rlk_align.cli.gate import gate
from rlk_align.cli.import_ import import_
from rlk_align.cli.monitor import monitor
from rlk_align.cli.outputs import silence_stdout
from rlk_align.cli.probe import probe
from rlk_align.cli.replay import replay
from rlk_align.cli.report import report
from rlk_align.cli.selftest import selftest
from rlk_align.cli.weights import weights
from rlk_align.errors import (
    EXIT_INTERRUPTED,
    EXIT_TOOL,
    INSTALL_ENGINES,
    MissingDependency,
    RlkError,
)
from rlk_align.text import printable
from rlk_align.version import __version__

app = typer.Typer(
    name="rlk-align",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Are the rollout engine and the training engine the same policy?",
    epilog="Exit codes: 0 pass, 1 contract violated, 2 usage, 3 engine or tool failed, "
    "4 inconclusive, 130 interrupted.",
)
app.command()(compare)
app.command()(probe)
app.command()(capture)
app.command()(gate)
app.command()(explain)
app.command()(replay)
app.command("import")(import_)
app.command()(monitor)
app.add_typer(report, name="report")
app.add_typer(contract, name="contract")
app.command()(weights)
app.command()(doctor)
app.command()(selftest)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rlk-align {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _missing_packages() -> Iterator[None]:
    """Turns the import error of a missing package into an error that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "rlk_align").startswith("rlk_align"):
            raise
        # Without torch the error names torch, whichever package of the extra is imported first.
        missing = error.name if importlib.util.find_spec("torch") else "torch"
        raise MissingDependency(
            f"this command needs {missing}, which is not installed",
            INSTALL_ENGINES,
        ) from error


def main() -> None:
    """The entry point of the command line."""
    # A process that is started in the background ignores SIGINT: Ctrl-C must still reach it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or a log that is limited to ASCII shows other characters as `?`.
            stream.reconfigure(errors="replace")
    console = Console(stderr=True, highlight=False)
    try:
        with _missing_packages():
            app()
    except RlkError as error:
        message = Text(printable(error.message, lines=True))
        console.print(Text("error: ", style="bold red") + message, soft_wrap=True)
        if error.fix:
            console.print(Text(f"       {printable(error.fix, lines=True)}"), soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.print("interrupted", style="bold red")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output is gone (`| head`).
        sys.stderr.close()
        sys.exit(EXIT_TOOL)
    except OSError as error:
        console.print(Text(f"error: {printable(error)}", style="bold red"), soft_wrap=True)
        silence_stdout()
        sys.exit(EXIT_TOOL)
    except Exception:
        traceback.print_exc()
        console.print("This is a bug in rlk-align; the traceback shows where.", style="bold red")
        sys.exit(EXIT_TOOL)
