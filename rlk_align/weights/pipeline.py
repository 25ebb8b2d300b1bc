"""`rlk-align weights`: from paths to a report."""

from collections.abc import Callable, Sequence

from rlk_align.errors import RlkError
from rlk_align.progress import Progress, silent
from rlk_align.trace.run import Role
from rlk_align.weights.adapter import read_adapter
from rlk_align.weights.compare import Comparer, Earlier
from rlk_align.weights.earlier import siblings, step_of
from rlk_align.weights.findings import WeightsReport
from rlk_align.weights.holder import open_holders


def compare_weights(
    a: str,
    b: str,
    *,
    earlier: Sequence[str] = (),
    adapter: str | None = None,
    progress: Progress = silent,
    warn: Callable[[str], None] = lambda _: None,
) -> WeightsReport:
    """What became of each trained parameter of A in B, which was synchronised from it.

    `earlier`: checkpoints of earlier steps, by default those beside A. `adapter`: a LoRA adapter
    that belongs to A. Raises UsageError for a path without weights, CorruptCheckpoint and
    CorruptTrace for damaged ones.
    """
    sides: list[tuple[str, Role]] = [(a, "train"), (b, "rollout")]
    first, second, *others = open_holders([*sides, *((p, "train") for p in earlier)])
    steps = [Earlier(step_of(path), holder) for path, holder in zip(earlier, others, strict=True)]
    for path in () if earlier else siblings(a, a, b):
        try:
            [_, holder] = open_holders([sides[0], (path, "train")])
        except RlkError as error:
            # The user did not name this checkpoint: a trainer may be writing or removing it.
            warn(f"an earlier checkpoint is left out: {error.message}")
            continue
        steps.append(Earlier(step_of(path), holder))
    for one, other in ((first, second), (second, first)):
        if one.beside and not other.beside:
            warn(
                f"{len(one.beside)} parameters of {one.path} are left out, which other layers than "
                f"the decoder's have (for images, or to predict further tokens): {other.path} has "
                "the decoder alone"
            )
    first, second = first.comparable_with(second), second.comparable_with(first)
    first, second = first.with_head(second), second.with_head(first)
    steps = [Earlier(e.step, e.holder.with_head(first)) for e in steps]
    low_rank = read_adapter(adapter) if adapter is not None else None
    return Comparer(first, second, steps, low_rank).report(progress)
