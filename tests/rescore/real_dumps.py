"""Dumps of the embedded model, as a framework would write them: real engines made their numbers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from rlk_align.model.sites import RowIndex
from rlk_align.rescore.logprobs import token_logprobs
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import Trace

Values = list[list[float]]
"""Of each sample the log-probs of its response."""


def logprobs(trace: Trace, passname: str) -> Values:
    """What a pass reported of each response."""
    index = RowIndex(trace.tokens)
    reader = trace.read_pass(passname)
    rows = read_rows(reader, "logprob", index)
    assert rows is not None
    values = np.full(len(index), np.nan)
    values[rows.number] = reader.values("logprob", rows.rows, rows.at)[:, 0].double().numpy()
    return [
        values[start + len(s.prompt_ids) - 1 : start + len(s.ids) - 1].tolist()
        for s, start in zip(trace.tokens.samples, index.offsets, strict=False)
    ]


def scaled(trace: Trace, temperature: float) -> Values:
    """The responses' log-probs at a temperature, from the recorded logits."""
    index = RowIndex(trace.tokens)
    values, missing = token_logprobs(trace, index, temperature)
    assert not missing.all()
    return [
        values[start + len(s.prompt_ids) : start + len(s.ids)].tolist()
        for s, start in zip(trace.tokens.samples, index.offsets, strict=False)
    ]


def write_dump(
    trace: Trace,
    rollout: Values,
    train: Values,
    path: Path,
    change: Callable[[dict], Mapping[str, object]] = lambda row: row,
) -> Path:
    """Writes the neutral file."""
    with path.open("w") as file:
        for k, s in enumerate(trace.tokens.samples):
            row = {
                "schema": "rlk-align/logprobs/1",
                "id": k,
                "token_ids": list(s.ids),
                "prompt_length": len(s.prompt_ids),
                "rollout_logprobs": rollout[k],
                "train_logprobs": train[k],
                "sampling": {"temperature": 1.0},
                "dtype": {"rollout": "bfloat16", "train": "bfloat16"},
            }
            file.write(json.dumps(dict(change(row))) + "\n")
    return path
