"""A side of a comparison: an engine to run, or a run that was captured earlier."""

from dataclasses import dataclass
from pathlib import Path

from rlk_align.engines.spec import EngineSpec, given_options
from rlk_align.errors import BadOption, UnknownEngine
from rlk_align.trace.run import Role, Run

NAME = "replay"
"""The word that replaces an engine's name."""


@dataclass(frozen=True, slots=True)
class Recording:
    """`replay:path=RUN`: a run whose capture replaces the engine."""

    path: str

    @classmethod
    def parse(cls, text: str) -> "Recording":
        """Raises BadOption for a text that is not `replay:path=RUN`."""
        _, _, rest = text.partition(":")
        options = dict(given_options(repr(NAME), rest, ("path",)))
        if "path" not in options:
            raise BadOption(f"{NAME!r} needs path=RUN", f"{NAME}:path=RUN")
        return cls(options["path"])

    def open(self) -> Run:
        """Raises the errors of `Run.open`."""
        return Run.open(self.path)

    def folder(self, role: Role) -> Path:
        """The folder of the trace with that role, or of the run's only trace."""
        return self.open().capture_folder(role)

    def __str__(self) -> str:
        return f"{NAME}:path={self.path}"


Side = EngineSpec | Recording


def parse_side(text: str) -> Side:
    """Raises UnknownEngine or BadOption, which list the known names."""
    if text.partition(":")[0] == NAME:
        return Recording.parse(text)
    try:
        return EngineSpec.parse(text)
    except UnknownEngine as error:
        raise UnknownEngine(error.message, f"or a run made earlier: {NAME}:path=RUN") from error
