"""The recorded requests of one step of a server, from their first forward to their last token."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.record.rollout.core import LiveRequest
from rlk_align.record.shared.choose import Key, Lowest, LowestPrompts, prefix_hash
from rlk_align.record.shared.layout import RequestRecord
from rlk_align.record.shared.shard import sequence_name
from rlk_align.trace.writer import PassWriter


@dataclass(slots=True)
class Tracked:
    """A request that is recorded."""

    number: int
    """Its sample."""
    request: LiveRequest
    prompt: tuple[int, ...]
    logprobs: list[float] = field(default_factory=list)
    computed: int = 0
    """The number of its first tokens that were computed, or were in the cache."""
    chunks: int = 0
    cached: int = 0
    recomputed: int = 0
    finished: bool = False
    left_out: str = ""

    def scheduled(self, start: int, tokens: int) -> None:
        """Counts the rows of a forward that the scheduler has just planned. `start`: the first
        position."""
        if not self.computed:
            self.cached = self.computed = start
        if self.computed <= start < len(self.prompt):
            self.chunks += 1
        self.recomputed += max(0, min(self.computed, start + tokens) - start)
        self.computed = max(self.computed, start + tokens)

    @property
    def sample(self) -> Sample:
        ids = self.request.ids
        return Sample(sequence_name(ids), self.prompt, ids[len(self.prompt) :])

    def record(self) -> RequestRecord:
        return RequestRecord(
            sample=self.number,
            request=self.request.name,
            chunks=self.chunks,
            cached=self.cached,
            preemptions=self.request.preemptions,
            recomputed=self.recomputed,
            left_out=self.left_out,
        )


class Window:
    """The requests of one step."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._lowest = LowestPrompts(sequences)
        self.tracked: dict[str, Tracked] = {}
        """By the request's id in the engine."""
        self.seen = 0
        self.unrecorded: Counter[str] = Counter()
        self.full = False
        """Whether the last request of the step has arrived."""

    def offer(self, request: LiveRequest) -> Tracked | None:
        """Takes a request of the step. Returns it if it is to be recorded."""
        self.seen += 1
        if reason := request.refusal or self._other_adapter(request):
            self.unrecorded[reason] += 1
            return None
        if not self._lowest.offer(request.prompt):
            return None
        tracked = Tracked(len(self.tracked), request, request.prompt)
        self.tracked[request.name] = tracked
        return tracked

    def _other_adapter(self, request: LiveRequest) -> str:
        """Why a request is not recorded because of its adapter; empty if it can be."""
        first = next(iter(self.tracked.values()), None)
        if first is None or first.request.adapter == request.adapter:
            return ""
        return "another adapter than that of the first recorded request"

    @property
    def sampled(self) -> bool:
        """Whether every request of the step has arrived, and every recorded one has ended."""
        return self.full and all(each.finished for each in self.tracked.values())

    def chosen(self, context: int) -> list[Tracked]:
        """Those with the lowest hashes. `context`: the longest sequence that the engine takes; a
        sequence is scored with one more token."""
        lowest, found = Lowest(self._sequences), dict[Key, Tracked]()
        for each in self.tracked.values():
            if not each.left_out and len(each.logprobs) != len(each.sample.response_ids):
                each.left_out = "the engine did not return a log-prob of each token"
            if not each.left_out and len(each.request.ids) >= context:
                each.left_out = "it fills the context, so that it cannot be scored again"
            if not each.left_out:
                key = prefix_hash(each.prompt), prefix_hash(each.request.ids)
                found.setdefault(key, each)
                lowest.offer(key)
        return sorted((found[key] for key in lowest.keys), key=lambda each: each.number)

    def reasons(self) -> str:
        """Why requests are not recorded, in words."""
        left_out = Counter(each.left_out for each in self.tracked.values() if each.left_out)
        said = [f"{reason} ({count})" for reason, count in (self.unrecorded + left_out).items()]
        return "; ".join(said) or "there was no request"

    def batch(self) -> TokenBatch:
        return TokenBatch(tuple(each.sample for each in self.tracked.values()))


def write_logprobs(
    writer: PassWriter, number: int, sample: Sample, logprobs: np.ndarray | list[float]
) -> None:
    """Records the log-probs of a sample's response."""
    rows = torch.from_numpy(np.asarray(logprobs, dtype=np.float32)).reshape(-1, 1)
    position = np.arange(len(rows)) + sample.sampled_positions.start
    writer("logprob", rows, np.full(len(rows), number), position)
