"""Answers that are sampled more than once, and whether chance explains the repeats.

If the samples of a prompt are independent, the next sample repeats an earlier answer with the
probability that the rollout's log-probs give to that answer. The probability of a group's repeats
therefore follows from its samples one after another, for any model and any length of answers.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.interval import share
from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.diagnose.fill_values import Mask, impossible
from rlk_align.logs.dumps.sequences import Sequences

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""An odd number that mixes the bits of a hash."""


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
    """The decimal logarithm of the largest probability with which chance repeats such a group."""
    greedy: bool
    """Whether greedy decoding explains the repeats: hardly any token is improbable."""


def answers(run: Sequences) -> NDArray[np.uint64]:
    """[S]; a number that is equal for sequences of one step with the same tokens. If the ids are
    unknown, every sequence is a distinct answer."""
    names = np.empty(len(run), dtype=np.uint64)
    ids = np.ascontiguousarray(run.token_ids, dtype="<i8")
    for s, name in enumerate(run.ids):
        ids_of_sequence = ids[run.offsets[s] : run.offsets[s + 1]]
        known = len(ids_of_sequence) > 0 and ids_of_sequence[0] >= 0
        content = ids_of_sequence.tobytes() if known else f"{s} of {name}".encode()
        names[s] = _number(content, int(run.steps[s]))
    return names


def prompts_of(run: Sequences) -> NDArray[np.uint64]:
    """[S]; a number that is equal for sequences of one step with the same prompt, which are a
    group."""
    ids = np.ascontiguousarray(run.token_ids, dtype="<i8")
    ends = run.offsets[:-1] + run.prompt_lengths
    contents = (ids[a:b].tobytes() for a, b in zip(run.offsets, ends, strict=False))
    names = [_number(x, int(step)) for x, step in zip(contents, run.steps, strict=True)]
    return np.array(names, dtype=np.uint64)


def _number(content: bytes, step: int) -> int:
    digest = hashlib.blake2b(content, digest_size=8, salt=step.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


def repeats(run: Sequences, contract: RunContract) -> Repeats:
    """Returns the groups whose samples repeat one another more than the contract's limit of chance
    explains. The samples of one step with one prompt are a group; samples outside of the loss do
    not count."""
    names, logs = answers(run), _log_probs(run, contract)
    allowed = math.log(contract.limit("duplicated", "chance"))
    prompts, of_group = prompts_of(run), dict[int, list[int]]()
    for s in np.flatnonzero(np.bincount(run.sequence, run.scored, len(run)) > 0).tolist():
        of_group.setdefault(int(prompts[s]), []).append(s)
    groups = [g for g in of_group.values() if len(g) > 1 and not _all_greedy(run, g)]
    chances = [_log_chance(names[g], logs[g], contract) for g in groups]
    beyond_chance = [(g, log) for g, log in zip(groups, chances, strict=True) if log < allowed]
    first = np.array([g[0] for g, _ in beyond_chance], dtype=np.int64)
    members = [s for g, _ in beyond_chance for s in g]
    return Repeats(
        groups=len(groups),
        repeated=first,
        distinct=len(np.unique(names[members])),
        samples=len(members),
        chance=max((log for _, log in beyond_chance), default=0.0) / math.log(10),
        greedy=_greedy(
            run, np.unique(names, return_index=True)[1], np.array(members, dtype=int), contract
        ),
    )


def _all_greedy(run: Sequences, group: list[int]) -> bool:
    return all(run.sampling[s].temperature == 0 for s in group)


def _log_probs(run: Sequences, contract: RunContract) -> NDArray[np.float64]:
    """[S]; the logarithm of the probability with which the rollout samples each response."""
    used = ~run.rollout_missing & ~impossible(run.rollout, contract) & _responses(run)
    values = np.where(used, np.minimum(run.rollout, 0.0), 0.0)
    return np.bincount(run.sequence, values, len(run)).astype(np.float64)


def _responses(run: Sequences) -> Mask:
    return np.asarray(run.position >= run.prompt_lengths[run.sequence])


def _log_chance(
    names: NDArray[np.uint64], logs: NDArray[np.float64], contract: RunContract
) -> float:
    """The logarithm of an upper bound of the probability of so many repeats; 0 if most samples are
    no repeats."""
    temperature = contract.threshold("duplicated.temperature")
    before: dict[int, float] = {}
    repeated, total = 0, 0.0
    for name, log in zip(names.tolist(), logs.tolist(), strict=True):
        if name in before:
            repeated += 1
            total += min(0.0, math.log(sum(before.values())))
        else:
            before[name] = math.exp(max(temperature * log, -700.0))
    others = len(names) - 1
    if not repeated > contract.threshold("duplicated.most") * others:
        return 0.0
    # Any choice of so many samples could be the repeats.
    return total + math.log(math.comb(others, repeated))


def _greedy(
    run: Sequences,
    distinct: NDArray[np.int64],
    members: NDArray[np.int64],
    contract: RunContract,
) -> bool:
    """Whether hardly any token of these answers is improbable."""
    bound = math.log(contract.threshold("duplicated.improbable"))
    if not len(members):
        return False
    of_answers = np.zeros(len(run), dtype=bool)
    of_answers[np.intersect1d(distinct, members)] = True
    tokens = ~run.rollout_missing & _responses(run) & of_answers[run.sequence]
    improbable = tokens & (np.where(tokens, run.rollout, 0.0) < bound)
    part = share(int(improbable.sum()), int(tokens.sum()))
    return not part.above(contract.threshold("duplicated.greedy"))


def shared_prefixes(run: Sequences) -> NDArray[np.int64]:
    """[N]; a number, from 0, that is equal for response tokens of one step with the same id after
    the same tokens; −1 if no other sequence has this token there, or if ids are unknown."""
    numbers = np.full(run.tokens, -1, dtype=np.int64)
    at = run.offsets[:-1] + run.prompt_lengths
    state = prompts_of(run)
    alive, count = np.arange(len(run)), 0
    while len(alive := alive[at[alive] < run.offsets[alive + 1]]):
        ids = run.token_ids[at[alive]]
        state[alive] = (state[alive] ^ ids.astype(np.uint64)) * _MULTIPLIER
        state[alive] ^= state[alive] >> np.uint64(29)
        _, cell, times = np.unique(state[alive], return_inverse=True, return_counts=True)
        shared = (times[cell] > 1) & (ids >= 0)
        alive, cell = alive[shared], np.unique(cell[shared], return_inverse=True)[1]
        numbers[at[alive]] = count + cell
        count += int(cell.max(initial=-1)) + 1
        at[alive] += 1
    return numbers
