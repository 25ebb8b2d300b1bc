"""The choice of the sequences that are scored again, and the refusals."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from imported_runs import imported_run
from simulate_dumps import healthy
from synthetic import SHAPE

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.rescore.batch import check_fits, token_batch
from rlk_align.logs.rescore.choose import choose

RUN = healthy(1, 8_000)


class Dump:
    """Replaces an imported run, in two batches."""

    folder = Path("dump")

    def __init__(self, run: Sequences) -> None:
        self._parts = [run.take(part) for part in np.array_split(np.arange(len(run)), 2)]

    def sequences(self) -> list[Sequences]:
        return self._parts


def chosen(run: Sequences, count: int = 8, seed: int = 0, temperature: float | None = None):
    return choose(Dump(run), count, seed, temperature)  # type: ignore[arg-type]


def test_a_small_dump_is_taken_whole(tmp_path: Path) -> None:
    imported = imported_run(RUN, tmp_path / "run")
    choice = choose(imported, len(RUN), 0, None)
    assert choice.sequences.ids == RUN.ids
    assert (choice.worst, choice.usable, choice.total) == (0, len(RUN), len(RUN))


def test_the_worst_are_taken_and_others_by_the_seed() -> None:
    size = np.where(RUN.compared, np.abs(RUN.train - RUN.rollout), 0.0)
    means = np.bincount(RUN.sequence, size) / np.bincount(RUN.sequence, RUN.compared)
    worst = {RUN.ids[s] for s in np.argsort(-means)[:4]}
    one, again, other = chosen(RUN), chosen(RUN), chosen(RUN, seed=1)
    assert one.worst == 4
    assert worst <= set(one.sequences.ids)
    assert len(one.sequences) == len(set(one.sequences.ids)) == 8
    assert one.sequences.ids == again.sequences.ids != other.sequences.ids


def test_a_value_that_is_not_finite_comes_first() -> None:
    train = RUN.train.copy()
    train[np.flatnonzero(RUN.compared)[0]] = np.nan
    choice = chosen(dataclasses.replace(RUN, train=train), count=1)
    assert choice.sequences.ids == [RUN.ids[0]]


def test_the_temperature_is_the_dumps() -> None:
    warm = [Sampling(temperature=0.7 if k else 1.2) for k in range(len(RUN))]
    choice = chosen(dataclasses.replace(RUN, sampling=warm), count=1000)
    assert choice.temperature == 0.7
    assert choice.usable == len(RUN) - 1
    assert "1 sequences with another temperature are omitted" in choice.notes[0]
    assert chosen(dataclasses.replace(RUN, sampling=warm), temperature=0.9).temperature == 0.9
    silent = chosen(dataclasses.replace(RUN, sampling=[Sampling()] * len(RUN)))
    assert silent.temperature == 1.0
    assert "does not state its temperature" in silent.notes[0]


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_a_dump_without_a_side_is_refused(side: str) -> None:
    missing = {f"{side}_missing": np.ones(RUN.tokens, dtype=bool)}
    with pytest.raises(DumpError, match="there is no mismatch to split"):
        chosen(dataclasses.replace(RUN, **missing))


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(DumpError, match="no scored token"):
        chosen(dataclasses.replace(RUN, scored=np.zeros(RUN.tokens, dtype=bool)))


def test_the_ids_are_those_of_the_dump() -> None:
    scored = RUN.scored.copy()
    scored[RUN.offsets[0]] = True
    batch = token_batch(dataclasses.replace(RUN, scored=scored))
    flat = [token for s in batch.samples for token in s.ids]
    assert flat == RUN.token_ids.tolist()
    assert len(batch.samples[0].prompt_ids) == 1
    assert len(batch.samples[1].prompt_ids) == RUN.prompt_lengths[1]
    assert len({s.prompt_id for s in batch.samples}) == len(RUN)


def test_what_the_model_cannot_take_is_refused() -> None:
    batch = token_batch(RUN)
    longest = max(len(s.ids) for s in batch.samples)
    wide = dataclasses.replace(SHAPE, vocab=int(RUN.token_ids.max()) + 1)
    check_fits(batch, wide, longest, "train")
    with pytest.raises(DumpError, match="is too long"):
        check_fits(batch, wide, longest - 1, "train")
    with pytest.raises(DumpError, match="vocabulary of the train side's model has"):
        check_fits(batch, dataclasses.replace(wide, vocab=wide.vocab - 1), longest, "train")
