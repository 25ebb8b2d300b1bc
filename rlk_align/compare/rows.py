"""Every token of every edge: its log-probs, and its error at every site.

`rlk_align.token_table` describes the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlk_align.errors import ModelError
from rlk_align.model.sites import RowIndex
from rlk_align.model.tokenise import fast_tokenizer
from rlk_align.token_table import HEAD

MAX_ERRORS = 8_000_000
"""Errors kept of an edge, 32 MB: of a larger run, those of a seeded choice of its rows."""
_SEED = 17


@dataclass(slots=True)
class EdgeRows:
    """One edge, row by row of the batch; arrays `[N]`."""

    edge: str
    kept: np.ndarray
    """bool: rows whose errors are kept."""
    first: np.ndarray
    second: np.ndarray
    """float64: the passes' log-probs, NaN where there is none."""
    paired: np.ndarray
    """bool: whether both passes have a log-prob there."""
    errors: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 by site, of the kept rows: relative L2, `UNKNOWN` where it was not compared."""

    @classmethod
    def of(cls, edge: str, index: RowIndex, sites: int) -> "EdgeRows":
        """Empty, for a batch and so many sites."""
        kept = np.ones(len(index), dtype=bool)
        most = MAX_ERRORS // max(1, sites)
        if len(index) > most:
            kept[:] = False
            kept[np.random.default_rng(_SEED).permutation(len(index))[:most]] = True
        nothing = np.full(len(index), np.nan)
        return cls(edge, kept, nothing, nothing.copy(), np.zeros(len(index), dtype=bool))

    def add(self, site: str, number: np.ndarray, error: np.ndarray) -> None:
        """The errors of a site, float `[M]`, of these rows of the batch."""
        full = np.full(len(self.kept), UNKNOWN, dtype=np.float32)
        full[number] = error
        self.errors[site] = full[self.kept]

    def add_logprobs(self, number: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        """Of both passes, `[M]`, of these rows of the batch."""
        self.first[number], self.second[number], self.paired[number] = first, second, True


UNKNOWN = np.float32(-1)
"""Stands for an error that is not known; a null in the table."""


NO_ROWS = pa.schema(list(HEAD.items())).empty_table()


def rows_table(edges: Sequence[EdgeRows], index: RowIndex, model: Path) -> pa.Table:
    """The table of `rlk_align.token_table`; the checkpoint tells what the tokens say."""
    sites = list(dict.fromkeys(site for e in edges for site in e.errors))
    lengths = np.diff(index.offsets)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    prompts = np.array([len(s.prompt_ids) for s in index.batch.samples])
    response = index.position >= np.repeat(prompts, lengths)
    text = _texts(index.token, model)
    parts = []
    for e in edges:
        head = [
            pa.array([e.edge] * len(index)).dictionary_encode(),
            pa.array(sample, pa.int32()),
            pa.array(index.position, pa.int32()),
            pa.array(index.token, pa.int32()),
            text.dictionary_encode(),
            pa.array(response),
            pa.array(e.first, mask=~e.paired),
            pa.array(e.second, mask=~e.paired),
        ]
        errors = [_errors(e, site) for site in sites]
        parts.append(pa.table([*head, *errors], names=[*HEAD, *sites]))
    return pa.concat_tables(parts).unify_dictionaries() if parts else NO_ROWS


def _errors(edge: EdgeRows, site: str) -> pa.Array:
    full = np.full(len(edge.kept), UNKNOWN, dtype=np.float32)
    if site in edge.errors:
        full[edge.kept] = edge.errors[site]
    return pa.array(full, pa.float32(), mask=full == UNKNOWN)


def _texts(token: np.ndarray, model: Path) -> pa.Array:
    """What each id says; nulls where the checkpoint has no tokenizer file that can be read."""
    try:
        tokenizer = fast_tokenizer(model)
    except ModelError:
        return pa.nulls(len(token), pa.string())
    words = {
        int(i): tokenizer.decode([int(i)], skip_special_tokens=False) for i in np.unique(token)
    }
    return pa.array([words[int(i)] for i in token], pa.string())
