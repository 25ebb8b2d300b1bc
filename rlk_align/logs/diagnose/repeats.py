"""Answers that are sampled more than once, and whether chance explains it.

Of independent samples of one prompt, the next one repeats an earlier answer a with the probability
that the rollout's own log-probs give a. So a group's samples, taken in turn, tell how probable its
repeats are, whatever the model and however short the answers.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.interval import share
from rlk_align.logs.diagnose.fills import impossible
from rlk_align.logs.dumps.sequences import Sequences

Mask = NDArray[np.bool_]
_ALLOWED = 0.5
"""The part of its log-prob that an answer counts with: log-probs that were recorded at temperature
1 of answers that were sampled at half of it are no fault of the sampler's seed."""
_IMPROBABLE, _GREEDY = math.log(0.05), 0.002
"""Greedy decoding takes tokens of such a log-prob in at most this share of its steps: they are the
most probable ones there."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MOST = 0.5
"""A group's samples repeat one another where more than this part of those that could do."""


@dataclass(frozen=True)
class Repeats:
    """The groups of a run whose samples repeat one another."""

    groups: int
    """Groups with at least two scored samples."""
    repeated: NDArray[np.int64]
    """One sample of each group that repeats more than chance explains."""
    distinct: int
    """Answers in those groups."""
    samples: int
    """Samples in those groups."""
    chance: float
    """The largest probability, in a decimal logarithm, that chance repeats such a group so."""
    greedy: bool
    """Whether greedy decoding explains the repeats: hardly any token is improbable."""


def answers(run: Sequences) -> NDArray[np.uint64]:
    """[S]; a number that sequences of one step with the same tokens share. Where the ids are not
    known, every sequence is an answer of its own."""
    names = np.empty(len(run), dtype=np.uint64)
    ids = np.ascontiguousarray(run.token_ids, dtype="<i8")
    for s, name in enumerate(run.ids):
        own = ids[run.offsets[s] : run.offsets[s + 1]]
        known = len(own) > 0 and own[0] >= 0
        content = own.tobytes() if known else f"{s} of {name}".encode()
        names[s] = _number(content, int(run.steps[s]))
    return names


def prompts_of(run: Sequences) -> NDArray[np.uint64]:
    """[S]; a number that sequences of one step with one prompt share: a group."""
    ids = np.ascontiguousarray(run.token_ids, dtype="<i8")
    ends = run.offsets[:-1] + run.prompt_lengths
    contents = (ids[a:b].tobytes() for a, b in zip(run.offsets, ends, strict=False))
    names = [_number(x, int(step)) for x, step in zip(contents, run.steps, strict=True)]
    return np.array(names, dtype=np.uint64)


def _number(content: bytes, step: int) -> int:
    digest = hashlib.blake2b(content, digest_size=8, salt=step.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


def repeats(run: Sequences, chance: float) -> Repeats:
    """Returns the groups whose samples repeat one another with less than this probability. Samples
    of one step with one prompt are a group; those that the loss leaves out are not counted."""
    names, logs = answers(run), _log_probs(run)
    prompts, of_group = prompts_of(run), dict[int, list[int]]()
    for s in np.flatnonzero(np.bincount(run.sequence, run.scored, len(run)) > 0).tolist():
        of_group.setdefault(int(prompts[s]), []).append(s)
    groups = [g for g in of_group.values() if len(g) > 1 and not _all_greedy(run, g)]
    found = [(g, log) for g in groups if (log := _log_chance(names[g], logs[g])) < math.log(chance)]
    first = np.array([g[0] for g, _ in found], dtype=np.int64)
    members = [s for g, _ in found for s in g]
    return Repeats(
        groups=len(groups),
        repeated=first,
        distinct=len(np.unique(names[members])),
        samples=len(members),
        chance=max((log for _, log in found), default=0.0) / math.log(10),
        greedy=_greedy(run, np.unique(names, return_index=True)[1], np.array(members, dtype=int)),
    )


def _all_greedy(run: Sequences, group: list[int]) -> bool:
    return all(run.sampling[s].temperature == 0 for s in group)


def _log_probs(run: Sequences) -> NDArray[np.float64]:
    """[S]; of each response, the logarithm of the probability that the rollout samples it."""
    used = ~run.rollout_missing & ~impossible(run.rollout) & _responses(run)
    values = np.where(used, np.minimum(run.rollout, 0.0), 0.0)
    return np.bincount(run.sequence, values, len(run)).astype(np.float64)


def _responses(run: Sequences) -> Mask:
    return np.asarray(run.position >= run.prompt_lengths[run.sequence])


def _log_chance(names: NDArray[np.uint64], logs: NDArray[np.float64]) -> float:
    """The logarithm of an upper bound of the probability that samples repeat earlier ones as often
    as these do; 0 where most of them do not."""
    before: dict[int, float] = {}
    repeated, total = 0, 0.0
    for name, log in zip(names.tolist(), logs.tolist(), strict=True):
        if name in before:
            repeated += 1
            total += min(0.0, math.log(sum(before.values())))
        else:
            before[name] = math.exp(max(_ALLOWED * log, -700.0))
    others = len(names) - 1
    # Which of them repeat is one of so many choices.
    return total + math.log(math.comb(others, repeated)) if repeated > _MOST * others else 0.0


def _greedy(run: Sequences, distinct: NDArray[np.int64], members: NDArray[np.int64]) -> bool:
    """Whether hardly any token of these answers is improbable."""
    if not len(members):
        return False
    own = np.zeros(len(run), dtype=bool)
    own[np.intersect1d(distinct, members)] = True
    tokens = ~run.rollout_missing & _responses(run) & own[run.sequence]
    improbable = tokens & (np.where(tokens, run.rollout, 0.0) < _IMPROBABLE)
    return not share(int(improbable.sum()), int(tokens.sum())).above(_GREEDY)


def shared_prefixes(run: Sequences) -> NDArray[np.int64]:
    """[N]; a number, from 0, that response tokens of one step share which are the same token behind
    the same tokens; −1 where a token has no such companion in another sequence, or ids are not
    known."""
    found = np.full(run.tokens, -1, dtype=np.int64)
    place = run.offsets[:-1] + run.prompt_lengths
    state = prompts_of(run)
    alive, count = np.arange(len(run)), 0
    while len(alive := alive[place[alive] < run.offsets[alive + 1]]):
        ids = run.token_ids[place[alive]]
        state[alive] = (state[alive] ^ ids.astype(np.uint64)) * _ODD
        state[alive] ^= state[alive] >> np.uint64(29)
        _, cell, times = np.unique(state[alive], return_inverse=True, return_counts=True)
        shared = (times[cell] > 1) & (ids >= 0)
        alive, cell = alive[shared], np.unique(cell[shared], return_inverse=True)[1]
        found[place[alive]] = count + cell
        count += int(cell.max(initial=-1)) + 1
        place[alive] += 1
    return found
