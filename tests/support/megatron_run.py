"""Runs the Megatron engine on several cases, one after another, in this process or in as many as
torchrun starts; rank 0 writes what it saw.

    torchrun --nproc-per-node N megatron_run.py CASES.json FOLDER

CASES.json: a list of {"name", "model", "options", "batch"}, a batch being a list of
(prompt ids, response ids); FOLDER/NAME.pt holds what `saw` gives, or the error that was raised.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Engine
from rlk_align.engines.megatron.engine import MegatronEngine
from rlk_align.engines.megatron.weights import live_parameters
from rlk_align.engines.process.ranks import Ranks, destroy_process_group, join
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import RlkError
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import read_shape

Sites = dict[str, tuple[np.ndarray, np.ndarray, torch.Tensor]]
"""Site -> sample, position and values of its rows, in the order in which they were seen."""


def token_batch(sequences: list[tuple[list[int], list[int]]]) -> TokenBatch:
    samples = (Sample(f"p{i}", tuple(p), tuple(r)) for i, (p, r) in enumerate(sequences))
    return TokenBatch(tuple(samples))


def observe(engine: Engine, batch: TokenBatch) -> dict[str, Any]:
    """Log-probs without and with taps, and every site's rows."""
    parts: dict[str, list[Any]] = {}

    class Tap:
        def __call__(
            self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray
        ) -> None:
            assert engine.ranks.rank == 0
            assert len(rows) == len(sample) == len(position)
            parts.setdefault(site, []).append((sample.copy(), position.copy(), rows.clone()))

        def computes(self, rank: int, sample: int, rows: range, sharing: Sequence[int]) -> None:
            assert rank == engine.ranks.rank
            assert set(rows) <= set(range(len(batch.samples[sample].ids)))

    plain = engine.score(batch, None, lambda _: None)
    tapped = engine.score(batch, Tap(), lambda _: None)
    sites: Sites = {}
    for site, seen in parts.items():
        sample, position, rows = zip(*seen, strict=True)
        sites[site] = np.concatenate(sample), np.concatenate(position), torch.cat(rows)
    return {"sites": sites, "logprobs": plain, "tapped": tapped}


def saw(case: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """One case, from opening the engine to closing it."""
    model = Path(case["model"])
    engine = MegatronEngine(EngineSpec("megatron", case["options"]), model, read_shape(model))
    engine.ranks = ranks
    try:
        engine.open()
        live = live_parameters(engine.live(), engine.plan, engine.grid.tp)
        return {
            "weights": {p.name: (p.value.clone(), p.shards, p.replicas) for p in live},
            "attributes": engine.attributes(),
            "version": engine.version(),
            "dtype": engine.dtype(),
            **observe(engine, token_batch(case["batch"])),
        }
    except RlkError as error:
        return {"error": f"{type(error).__name__}: {error.message}; {error.fix}"}
    finally:
        engine.close()


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ranks = join("cpu", 60)
    for case in cases:
        found = saw(case, ranks)
        if ranks.rank == 0:
            torch.save(found, folder / f"{case['name']}.pt")
    destroy_process_group()


if __name__ == "__main__":
    main()
