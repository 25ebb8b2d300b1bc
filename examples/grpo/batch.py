"""The answers of a rollout, and the packed rows that the trainer computes from them.

T = tokens of a pack, which consists of whole sequences, one after another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from problems import Problem
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Tokens that the rollout engine sampled in one request."""

    first: int
    """The first token's index in `Answer.ids`."""
    logprobs: tuple[float, ...]
    """The engine's log-prob of each token."""
    cut: bool
    """Whether the token limit ended the span."""
    seed: int = 0
    """The request's."""

    @property
    def indices(self) -> range:
        return range(self.first, self.first + len(self.logprobs))


@dataclass
class Answer:
    """One sequence of a group: a prompt, sampled spans, and the tool's text between them."""

    problem: Problem
    group: int
    ids: list[int]
    """All tokens so far; the first `prompt_length` are the prompt."""
    prompt_length: int
    spans: list[Span] = field(default_factory=list)
    tries: list[str] = field(default_factory=list)
    """The text of each span."""
    reward: float = 0.0

    @property
    def cut(self) -> bool:
        return any(span.cut for span in self.spans)


@dataclass(frozen=True)
class Sample:
    """A sequence for the trainer. All lists have the length of `ids`."""

    ids: list[int]
    prompt_length: int
    mask: list[bool]
    """The tokens that the loss counts."""
    rollout_logprobs: list[float | None]
    """None for tokens that the rollout engine did not sample."""
    advantage: float


def to_sample(answer: Answer, advantage: float) -> Sample:
    """The loss counts the sampled tokens, and no token of an answer that was cut at its limit."""
    logprobs: list[float | None] = [None] * len(answer.ids)
    for span in answer.spans:
        for index, value in zip(span.indices, span.logprobs, strict=True):
            logprobs[index] = value
    mask = [value is not None and not answer.cut for value in logprobs]
    return Sample(answer.ids, answer.prompt_length, mask, logprobs, advantage)


@dataclass(frozen=True)
class Pack:
    """Samples in one row."""

    tokens: int
    """The number of tokens, without padding."""
    counted: int
    """The number of tokens that the loss counts."""
    answers: int
    """The number of samples that have such tokens."""
    ids: Tensor
    """int64 [1, T]."""
    positions: Tensor
    """int64 [1, T], from 0 in each sample."""
    starts: Tensor
    """int32 [samples + 1]: where each sample begins, the padding included, and where the last
    ends."""
    mask: Tensor
    """bool [T]."""
    sampled: Tensor
    """bool [T]: True where the rollout engine returned a log-prob."""
    rollout_logprobs: Tensor
    """float32 [T], 0 where nothing was sampled."""
    advantages: Tensor
    """float32 [T]."""


PADDED_TO = {"cuda": 512, "cpu": 8}
"""The length of a pack is a multiple of this: on a GPU, kernels are prepared for each length."""


def packs(samples: Sequence[Sample], tokens: int, device: torch.device) -> Iterator[Pack]:
    """Packs the samples in their order. A pack has at most `tokens` tokens, or one sample that is
    longer. After the samples comes a sequence of padding, which the loss ignores."""
    row: list[Sample] = []
    for sample in samples:
        if row and sum(len(s.ids) for s in row) + len(sample.ids) > tokens:
            yield _pack(row, device)
            row = []
        row.append(sample)
    if row:
        yield _pack(row, device)


def empty_pack(device: torch.device, tokens: int = 1) -> Pack:
    """A pack of short sequences of padding: for a rank whose answers need fewer packs than another
    rank's, and to prepare kernels for packs of this length."""
    sizes = [min(EMPTY, tokens - start) for start in range(0, tokens, EMPTY)]
    return _pack([_padding(size) for size in sizes], device)


EMPTY = 64
"""The most tokens of a sequence of padding in a pack of padding alone."""


def _padding(size: int) -> Sample:
    return Sample([0] * size, 0, [False] * size, [None] * size, 0.0)


def _pack(row: list[Sample], device: torch.device) -> Pack:
    count = sum(len(s.ids) for s in row)
    if padding := -count % PADDED_TO[device.type]:
        row = [*row, _padding(padding)]
    logprobs = [value for s in row for value in s.rollout_logprobs]
    flat: dict[str, list[Any]] = {
        "ids": [i for s in row for i in s.ids],
        "positions": [i for s in row for i in range(len(s.ids))],
        "mask": [m for s in row for m in s.mask],
        "sampled": [value is not None for value in logprobs],
        "rollout_logprobs": [0.0 if value is None else value for value in logprobs],
        "advantages": [s.advantage for s in row for _ in s.ids],
    }
    tensors = {name: torch.tensor(values, device=device) for name, values in flat.items()}
    starts = [*accumulate((len(s.ids) for s in row), initial=0)]
    tensors["starts"] = torch.tensor(starts, dtype=torch.int32, device=device)
    two = {name: tensors[name][None] for name in ("ids", "positions")}
    counts = {"counted": sum(flat["mask"]), "answers": sum(any(s.mask) for s in row)}
    return Pack(tokens=count, **counts, **tensors | two)
