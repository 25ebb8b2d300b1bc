"""Records some sequences of some steps of a trainer."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from rlk_align.errors import BadOption, TraceNotWritten
from rlk_align.record.shared.choose import Prompts
from rlk_align.record.shared.shard import SCORED, Shard, SideFolder
from rlk_align.record.shared.together import on_all
from rlk_align.record.train.lasting_writer import LastingWriter
from rlk_align.record.train.live import Live
from rlk_align.record.train.rank_shard import RankFolder
from rlk_align.record.train.recording import Recording

_log = logging.getLogger(__name__)


class Recorder:
    """What `rlk_align.record.trainer` makes."""

    def __init__(self, live: Live, out: str, *, sequences: int, every: int, budget: int) -> None:
        for name, value in {"sequences": sequences, "every": every, "budget": budget}.items():
            if value < 1:
                raise BadOption(f"{name}={value}: it must be at least 1")
        self._live, self._sequences, self._every = live, sequences, every
        self._folder = (
            SideFolder(out, "train", budget)
            if live.ranks.world == 1
            else RankFolder(out, budget, live.ranks, live.replica)
        )

    def close(self) -> None:
        """Lets another recorder use the folder."""
        self._folder.close()

    @contextmanager
    def step(self, number: int, prompts: Iterable[Sequence[int]]) -> Iterator[None]:
        """Records the forwards in the context, if `number` is a multiple of `every`. Every rank of
        the job enters it.

        prompts: the token ids of each prompt of the step. A sequence that begins with one of them
        is seen; the first forward of a sequence counts, so one that gradient checkpointing repeats
        does not. The context has to hold the forwards of the whole step, because the sequences with
        the lowest hashes among all of them are recorded. If files cannot be written, as on a full
        disk, the step is not recorded, with a warning, and the context goes on.

        Raises BadOption if the step is recorded already, if the model runs under autocast, or if no
        sequence begins with one of the prompts.
        """
        if number % self._every:
            yield
            return
        known = Prompts(prompts)
        try:
            shard, recordings = self._open(number, known)
        except TraceNotWritten as error:  # on every rank
            _log.warning("rlk-align does not record step %d: %s", number, error)
            yield
            return
        try:
            with shard.abandoned_on_error():
                with ExitStack() as attached:
                    for recording in recordings:
                        attached.enter_context(recording.attach())
                    yield
                recordings[0].finish(shard)
                shard.complete()
        except TraceNotWritten as error:
            rank = self._live.ranks.rank
            _log.warning("rlk-align lost step %d of rank %d: %s", number, rank, error)

    def _open(self, number: int, known: Prompts) -> tuple[Shard, list[Recording]]:
        """The shard of a step, and what records each part of the model. Errors are those of any
        rank, on every rank."""
        shard, ranks = self._folder.begin(number), self._live.ranks
        with shard.abandoned_on_error():
            with torch.no_grad():
                engine = on_all(ranks, lambda: self._live.open(shard.path, shard.about))
                shard.describe(engine, known.by_hash.values())
            shard.writers = LastingWriter
            writers = on_all(ranks, lambda: {name: shard.writer(name) for name in SCORED})
        # The parts see the same sequences in the same order, and so number them alike.
        return shard, [
            Recording(part, known, self._sequences, writers) for part in self._live.parts
        ]
