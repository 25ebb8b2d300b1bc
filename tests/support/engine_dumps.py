"""Dumps of the embedded model, as a framework would write them: real engines made their numbers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from rlk_align.data import data_path
from rlk_align.logs.rescore.logprobs import token_logprobs
from rlk_align.model.checkpoint import default_model
from rlk_align.model.prompts import Sample, TokenBatch, load_prompts
from rlk_align.model.sites import RowIndex
from rlk_align.model.tokenise import tokenise
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import Trace

Values = list[list[float]]
"""Of each sample the log-probs of its response."""


def texts(count: int) -> TokenBatch:
    """The longest of the embedded prompts; what comes after their first eight tokens stands for a
    response."""
    prompts = load_prompts(data_path("prompts.jsonl"))
    ids = sorted(tokenise(Path(default_model()), prompts).values(), key=len)[-count:]
    return TokenBatch(tuple(Sample(str(k), tuple(x[:8]), tuple(x[8:])) for k, x in enumerate(ids)))


def hf_logprobs(batch: TokenBatch, attention: str, temperature: float = 1.0) -> Values:
    """What transformers gives for the responses, in bfloat16, without this tool."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        default_model(), dtype="bfloat16", attn_implementation=attention
    ).eval()
    values = []
    with torch.inference_mode():
        for s in batch.samples:
            ids = torch.tensor([s.ids])
            laws = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
            all_of_them = laws.gather(-1, ids[0, 1:, None])[:, 0]
            values.append(all_of_them[len(s.prompt_ids) - 1 :].tolist())
    return values


def recorded_logprobs(trace: Trace, passname: str) -> Values:
    """What a pass of a trace reported of each response."""
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
    """The responses' log-probs at a temperature, from the logits of the prefill pass."""
    index = RowIndex(trace.tokens)
    values, missing = token_logprobs(trace, index, temperature)
    assert not missing.all()
    return [
        values[start + len(s.prompt_ids) : start + len(s.ids)].tolist()
        for s, start in zip(trace.tokens.samples, index.offsets, strict=False)
    ]


def write_dump(
    batch: TokenBatch,
    rollout: Values,
    train: Values,
    path: Path,
    change: Callable[[dict], Mapping[str, object]] = lambda row: row,
) -> Path:
    """Writes the neutral file."""
    with path.open("w") as file:
        for k, s in enumerate(batch.samples):
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
