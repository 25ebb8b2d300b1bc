"""How much the name of a live parameter resembles that of a checkpoint's tensor."""

import re
from collections.abc import Iterable, Iterator


def same_name(live: str, stored: str) -> bool:
    """Whether the names are equal, but for words before them, such as `model.`."""
    return live == stored or live.endswith(f".{stored}") or stored.endswith(f".{live}")


class NameIndex:
    """Finds the names that are `same_name` as another one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        self._longer: dict[str, list[str]] = {}
        for name in self._names:
            for shorter in _shorter(name):
                self._longer.setdefault(shorter, []).append(name)

    def same(self, name: str) -> list[str]:
        """These names, an equal one first."""
        near = (name, *_shorter(name))
        return [n for n in near if n in self._names] + self._longer.get(name, [])


def _shorter(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def likeness(live: str, stored: str) -> float:
    """Ranks the tensors whose values are equal: first those with the same numbers, then those that
    share the most words."""
    if same_name(live, stored):
        return 1e3
    numbers = [re.findall(r"\d+", name) for name in (live, stored)]
    a, b = (set(re.findall(r"[a-z]+", name.lower())) for name in (live, stored))
    return 10.0 * (numbers[0] == numbers[1]) + len(a & b) / max(1, len(a | b))
