"""The edges of a comparison: the pairs of passes that are compared."""

from collections.abc import Iterable

from rlk_align.results import EdgeName, SideName

EDGE_ENDS: dict[EdgeName, tuple[tuple[SideName, str], tuple[SideName, str]]] = {
    "decode_vs_prefill": (("rollout", "decode"), ("rollout", "prefill")),
    "prefill_vs_train": (("rollout", "prefill"), ("train", "prefill")),
    "decode_vs_train": (("rollout", "decode"), ("train", "prefill")),
}
"""Edge -> its two passes, each as (side, pass)."""

EDGES = tuple(EDGE_ENDS)


def passes_for(judged: Iterable[EdgeName], side: SideName) -> tuple[str, ...]:
    """The observed passes of a side that the judged edges need, decode first."""
    needed = {p for edge in judged for end, p in EDGE_ENDS[edge] if end == side}
    return tuple(p for p in ("decode", "prefill") if p in needed)
