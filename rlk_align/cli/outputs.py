"""The files and streams that a verdict is written to: `--output FMT=PATH`."""

import io
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk_align.errors import BadOption, TraceNotWritten
from rlk_align.files import whole_file
from rlk_align.judge.regression import RegressionVerdict
from rlk_align.report.document import Document
from rlk_align.report.formats import DOCUMENT_FORMATS, FORMATS, REGRESSION_FORMATS, renderer
from rlk_align.report.source import ReportSource
from rlk_align.trace.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """A file or stream that a format is written to."""

    format: str
    """A key of FORMATS."""
    path: Path | None
    """None means stdout. For `github`, whose commands go to stdout in any case, None means the
    summary file that GitHub names, if any."""

    def __str__(self) -> str:
        return f"{self.format}={self.path or '-'}"


def silence_stdout() -> None:
    """Discards further output: its reader is gone (`| head`), or its disk is full."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it at its end


def parse_outputs(
    items: list[str] | None, formats: Collection[str] = tuple(FORMATS)
) -> list[OutputTarget]:
    """Parses the values of --output. Raises BadOption for an unknown format, and for a path that
    cannot be written."""
    outputs = []
    for item in items or []:
        kind, equals, path = item.partition("=")
        if kind not in formats or not equals:
            known = f"give FMT=PATH, for example json=PATH; FMT is one of {', '.join(formats)}"
            raise BadOption(f"--output {item!r} is unknown", known)
        if not path:
            raise BadOption(f"--output {item!r} names no file", "is a variable empty? - is stdout")
        outputs.append(make_output(kind, path))
    _check_distinct(outputs)
    return outputs


def make_output(kind: str, path: str) -> OutputTarget:
    """Returns an output after checking it. Raises as `parse_outputs` does."""
    output = OutputTarget(kind, None if path == "-" else Path(path))
    target = output_file(output)
    if target is not None:
        _check_writable(output, target)
    return output


def output_file(output: OutputTarget) -> Path | None:
    """Returns the file that an output is written to; None if there is none."""
    if output.path is None and output.format == "github":
        from rlk_align.report.github import summary_file

        return Path(summary_file()) if summary_file() else None
    return output.path


def _check_writable(output: OutputTarget, path: Path) -> None:
    try:
        free = not path.is_dir() and path.absolute().parent.is_dir()
        free = free and os.access(path if path.exists() else path.absolute().parent, os.W_OK)
    except OSError:
        free = False  # a name that is too long
    if not free:
        raise BadOption(f"--output {str(output)!r}: no file can be written at {path}")


def _check_distinct(outputs: Sequence[OutputTarget]) -> None:
    """Raises BadOption where two outputs have the same target."""
    taken: set[Path | None] = set()
    for output in outputs:
        if output.path is None and output.format == "github":
            continue
        target = output.path and output.path.resolve()
        # A target that is not a file, such as /dev/null, takes any number of outputs.
        if target in taken and (target is None or target.is_file() or not target.exists()):
            raise BadOption(f"--output {str(output)!r}: another output goes there already")
        taken.add(target)


def check_outputs(outputs: Sequence[OutputTarget], run: RunFolder) -> None:
    """Raises BadOption where an output would overwrite a file of the run."""
    for output in outputs:
        if output.path is not None:
            run.check_output(output.path)


def takes_stdout(outputs: Sequence[OutputTarget]) -> bool:
    """Whether an output takes stdout, so that the report for people goes to stderr."""
    return any(o.path is None and o.format != "github" for o in outputs)


def write_outputs(
    outputs: Sequence[OutputTarget], render: Callable[[str], str], commands: Callable[[], str]
) -> None:
    """Writes each format as rendered by `render`; for GitHub its workflow commands too. Raises
    TraceNotWritten."""
    for output in outputs:
        text = render(output.format)
        if output.format == "github":
            # GitHub reads them from either stream.
            _write_stream(takes_stdout(outputs), commands())
        path = output_file(output)
        if path is not None or output.format != "github":
            write_text(path, text)


def write_run(
    outputs: Sequence[OutputTarget], source: ReportSource, beside: ReportSource | None = None
) -> None:
    """Writes the verdict of a run. A page also shows the run `beside`. Raises TraceNotWritten."""
    from rlk_align.report.github import workflow_commands

    def render(name: str) -> str:
        if name == "html" and beside is not None:
            from rlk_align.report.html.several import several_page

            return several_page([beside, source])
        return renderer(name)(source)

    write_outputs(outputs, render, lambda: workflow_commands(source))


def write_document(
    outputs: Sequence[OutputTarget], document: Document, json_text: Callable[[], str]
) -> None:
    """Writes a document in each format, as JSON by `json_text`. Raises TraceNotWritten."""
    for output in outputs:
        as_json = output.format == "json"
        text = json_text() if as_json else renderer(output.format, DOCUMENT_FORMATS)(document)
        write_text(output.path, text)


def write_regression(outputs: Sequence[OutputTarget], verdict: RegressionVerdict) -> None:
    """Writes the verdict on what became worse between two runs. Raises TraceNotWritten."""
    from rlk_align.report.regression_formats import regression_commands

    write_outputs(
        outputs,
        lambda f: renderer(f, REGRESSION_FORMATS)(verdict),
        lambda: regression_commands(verdict),
    )


def write_text(path: Path | None, text: str) -> None:
    """Writes a file completely or not at all; None means stdout. Text for the summary of a GitHub
    step is appended, because other programs write to that file too. Raises TraceNotWritten."""
    if path is None:
        _write_stream(False, text)
        return
    from rlk_align.report.github import summary_file

    try:
        if str(path) == summary_file():
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        elif path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a pipe, or a terminal
        else:
            with whole_file(path.resolve()) as partial:
                partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceNotWritten(f"{path} could not be written: {error}") from error


def _write_stream(to_stderr: bool, text: str) -> None:
    """Writes UTF-8 whatever the encoding of the stream: programs read it."""
    stream = sys.stderr if to_stderr else sys.stdout
    try:
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):
            stream.buffer.write(text.encode())
        else:
            stream.write(text)
        stream.flush()
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        raise TraceNotWritten(f"the output could not be written: {error.strerror}") from error
