"""The prompts of a run: from a file, from Python values, or the embedded ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlk_align.api.options import Warn
from rlk_align.data import data_path
from rlk_align.errors import PromptError
from rlk_align.trace.records import writing
from rlk_align.trace.run import RUN_PROMPTS, Run

if TYPE_CHECKING:
    from rlk_align.capture.check import CheckedRequest
    from rlk_align.model.prompts import Prompt

PromptSource = Path | Sequence[Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrompts:
    """The prompts of a run, and the file that its engines read them from."""

    prompts: "tuple[Prompt, ...]"
    path: Path
    embedded: bool = False
    """Whether these are the embedded prompts, because the user named none."""
    unwritten: bool = False
    """Whether the file belongs to the run and is written when the run starts."""

    @classmethod
    def of(cls, source: PromptSource, run: Run) -> Self:
        """Loads prompts. Raises PromptError for a value that is neither a file nor a list of
        prompts."""
        from rlk_align.model.prompts import as_prompts, load_prompts

        own = run.folder / RUN_PROMPTS
        if isinstance(source, Path):
            return cls(prompts=tuple(load_prompts(source)), path=source)
        if source is not None:
            return cls(prompts=tuple(as_prompts(source)), path=own, unwritten=True)
        path = data_path("prompts.jsonl")
        return cls(prompts=tuple(load_prompts(path)), path=path, embedded=True)

    def fitting(self, requests: Iterable["CheckedRequest"], run: Run, warn: Warn) -> Self:
        """Returns the prompts that fit every engine. Embedded prompts that do not fit are omitted
        with a warning. Raises PromptError where a user's prompt does not fit or no prompt does, and
        ModelError where a model lacks what a prompt needs."""
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
            f"{len(long)} of the {len(self.prompts)} embedded prompts "
            f"{'is' if len(long) == 1 else 'are'} omitted: the model leaves {room}, and the "
            f"longest prompt has {max(long.values())} tokens; --prompts names others"
        )
        own = run.folder / RUN_PROMPTS
        return replace(self, prompts=fitting, path=own, unwritten=True)

    def save(self) -> None:
        """Writes the file that belongs to the run, if any. Raises TraceNotWritten."""
        from rlk_align.model.prompts import save_prompts

        if self.unwritten:
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                save_prompts(self.prompts, self.path)
