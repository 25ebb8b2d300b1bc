"""Plants faults into Megatron of several ranks, which torchrun starts, and writes where each is
first seen, and on which ranks, by the trace that the ranks wrote and the tool's own comparison.

    torchrun --nproc-per-node N rank_faults_run.py CASES.json FOUND.json

CASES.json: a list of {"name", "model", "options", "faults"}, the faults as an engine's spec has
them; FOUND.json: name -> fault -> [site, ranks], or what the engine says that refuses it, and
"after" with null where nothing is left of any.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.compare.divergence import Edge, Side, compare_edges
from rlk_align.engines.megatron.engine import MegatronEngine
from rlk_align.engines.process.ranks import Ranks, barrier, destroy_process_group, join
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.worker import replace_fault
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import read_config
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import ModelShape, read_shape
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.trace.reader import PassReader
from rlk_align.trace.writer import PassWriter

BATCH = TokenBatch(
    tuple(
        Sample(f"p{i}", tuple(range(40 + 30 * i, 40 + 30 * i + n)), (7, 11, 40, 12, 9, 33, 21, 14))
        for i, n in enumerate((9, 20))
    )
)


def everything(site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    return np.ones(len(sample), dtype=bool)


def observed(engine: MegatronEngine, folder: Path, ranks: Ranks) -> PassReader | None:
    """One pass, which all ranks write and rank 0 reads."""
    if ranks.rank:
        barrier(ranks)
    writer = PassWriter(folder, everything, vocab=engine.shape.vocab, part=ranks.rank)
    if not ranks.rank:
        barrier(ranks)
    logprobs = engine.score(BATCH, writer, lambda _: None)
    for i, logprob in logprobs.items():
        first = len(BATCH.samples[i].prompt_ids) - 1
        at = np.arange(first, first + len(logprob))
        writer("logprob", torch.from_numpy(logprob)[:, None], np.full(len(at), i), at)
    if ranks.rank:
        writer.close()
    barrier(ranks)
    if ranks.rank:
        return None
    writer.finish({})
    return PassReader(folder)


def first_parting(
    clean: PassReader, faulty: PassReader, shape: ModelShape, *held: Any
) -> list[Any] | None:
    """`held`: which ranks hold which part of a site, which ranks compute the site, and which
    experts each rank has."""
    a, b = (
        Side("clean", "rollout", clean, None, *held),
        Side("faulty", "train", faulty, None, *held),
    )
    edge = Edge("prefill_vs_train", a, b, False, np.ones(len(RowIndex(BATCH)), dtype=bool))
    (result,), _ = compare_edges([edge], model_sites(shape), RowIndex(BATCH), lambda *_: None)
    first = result.first_bitwise
    return None if first is None else [first.site, first.ranks.get("train", [])]


def found(case: dict[str, Any], folder: Path, ranks: Ranks) -> dict[str, Any]:
    options = case["options"]
    model = Path(case["model"])
    shape = read_shape(model)
    engine = MegatronEngine(EngineSpec.parse(f"megatron:{options}"), model, shape)
    engine.ranks = ranks
    try:
        engine.open()
        planted = ExitStack()
        clean = observed(engine, folder / "clean", ranks)
        seen: dict[str, Any] = {}
        for fault in (*case["faults"], None):
            said = options if fault is None else f"{options},fault={fault}"
            engine.spec = EngineSpec.parse(f"megatron:{said}")
            try:
                engine.spec.info.check(engine.spec.option, read_config(model), shape)
            except BadOption as error:
                seen[str(fault)] = str(error)
                continue
            replace_fault(engine, planted)
            faulty = observed(engine, folder / "faulty", ranks)
            held = engine.shards(), engine.stages(), engine.experts()
            if clean is not None and faulty is not None:
                seen[fault or "after"] = first_parting(clean, faulty, shape, *held)
        return seen
    finally:
        engine.close()


def main() -> None:
    cases, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ranks = join("cpu", 60)
    every = {case["name"]: found(case, path.parent / case["name"], ranks) for case in cases}
    if ranks.rank == 0:
        path.write_text(json.dumps(every))
    destroy_process_group()


if __name__ == "__main__":
    main()
