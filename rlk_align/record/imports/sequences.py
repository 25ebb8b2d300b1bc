"""Which (sequence, position) the rows of forwards are.

The tokens of a request are joined over its forwards, from position 0 on. Where the sequences are
known, by another recording or by a run of log-probs, a request is the one that it shares all its
tokens with; the last sampled token of a sequence never enters a generation, and a padded row has
more tokens than its sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlk_align.errors import DumpError
from rlk_align.model.prompts import Sample
from rlk_align.record.imports.source import Forward, Segment, Tap
from rlk_align.record.shared.choose import prefix_hash


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence that is known beside the files."""

    ids: tuple[int, ...]
    prompt: int | None = None
    """The number of its first tokens that are the prompt; None if that is not known."""
    counted: tuple[bool, ...] | None = None
    """As in `Sample`."""
    logprobs: np.ndarray | None = None
    """float64 `[len(ids)]`: of each token on the imported side, NaN where it was not recorded; None
    without any."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows of a forward that the recording has."""

    passname: str
    sample: int
    segment: Segment
    new: np.ndarray
    """bool `[len(segment.ids)]`: which of its tokens."""

    @property
    def position(self) -> np.ndarray:
        """int64 `[N]`"""
        return self.segment.start + np.flatnonzero(self.new)


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a recording, and where their rows are."""

    samples: list[Sample]
    logprobs: list[np.ndarray | None]
    """Of each sample, as in `Known`."""
    placed: list[list[Placed]]
    """Of each forward."""
    notes: list[str]


@dataclass(slots=True)
class _Request:
    """What the files have of one request: its segments in order, each with its forward's number."""

    segments: list[tuple[int, Segment]] = field(default_factory=list)
    ids: dict[int, int] = field(default_factory=dict)
    prompt: int | None = None
    """The position of the first token that entered alone, which was sampled; None without one."""

    @property
    def passname(self) -> str:
        return "prefill" if self.prompt is None else "decode"

    @property
    def whole(self) -> tuple[int, ...] | None:
        """Its tokens; None if the first ones came from a cache, or one is missing."""
        found = tuple(self.ids[p] for p in sorted(self.ids))
        return found if sorted(self.ids) == list(range(len(found))) else None

    def agrees(self, ids: Sequence[int]) -> bool:
        """Whether it has the tokens of a sequence, as far as both go."""
        return all(p >= len(ids) or ids[p] == token for p, token in self.ids.items())


def place_rows(forwards: Sequence[Forward], known: Sequence[Known] | None) -> Sequences:
    """Finds the sequence and the positions of all rows. `known`: the sequences to find; None for
    those of the files. Raises DumpError if there is none."""
    requests = _requests(forwards)
    unknown = known is None
    if known is None:
        known = list(dict.fromkeys(_own(r) for r in requests if r.whole is not None))
    samples: dict[int, Sample] = {}
    placed: list[list[Placed]] = [[] for _ in forwards]
    seen: dict[tuple[str, int, frozenset[Tap]], set[int]] = {}
    left_out, repeated = 0, 0
    numbers: dict[int, int] = {}
    for request in requests:
        found = _match(request, known)
        if found is None:
            left_out += 1
            continue
        one = known[found]
        number = numbers.setdefault(found, len(numbers))
        if request.prompt is not None or number not in samples:
            samples[number] = _sample(one, request.prompt)
        for forward, segment in request.segments:
            taps = frozenset(forwards[forward].taps)
            there = seen.setdefault((request.passname, number, taps), set())
            position = segment.start + np.arange(len(segment.ids))
            has_row = (segment.rows >= 0) & (position < len(one.ids))
            new = has_row & np.array([p not in there for p in position.tolist()])
            repeated += int((has_row & ~new).sum())
            there |= set(position[new].tolist())
            if new.any():
                placed[forward].append(Placed(request.passname, number, segment, new))
    if not samples:
        of = "starts at its first token" if unknown else "has the tokens of a known one"
        raise DumpError(
            f"none of {len(requests)} sequences in the files {of}",
            "check the files; --tokens names a recording or a run with the sequences"
            if unknown
            else "--tokens names a recording, or a run of log-probs, of the same step",
        )
    notes = []
    if left_out:
        notes.append(
            f"{left_out} of {len(requests)} sequences in the files left out: they match none, or "
            "several, that are known, or their first tokens came from a cache"
        )
    if repeated:
        notes.append(f"{repeated} rows were computed again: the first ones count")
    order = [i for i, _ in sorted(numbers.items(), key=lambda item: item[1])]
    return Sequences(
        [samples[n] for n in range(len(order))], [known[i].logprobs for i in order], placed, notes
    )


def segments_of(
    key: str, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray
) -> Iterator[Segment]:
    """The sequences in one row of a batch, packed or padded: each starts at position 0, and what
    precedes the first start is padding. ids, positions, rows: int64 `[N]`."""
    starts = np.flatnonzero(positions == 0).tolist()
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        follow = positions[start:stop] == np.arange(stop - start)
        count = int(follow.argmin()) if not follow.all() else stop - start
        at = slice(start, start + count)
        yield Segment(f"{key}.{number}", 0, tuple(ids[at].tolist()), rows[at])


def _requests(forwards: Sequence[Forward]) -> list[_Request]:
    """Joins the segments of each request. One that starts again with other tokens is another."""
    latest: dict[str, _Request] = {}
    found: list[_Request] = []
    for number, forward in enumerate(forwards):
        for segment in forward.segments:
            request = latest.get(segment.key)
            tokens = {segment.start + i: token for i, token in enumerate(segment.ids)}
            if request is None or any(request.ids.get(p, t) != t for p, t in tokens.items()):
                request = latest[segment.key] = _Request()
                found.append(request)
            follows = segment.start == max(request.ids, default=-1) + 1
            if len(tokens) == 1 and request.ids and follows and request.prompt is None:
                request.prompt = segment.start
            request.ids |= tokens
            request.segments.append((number, segment))
    return found


def _own(request: _Request) -> Known:
    assert request.whole is not None
    return Known(request.whole, request.prompt)


def _sample(known: Known, prompt: int | None) -> Sample:
    """Where nothing says where the prompt ends, it is the first token."""
    length = known.prompt or prompt or 1
    name = prefix_hash(known.ids)[:12]
    return Sample(name, known.ids[:length], known.ids[length:], known.counted)


def _match(request: _Request, known: Sequence[Known]) -> int | None:
    """The known sequence that a request is: the only one that it shares the most tokens with."""
    shared = {
        i: sum(p < len(one.ids) for p in request.ids)
        for i, one in enumerate(known)
        if request.agrees(one.ids)
    }
    most = max(shared.values(), default=0)
    best = [i for i, count in shared.items() if count == most]
    if len(best) > 1:
        # Of sequences that begin alike, the one that ends where the request does.
        best = [i for i in best if len(known[i].ids) in (len(request.ids), len(request.ids) + 1)]
    return best[0] if len(best) == 1 and most > 1 else None
