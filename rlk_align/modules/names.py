"""How much the name of a live parameter resembles that of a checkpoint's tensor."""

import re


def same_name(live: str, stored: str) -> bool:
    """Whether the names are equal, but for words before them, such as `model.`."""
    return live == stored or live.endswith(f".{stored}") or stored.endswith(f".{live}")


def likeness(live: str, stored: str) -> float:
    """Ranks the tensors whose values are equal: first those with the same numbers, then those that
    share the most words."""
    if same_name(live, stored):
        return 1e3
    numbers = [re.findall(r"\d+", name) for name in (live, stored)]
    a, b = (set(re.findall(r"[a-z]+", name.lower())) for name in (live, stored))
    return 10.0 * (numbers[0] == numbers[1]) + len(a & b) / max(1, len(a | b))
