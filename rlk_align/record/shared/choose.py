"""Which sequences are recorded: those whose prompts have the lowest hashes.

A rollout engine has to choose before it samples, so the hash of the prompt decides first, and that
of the whole sequence among the responses to one prompt. Both sides compute the same hashes, and so
choose the same sequences without a message between them.
"""

import hashlib
from bisect import insort
from collections.abc import Iterable, Sequence

import numpy as np

from rlk_align.errors import BadOption

Key = tuple[str, str]
"""The hashes of a sequence's prompt and of the whole sequence."""


def prefix_hash(ids: Sequence[int]) -> str:
    """The 128-bit hash of token ids, in hexadecimal: BLAKE2b of their 64-bit little-endian bytes.
    Equal ids are the same (sequence, position) on every side."""
    return hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


class Prompts:
    """The prompts of a step, by their hashes."""

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raises BadOption for prompts that are not token ids."""
        try:
            self.by_hash = {prefix_hash(ids): tuple(map(int, ids)) for ids in prompts}
        except (TypeError, ValueError) as error:
            raise BadOption(
                f"the prompts of the step are not lists of token ids: {error}",
                "give a list of the token ids of each prompt, without padding",
            ) from error
        self._lengths = sorted({len(ids) for ids in self.by_hash.values()}, reverse=True)

    def of(self, ids: Sequence[int]) -> tuple[str, int] | None:
        """The hash and the length of the longest prompt that a sequence continues; None if it
        continues none."""
        for length in self._lengths:
            if 0 < length < len(ids) and (found := prefix_hash(ids[:length])) in self.by_hash:
                return found, length
        return None


class Lowest:
    """The lowest keys among those offered so far."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.keys: list[Key] = []

    def offer(self, key: Key) -> bool:
        """Whether a new key is among the lowest so far; a key that was offered before is not."""
        if key in self.keys:
            return False
        insort(self.keys, key)
        del self.keys[self._count :]
        return key in self.keys


class LowestPrompts:
    """The lowest hashes of prompts among the requests offered so far, each as often as it was
    offered."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._hashes: list[str] = []

    def offer(self, prompt: Sequence[int]) -> bool:
        """Whether the request may be among the `count` lowest so far, whatever it samples."""
        new = prefix_hash(prompt)
        insort(self._hashes, new)
        del self._hashes[self._count :]
        return new <= self._hashes[-1]


def lowest_prompts(prompts: Sequence[Sequence[int]], count: int) -> list[int]:
    """The requests, by their places in `prompts`, that may be among the `count` lowest whatever
    they sample: those of the lowest prompts, with all requests that share the last one."""
    hashes = [prefix_hash(ids) for ids in prompts]
    limit = sorted(hashes)[:count][-1]
    return [i for i, each in enumerate(hashes) if each <= limit]
