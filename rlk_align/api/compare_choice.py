"""Decides what `compare` does: compare two sides, judge an imported run, or rescore a dump."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rlk_align.api.pair import Pair
from rlk_align.errors import BadOption
from rlk_align.logs.diagnose.contract import RUN_CONTRACT
from rlk_align.trace.run import is_imported

if TYPE_CHECKING:
    from rlk_align.api.rescoring import Rescoring

_OF_SAMPLING = ("prompts", "max_new_tokens", "edges", "production")
"""Fields of a pair that have no meaning where the ids are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedAlone:
    """A request to judge an imported run by its own log-probs."""

    run: str
    contract: str


def choose(
    pair: Pair, runs: Sequence[str], dump: str | None, sequences: int, probes: Sequence[str]
) -> "Pair | Rescoring | ImportedAlone":
    """Returns the request for the flags of `compare`. `dump`: the dump to score again, limited to
    `sequences`. `probes`: the names of the probe's flags that are set. Raises BadOption for flags
    that contradict each other."""
    if dump is not None:
        return _rescoring(pair, runs, dump, sequences, probes)
    if len(runs) != 1 or not is_imported(runs[0]):
        return pair
    if probes or replace(pair, contract=None) != Pair():
        raise BadOption(
            f"{runs[0]} is an imported run: alone it takes only --contract and --output",
            f"rlk-align compare --tokens {shlex.quote(runs[0])} --train SPEC scores its ids again",
        )
    return ImportedAlone(run=runs[0], contract=pair.contract or RUN_CONTRACT)


def _rescoring(
    pair: Pair, runs: Sequence[str], dump: str, sequences: int, probes: Sequence[str]
) -> "Rescoring":
    from rlk_align.api.rescoring import Rescoring

    default = Pair()
    changed = [n for n in _OF_SAMPLING if (getattr(pair, n) or None) != getattr(default, n)]
    if runs or changed or probes:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in (*changed, *probes))
        raise BadOption(
            f"--tokens gives the ids to score: {flags or 'runs'} cannot be combined with it",
            "omit it",
        )
    shared = {f.name: getattr(pair, f.name) for f in fields(Rescoring) if hasattr(pair, f.name)}
    return Rescoring(tokens=dump, sequences=sequences, **shared)
