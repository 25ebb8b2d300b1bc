"""The tree of errors. Each states what is wrong, where, what is known and what to do.

RlkError
├── UsageError            exit 2   the command line, a configuration or a missing dependency
│   ├── BadOption
│   ├── UnknownEngine
│   ├── MissingDependency
│   ├── ModelError
│   ├── PromptError
│   ├── DumpError
│   └── ContractError
├── ToolError             exit 3   an engine or the tool failed
│   ├── EngineFailed
│   ├── CorruptTrace
│   ├── CorruptCheckpoint
│   └── TraceNotWritten
└── Interrupted           exit 130 the user stopped it

A verdict that is not a pass is not an error: see `rlk_align.judge.verdict`.
"""

INSTALL_ENGINES = "pip install 'rlk-align[engines]'"
"""The command that adds torch, transformers and the kernels to a base installation."""

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_TOOL = 3
EXIT_INCONCLUSIVE = 4
EXIT_INTERRUPTED = 130


class RlkError(Exception):
    """An error for the user: `message` states what is wrong and where, `fix` what to do."""

    exit_code = EXIT_TOOL

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class UsageError(RlkError):
    """The request cannot be carried out as it stands."""

    exit_code = EXIT_USAGE


class BadOption(UsageError):
    """An option has an invalid value."""


class UnknownEngine(UsageError):
    """No engine has that name."""


class MissingDependency(UsageError):
    """A package that the request needs is not installed."""


class ModelError(UsageError):
    """The model is missing, unreadable, or of an unknown family."""


class PromptError(UsageError):
    """The prompts are missing, empty, malformed or too long for the model."""


class DumpError(UsageError):
    """A framework's dump is missing, empty, malformed, or in an unknown format."""


class ContractError(UsageError):
    """The contract is missing, malformed, or does not cover the dtype."""


class ToolError(RlkError):
    """An engine or the tool itself failed."""


class EngineFailed(ToolError):
    """An engine's process ended before its capture was complete."""


class CorruptTrace(ToolError):
    """A trace on disk has changed since it was written."""


class CorruptCheckpoint(ToolError):
    """A file of a checkpoint is truncated, or contradicts its header."""


class TraceNotWritten(ToolError):
    """A file could not be written, e.g. to a full disk or without permission."""


class Interrupted(RlkError):
    """The user stopped the run."""

    exit_code = EXIT_INTERRUPTED


ERRORS: dict[str, type[RlkError]] = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, RlkError)
}
"""Name -> error, by which a worker process passes its error to the parent."""
