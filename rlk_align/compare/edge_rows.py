"""Collects every token of every edge, its log-probs and its error at every site, for the table of
`rlk_align.comparison_table`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from rlk_align.comparison_table import HEAD
from rlk_align.errors import ModelError
from rlk_align.model.sites import RowIndex
from rlk_align.model.tokenise import fast_tokenizer

MAX_ERRORS = 8_000_000
"""The most errors that are kept of an edge, 32 MB. A larger run keeps a seeded choice of rows."""
_SEED = 17


@dataclass(slots=True)
class EdgeRows:
    """The log-probs and errors of one edge; arrays `[N]` over the batch's rows."""

    edge: str
    selected: np.ndarray
    """bool: the rows whose errors the table holds."""
    first: np.ndarray
    second: np.ndarray
    """float64: the passes' log-probs, NaN for a row that a pass lacks."""
    paired: np.ndarray
    """bool: whether both passes have a log-prob there."""
    errors: dict[str, np.ndarray] = field(default_factory=dict)
    """Site -> relative L2 of the selected rows, float32; `UNKNOWN` where a row was not compared."""

    @classmethod
    def of(cls, edge: str, index: RowIndex, sites: int) -> "EdgeRows":
        """Returns an edge without errors, for a batch and this many sites."""
        selected = np.ones(len(index), dtype=bool)
        most = MAX_ERRORS // max(1, sites)
        if len(index) > most:
            selected[:] = False
            selected[np.random.default_rng(_SEED).permutation(len(index))[:most]] = True
        nothing = np.full(len(index), np.nan)
        return cls(edge, selected, nothing, nothing.copy(), np.zeros(len(index), dtype=bool))

    def add(self, site: str, number: np.ndarray, error: np.ndarray) -> None:
        """Adds the errors of a site, float `[M]`, at these rows of the batch."""
        full = np.full(len(self.selected), UNKNOWN, dtype=np.float32)
        full[number] = error
        self.errors[site] = full[self.selected]

    def add_logprobs(self, number: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        """Adds the log-probs of both passes, `[M]`, at these rows of the batch."""
        self.first[number], self.second[number], self.paired[number] = first, second, True


UNKNOWN = np.float32(-1)
"""Stands for an error that is not known; a null in the table."""


NO_ROWS = pa.schema(list(HEAD.items())).empty_table()


def rows_table(edges: Sequence[EdgeRows], index: RowIndex, model: Path) -> pa.Table:
    """The table of `rlk_align.comparison_table`; the checkpoint's tokenizer decodes the tokens."""
    sites = list(dict.fromkeys(site for e in edges for site in e.errors))
    prompts = np.array([len(s.prompt_ids) for s in index.batch.samples])
    response = index.position >= prompts[index.sample]
    text = _texts(index.token, model)
    parts = []
    for e in edges:
        head = [
            pa.array([e.edge] * len(index)).dictionary_encode(),
            pa.array(index.sample, pa.int32()),
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
    full = np.full(len(edge.selected), UNKNOWN, dtype=np.float32)
    if site in edge.errors:
        full[edge.selected] = edge.errors[site]
    return pa.array(full, pa.float32(), mask=full == UNKNOWN)


def _text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of one id within a sentence. Some decoders strip the space before the first
    id, so the id is decoded behind itself."""
    alone, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice.removeprefix(alone) if twice.startswith(alone) else alone


def _texts(token: np.ndarray, model: Path) -> pa.Array:
    """Returns the text of each id; nulls where the checkpoint has no readable tokenizer file."""
    try:
        tokenizer = fast_tokenizer(model)
    except ModelError:
        return pa.nulls(len(token), pa.string())
    words = {int(i): _text(tokenizer, int(i)) for i in np.unique(token)}
    return pa.array([words[int(i)] for i in token], pa.string())
