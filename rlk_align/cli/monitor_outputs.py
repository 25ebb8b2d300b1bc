"""The files and loggers that `rlk-align monitor` writes to."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rlk_align.cli.outputs import OutputTarget, write_text
from rlk_align.errors import MissingDependency, TraceNotWritten
from rlk_align.logs.monitor.export import json_line, prometheus, scalars
from rlk_align.logs.monitor.history import History
from rlk_align.logs.monitor.record import StepRecord

FORMATS = ("jsonl", "prometheus", "html", "tensorboard", "wandb")


class StepOutputs:
    """Writes each step as it comes. `flush` writes outputs that show a whole run."""

    def __init__(self, targets: list[OutputTarget]) -> None:
        self._targets = targets
        self._latest: dict[str, StepRecord] = {}
        self._history: dict[str, History] = {}
        self._stack = ExitStack()
        self._lines: list[TextIO] = []
        self._loggers: list[Any] = []

    def __enter__(self) -> "StepOutputs":
        for target in self._targets:
            if target.format == "jsonl":
                self._lines.append(self._opened(target.path))
            elif target.format in ("tensorboard", "wandb"):
                self._loggers.append(_logger(target))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.flush()
        for logger in self._loggers:
            logger.close()
        self._stack.close()

    def _opened(self, path: Path | None) -> TextIO:
        if path is None:
            return sys.stdout
        try:
            return self._stack.enter_context(path.open("w", encoding="utf-8"))
        except OSError as error:
            raise TraceNotWritten(f"{path} could not be written: {error.strerror}") from error

    def add(self, run: str, record: StepRecord) -> None:
        """Writes a step."""
        self._latest[run] = record
        self._history.setdefault(run, History()).add(record)
        for stream in self._lines:
            try:
                stream.write(json_line(run, record))
                stream.flush()
            except OSError as error:
                raise TraceNotWritten(f"a step could not be written: {error}") from error
        for logger in self._loggers:
            logger.add(run, record)

    def flush(self) -> None:
        """Rewrites the outputs that show the last step or the whole run."""
        for target in self._targets:
            if target.format == "prometheus":
                write_text(target.path, prometheus(self._latest))
            elif target.format == "html":
                from rlk_align.report.html.steps import steps_page

                write_text(target.path, steps_page(self._history))


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._folder, self._make = folder, Writer
        self._writers: dict[str, Any] = {}

    def add(self, run: str, record: StepRecord) -> None:
        name = _group(run)
        if name not in self._writers:
            self._writers[name] = self._make(str(self._folder / name))
        for metric, value in scalars(record).items():
            self._writers[name].add_scalar(metric, value, record.step)
        self._writers[name].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class _Wandb:
    """Writes an offline run, which `wandb sync` uploads; its charts have the training step as their
    axis."""

    def __init__(self, folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        # The terminal's output and the machine's load do not belong to the monitored run.
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(project="rlk-align", mode="offline", dir=str(folder), settings=quiet)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, run: str, record: StepRecord) -> None:
        values = {f"{_group(run)}/{name}": value for name, value in scalars(record).items()}
        self._run.log(values | {"step": record.step})

    def close(self) -> None:
        self._run.finish()


def _group(run: str) -> str:
    """Returns a run's path as one name, the group of its metrics."""
    return run.strip("/").replace("/", "_") or "run"


def _logger(target: OutputTarget) -> _TensorBoard | _Wandb:
    if target.path is None:
        raise MissingDependency(f"{target.format} writes a folder, not a stream", "name a folder")
    made = _TensorBoard if target.format == "tensorboard" else _Wandb
    try:
        return made(target.path)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"--output {target.format} needs the package {target.format}",
            f"pip install {target.format}",
        ) from error
