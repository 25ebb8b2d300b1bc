"""The recorded requests of one step of a server, from their first forward to their last token."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.record.shared.choose import Key, Lowest, LowestPrompts, prefix_hash
from rlk_align.record.shared.layout import RequestRecord
from rlk_align.record.shared.shard import sequence_name
from rlk_align.trace.writer import PassWriter


@dataclass(slots=True)
class Tracked:
    """A request that is recorded."""

    number: int
    """Its sample."""
    request: Any
    """vLLM's own record of it."""
    prompt: tuple[int, ...]
    logprobs: list[float] = field(default_factory=list)
    computed: int = 0
    """The number of its first tokens that were computed, or were in the cache."""
    chunks: int = 0
    cached: int = 0
    recomputed: int = 0
    finished: bool = False
    left_out: str = ""

    def scheduled(self, tokens: int) -> None:
        """Counts the rows of a forward that the scheduler has just planned."""
        start = self.request.num_computed_tokens - tokens
        if not self.computed:
            self.cached = self.computed = start
        if self.computed <= start < len(self.prompt):
            self.chunks += 1
        self.recomputed += max(0, min(self.computed, start + tokens) - start)
        self.computed = max(self.computed, start + tokens)

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.request.output_token_ids)

    @property
    def sample(self) -> Sample:
        ids = self.ids
        return Sample(sequence_name(ids), self.prompt, ids[len(self.prompt) :])

    def record(self) -> RequestRecord:
        return RequestRecord(
            sample=self.number,
            request=self.request.request_id,
            chunks=self.chunks,
            cached=self.cached,
            preemptions=self.request.num_preemptions,
            recomputed=self.recomputed,
            left_out=self.left_out,
        )


class Window:
    """The requests of one step."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._lowest = LowestPrompts(sequences)
        self.tracked: dict[str, Tracked] = {}
        """By the request's id in vLLM."""
        self.seen = 0
        self.unrecorded: Counter[str] = Counter()
        self.full = False
        """Whether the last request of the step has arrived."""

    def offer(self, request: Any) -> Tracked | None:
        """Takes a request of the step. Returns it if it is to be recorded."""
        self.seen += 1
        if reason := unrecordable(request) or self._other_adapter(request):
            self.unrecorded[reason] += 1
            return None
        prompt = tuple(request.prompt_token_ids)
        if not self._lowest.offer(prompt):
            return None
        tracked = Tracked(len(self.tracked), request, prompt)
        self.tracked[request.request_id] = tracked
        return tracked

    def _other_adapter(self, request: Any) -> str:
        """Why a request is not recorded because of its adapter; empty if it can be."""
        first = next(iter(self.tracked.values()), None)
        if first is None or adapter_number(first.request) == adapter_number(request):
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
                each.left_out = "vLLM did not return a log-prob of each token"
            if not each.left_out and len(each.ids) >= context:
                each.left_out = "it fills the context, so that it cannot be scored again"
            if not each.left_out:
                key = prefix_hash(each.prompt), prefix_hash(each.ids)
                found.setdefault(key, each)
                lowest.offer(key)
        return sorted((found[key] for key in lowest.keys), key=lambda each: each.number)

    def scheduled(self, planned: Mapping[str, int]) -> None:
        """Counts the rows of a forward that the scheduler has just planned. `planned`: request ->
        the number of its tokens."""
        for name, each in self.tracked.items():
            if name in planned:
                each.scheduled(planned[name])

    def reasons(self) -> str:
        """Why requests are not recorded, in words."""
        left_out = Counter(each.left_out for each in self.tracked.values() if each.left_out)
        said = [f"{reason} ({count})" for reason, count in (self.unrecorded + left_out).items()]
        return "; ".join(said) or "there was no request"

    def batch(self) -> TokenBatch:
        return TokenBatch(tuple(each.sample for each in self.tracked.values()))


def adapter_number(request: Any) -> int:
    """vLLM's number of a request's adapter, which each adapter has its own of; 0 for none."""
    return 0 if request.lora_request is None else int(request.lora_request.lora_int_id)


def unrecordable(request: Any) -> str:
    """Why a request of vLLM is not recorded; empty if it can be."""
    params = request.sampling_params
    reasons = {
        "it is not sampled": params is None,
        "a prompt of embeddings": request.prompt_token_ids is None
        or request.prompt_embeds is not None,
        "images, audio or video": bool(request.mm_features),
        "a prompt that is streamed": bool(getattr(request, "resumable", False)),
        "stop strings, which end a response where its tokens do not say": params is not None
        and bool(params.stop),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def write_logprobs(
    writer: PassWriter, number: int, sample: Sample, logprobs: np.ndarray | list[float]
) -> None:
    """Records the log-probs of a sample's response."""
    rows = torch.from_numpy(np.asarray(logprobs, dtype=np.float32)).reshape(-1, 1)
    position = np.arange(len(rows)) + sample.sampled_positions.start
    writer("logprob", rows, np.full(len(rows), number), position)
