"""A recorded request, from a dump."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.truncation import truncation

RLK = "rlk"
"""The name of the kernels' sampler, in a dump and as an engine's option."""
MOST_NAMES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRequest:
    """A request whose tokens the kernels' sampler drew. N = tokens that are drawn again."""

    name: str
    ids: tuple[int, ...]
    """The prompt and the response."""
    at: NDArray[np.int64]
    """[N]: the indices in `ids` of the tokens that were drawn, which are their positions."""
    seeds: NDArray[np.int64]
    """[N]"""
    logprobs: NDArray[np.float64]
    """[N], NaN where none was recorded."""
    processed: bool
    """Whether the log-probs are among the kept tokens, at the temperature."""
    temperature: float
    limits: dict[str, float]

    @property
    def batch(self) -> TokenBatch:
        """The request as a batch, of which an engine scores every drawn token."""
        first = int(self.at[0])
        return TokenBatch((Sample(self.name, self.ids[:first], self.ids[first:]),))


def of_dump(dump: Iterable[Sequences], name: str, step: int | None) -> RecordedRequest:
    """The request with this id in a dump, and of this step. Raises DumpError if it is not there, or
    if the dump lacks what a draw needs."""
    known: list[str] = []
    found: list[Sequences] = []
    for batch in dump:
        for k, other in enumerate(batch.ids):
            if other == name and step in (None, int(batch.steps[k])):
                found.append(batch.take(np.array([k])))
            elif len(known) < MOST_NAMES:
                known.append(other)
    if not found:
        where = "" if step is None else f" of step {step}"
        raise DumpError(f"the dump has no request {name!r}{where}", f"it has {', '.join(known)}")
    if len(found) > 1:
        steps = ", ".join(str(int(one.steps[0])) for one in found[:MOST_NAMES])
        raise DumpError(
            f"the dump has {len(found)} requests {name!r}, of the steps {steps}",
            "name one of the steps with --step",
        )
    return _request(found[0], name)


def _request(one: Sequences, name: str) -> RecordedRequest:
    sampling, sampler = one.sampling[0], one.samplers[0]
    if sampler != RLK:
        drew = "does not say what drew its tokens" if sampler is None else f"says {sampler!r} drew"
        raise DumpError(
            f"request {name!r} {drew}; only tokens of the kernels' sampler can be drawn again",
            f'a record of such tokens has "sampler": "{RLK}" and their "seeds"',
        )
    if sampling.temperature is None:
        raise DumpError(
            f"request {name!r} does not state its temperature",
            'write "temperature" to "sampling" in its record',
        )
    at = np.flatnonzero(~one.seeds_missing)
    # One seed of a record is that of its prompt's tokens too, which nothing drew.
    at = at[at >= max(1, int(one.prompt_lengths[0]))]
    if not len(at):
        raise DumpError(f"request {name!r} has no seed of any token", 'write "seeds" to its record')
    given = sampling.model_dump(exclude_none=True)
    given["top_k"] = max(given.get("top_k", 0), 0)
    return RecordedRequest(
        name=name,
        ids=tuple(one.token_ids.tolist()),
        at=at,
        seeds=one.seeds[at],
        logprobs=one.rollout[at],
        processed=sampling.logprobs_mode == "processed_logprobs",
        temperature=sampling.temperature,
        limits=truncation(given),
    )
