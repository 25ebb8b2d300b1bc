"""Several steps of a recorded job: from words to the folders that are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk_align.api import options
from rlk_align.api.pair import Pair
from rlk_align.errors import BadOption
from rlk_align.record.shared.layout import incomplete_steps, steps_of
from rlk_align.results import SideName
from rlk_align.trace.run import Run

SIDES: tuple[SideName, ...] = ("rollout", "train")


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """The steps of a job that were asked for."""

    folders: dict[int, tuple[str, str]]
    """Step -> the folders of both sides, for those that both recorded."""
    missing: dict[int, str]
    """Step -> which side lacks it, and why."""
    incomplete: dict[SideName, dict[int, str]]
    """Side -> the steps that it began and did not complete -> why; also others than asked for."""
    run: Run
    """The run below which each step has its own."""

    @property
    def numbers(self) -> list[int]:
        return sorted(self.folders.keys() | self.missing)

    def folder(self, step: int) -> Path:
        """The folder of the run of a step."""
        return self.run.folder / f"step-{step:08d}"


def recorded_steps(pair: Pair, runs: Sequence[str], steps: str) -> RecordedSteps:
    """`runs`: the folders of the rollout side and of the training side. `steps`: their numbers,
    with commas between them. Raises BadOption for a text that is no list of numbers, and for
    folders that are not of recorded sides."""
    numbers = _numbers(steps)
    if len(runs) != 2 or not all(_is_side(Path(name)) for name in runs):
        raise BadOption(
            "--steps compares the recordings of two sides",
            "give the folders of both: rlk-align compare ROLLOUT TRAIN --steps 300,350",
        )
    sides = dict(zip(SIDES, map(Path, runs), strict=True))
    found = {side: steps_of(folder) for side, folder in sides.items()}
    incomplete = {side: incomplete_steps(folder) for side, folder in sides.items()}
    folders, missing = dict[int, tuple[str, str]](), dict[int, str]()
    for number in numbers:
        lacking = [
            f"{side}: {incomplete[side].get(number, 'it was not recorded')}"
            for side in SIDES
            if number not in found[side]
        ]
        if lacking:
            missing[number] = "; ".join(lacking)
        else:
            folders[number] = (str(found["rollout"][number]), str(found["train"][number]))
    run = options.choose_run(pair.run_dir, "compare", *runs, steps)
    return RecordedSteps(folders, missing, incomplete, run)


def _numbers(steps: str) -> list[int]:
    words = [word.strip() for word in steps.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise BadOption(f"--steps {steps!r} is no list of steps", "--steps 300,350")
    return sorted({int(word) for word in words})


def _is_side(folder: Path) -> bool:
    return bool(steps_of(folder) or incomplete_steps(folder))
