"""`rlk-align import` of other tools' recordings: from flags to what is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlk_align.errors import BadOption
from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.record.imports.formats import FORMATS
from rlk_align.record.shared.layout import is_recording, steps_of
from rlk_align.results import SideName

if TYPE_CHECKING:
    from rlk_align.record.imports.importing import ImportedSide
    from rlk_align.record.imports.sequences import Known


def import_recording(
    format: str,
    paths: Sequence[Path],
    out: Path,
    side: SideName | None,
    model: str | None,
    tokens: str | None,
    step: int,
) -> "ImportedSide":
    """Imports the files of one side. The arguments are the flags of `rlk-align import`. Raises
    BadOption, ModelError and DumpError."""
    assert format in FORMATS, format
    if side is None:
        raise BadOption(
            f"{format} files do not say which side they are of", "--side rollout or --side train"
        )
    if model is None:
        raise BadOption(
            f"{format} files do not say which model they are of", "--model CHECKPOINT_FOLDER"
        )
    from rlk_align.model.checkpoint import resolve_model
    from rlk_align.record.imports.importing import import_side

    known = None if tokens is None else _known(tokens, side, step)
    return import_side(format, paths, out, side, resolve_model(model), known, step)


def _known(name: str, side: SideName, step: int) -> "list[Known]":
    """The sequences of a recording, or of a run of log-probs."""
    if is_recording(name):
        return _recorded(Path(name), step)
    run = ImportedRun.open(name)
    steps = [number for number, _ in run.steps()]
    if len(steps) > 1 and step not in steps:
        listed = f"{steps[0]} to {steps[-1]}"
        raise BadOption(f"{name} has {len(steps)} steps, {listed}, and not {step}", "--step N")
    wanted = step if len(steps) > 1 else steps[0]
    batches = (batch for number, of_step in run.steps() if number == wanted for batch in of_step)
    return [known for batch in batches for known in _of_batch(batch, side)]


def _recorded(folder: Path, step: int) -> "list[Known]":
    from rlk_align.record.imports.sequences import Known
    from rlk_align.record.merge.recorded import open_step

    steps = steps_of(folder)
    if steps and step not in steps:
        raise BadOption(f"{folder} has the steps {', '.join(map(str, steps))}", "--step N")
    recorded = open_step(steps[step] if steps else folder)
    # An imported side that does not know the prompt has its first token alone.
    prompts = [(s, len(s.prompt_ids)) for s in recorded.sequences.values()]
    return [Known(s.ids, length if length > 1 else None, s.counted) for s, length in prompts]


def _of_batch(batch: Sequences, side: SideName) -> "list[Known]":
    from rlk_align.record.imports.sequences import Known

    rollout = side == "rollout"
    values = np.where(
        batch.rollout_missing if rollout else batch.train_missing,
        np.nan,
        batch.rollout if rollout else batch.train,
    )
    found = []
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        at = slice(int(batch.offsets[s]), int(batch.offsets[s + 1]))
        counted = tuple(batch.scored[at][prompt:].tolist())
        found.append(Known(tuple(batch.token_ids[at].tolist()), prompt, counted, values[at]))
    return found
