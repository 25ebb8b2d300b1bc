"""The prompts of a run: the file that was named, values of Python, or the embedded ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlk_align.api.options import Warn
from rlk_align.data import data_path
from rlk_align.errors import PromptError
from rlk_align.model.prompts import Prompt, as_prompts, load_prompts, save_prompts
from rlk_align.trace.records import writing
from rlk_align.trace.run import Run

if TYPE_CHECKING:
    from rlk_align.capture.check import CheckedRequest

RUN_PROMPTS = "prompts.jsonl"
"""In the run's folder: prompts that are no file of the user's."""
GivenPrompts = Path | Sequence[Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrompts:
    """The prompts of a run, and the file that its engines read them from."""

    prompts: tuple[Prompt, ...]
    path: Path
    embedded: bool = False
    """Whether nobody named prompts."""
    unwritten: bool = False
    """Whether the file is the run's own, which is written when the run starts."""

    @classmethod
    def of(cls, given: GivenPrompts, run: Run) -> Self:
        """Raises PromptError for what is no file of prompts, and no list of them."""
        own = run.folder / RUN_PROMPTS
        if isinstance(given, Path):
            return cls(prompts=tuple(load_prompts(given)), path=given)
        if given is not None:
            return cls(prompts=tuple(as_prompts(given)), path=own, unwritten=True)
        path = data_path("prompts.jsonl")
        return cls(prompts=tuple(load_prompts(path)), path=path, embedded=True)

    def fitting(self, requests: Iterable["CheckedRequest"], run: Run, warn: Warn) -> Self:
        """The same where all of them fit every engine; else those of the embedded prompts that do,
        with a word about the others. Raises PromptError for a user's prompts, or where none fits,
        and ModelError where a prompt needs what a model lacks."""
        from rlk_align.capture.check import check_prompts, too_long

        requests = [*requests]
        if not self.embedded:
            for request in requests:
                check_prompts(request, self.prompts)
            return self
        long = {
            name: n for request in requests for name, n in too_long(request, self.prompts).items()
        }
        if not long:
            return self
        tightest = min(requests, key=lambda r: r.context - r.new_tokens)
        room = f"{tightest.context} positions less {tightest.new_tokens} new tokens"
        fitting = tuple(p for p in self.prompts if p.id not in long)
        if not fitting:
            raise PromptError(
                f"none of the {len(self.prompts)} embedded prompts fits: the model leaves {room}, "
                f"and the shortest prompt has {min(long.values())} tokens",
                "lower --max-new-tokens, or name shorter prompts by --prompts",
            )
        warn(
            f"{len(long)} of the {len(self.prompts)} embedded prompts are left out: they have up "
            f"to {max(long.values())} tokens, and the model leaves {room}; --prompts names others"
        )
        own = run.folder / RUN_PROMPTS
        return replace(self, prompts=fitting, path=own, unwritten=True)

    def save(self) -> None:
        """Writes the run's own file, where it has one. Raises TraceNotWritten."""
        if self.unwritten:
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                save_prompts(self.prompts, self.path)
