"""Two traces -> Comparison: precheck, controls, and every edge walked site by site."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa

from rlk_align.compare.controls import check_controls, paired_logprobs
from rlk_align.compare.divergence import Edge, Side, compare_edges
from rlk_align.compare.edge_rows import NO_ROWS, rows_table
from rlk_align.compare.expert_choice import Routers
from rlk_align.compare.metrics import edge_metrics
from rlk_align.compare.parity import check_parity
from rlk_align.compare.parity_quantised import quantised_sides
from rlk_align.compare.parity_weights import cast_sides
from rlk_align.compare.sampling_distribution import distributions
from rlk_align.model.dtypes import lower_precision
from rlk_align.model.edges import EDGE_ENDS, passes_for
from rlk_align.model.sites import RowIndex, model_sites, site_parameters
from rlk_align.progress import Progress
from rlk_align.results import (
    Comparison,
    Controls,
    EdgeMetrics,
    EdgeName,
    EdgeResult,
    EngineRecord,
    Kind,
    PassName,
    ProductionPass,
    SideName,
)
from rlk_align.trace.reader import Trace
from rlk_align.trace.writer import one_thread


# Small blocks, see divergence.BLOCK_ELEMENTS.
@one_thread()
def measure(
    rollout: Trace,
    train: Trace,
    judged: Sequence[EdgeName],
    allowed: Sequence[Kind],
    progress: Progress,
) -> tuple[Comparison, pa.Table]:
    """Returns everything that a contract judges, and the table of rows (see
    `rlk_align.comparison_table`).

    A mismatch of a kind that is not allowed stops the comparison before any number. Raises
    CorruptTrace where a trace is damaged.
    """
    progress("comparing", 0, 0)
    sides: dict[SideName, Trace] = {"rollout": rollout, "train": train}
    mismatches = check_parity(rollout, train)
    controls: Controls | None = None
    edges: list[EdgeResult] = []
    rows = NO_ROWS
    missing: dict[EdgeName, str] = {}
    production: EdgeMetrics | None = None
    passes: dict[PassName, ProductionPass] = {}
    if all(m.kind in allowed or not m.stops for m in mismatches):
        index = RowIndex(rollout.tokens)
        sites = model_sites(rollout.record.shape)
        # Sites of the training side alone are expected too, and are reported as missing.
        known = {s.name for s in sites}
        sites += [s for s in model_sites(train.record.shape) if s.name not in known]
        missing = _missing_edges(sides, judged)
        present = [e for e in judged if e not in missing]
        needed = {s: (t, list(passes_for(present, s))) for s, t in sides.items()}
        controls = check_controls(needed, index, sites)
        wanted = [_edge(name, sides, index) for name in present]
        edges, by_row = compare_edges(wanted, sites, index, progress)
        rows = rows_table(by_row, index, Path(rollout.record.model))
        production, passes = _production(rollout, index)
    comparison = Comparison(
        model=rollout.record.model,
        dtype=lower_precision(rollout.record.dtype, train.record.dtype),
        tokens=rollout.tokens.counted_tokens,
        longest_response=max((len(s.response_ids) for s in rollout.tokens.samples), default=0),
        longest_sequence=max((len(s.ids) for s in rollout.tokens.samples), default=0),
        context=rollout.record.shape.context,
        engines={s: engine_record(t) for s, t in sides.items()},
        mismatches=mismatches,
        casts=cast_sides(rollout, train),
        distributions=distributions(sides),
        quantised=quantised_sides(rollout, train),
        not_recorded={s: n for s, t in sides.items() if (n := _not_recorded(t))},
        allowed=list(allowed),
        controls=controls,
        edges=edges,
        judged=list(judged),
        missing_edges=missing,
        production=production,
        production_passes=passes,
        same_capture=rollout.checksums == train.checksums,
    )
    return comparison, rows


def _not_recorded(trace: Trace) -> list[Kind]:
    """Returns what an imported trace does not say of the whole model."""
    if not trace.record.imported:
        return []
    shape, head = trace.record.shape, {"lm_head"} if "lm_head" not in trace.weights else set()
    wanted = {p for site in model_sites(shape) for p in site_parameters(site, shape)} - head
    return ["attributes"] if wanted <= trace.weights.keys() else ["weights", "attributes"]


def _missing_edges(
    sides: Mapping[SideName, Trace], judged: Sequence[EdgeName]
) -> dict[EdgeName, str]:
    """Returns the judged edges for which a trace lacks a pass, with the reason."""
    missing: dict[EdgeName, str] = {}
    for name in judged:
        for side, passname in EDGE_ENDS[name]:
            if not sides[side].has_pass(passname):
                missing[name] = f"the {side} trace has no {passname} pass"
    return missing


def _edge(name: EdgeName, sides: Mapping[SideName, Trace], index: RowIndex) -> Edge:
    first, second = EDGE_ENDS[name]
    return Edge(
        name,
        _side(sides[first[0]], *first),
        _side(sides[second[0]], *second),
        decode="decode" in name,
        same_token=index.same_tokens(sides[second[0]].tokens),
        routers=Routers(Path(sides["rollout"].record.model), sides["rollout"].record.shape),
    )


def _side(trace: Trace, side: SideName, passname: str) -> Side:
    repeat = f"{passname}.repeat"
    return Side(
        f"{side} {passname}",
        side,
        trace.read_pass(passname),
        trace.read_pass(repeat) if trace.has_pass(repeat) else None,
        trace.record.shards,
        trace.record.stages,
        trace.record.experts,
        trace.record.lost,
        float(trace.record.attributes.get("temperature", 1.0)),
    )


def _production(
    rollout: Trace, index: RowIndex
) -> tuple[EdgeMetrics | None, dict[PassName, ProductionPass]]:
    """Compares the engine's un-tapped production mode with its observed passes: over all tokens,
    and by pass."""
    found: dict[PassName, tuple[np.ndarray, np.ndarray]] = {}
    passes: dict[PassName, ProductionPass] = {}
    for name in get_args(PassName):
        if not rollout.has_pass(f"{name}.production") or not rollout.has_pass(name):
            continue
        production = rollout.read_pass(f"{name}.production")
        found[name] = paired_logprobs(production, rollout.read_pass(name), index)[1:]
        passes[name] = ProductionPass(
            metrics=edge_metrics(*found[name]),
            expected=int(index.counted.sum()),
            parted=production.record.parted,
            graphs=production.record.graphs,
        )
    if not passes:
        return None, {}
    both = zip(*found.values(), strict=True)
    return edge_metrics(*(np.concatenate(logprobs) for logprobs in both)), passes


def engine_record(trace: Trace) -> EngineRecord:
    """Returns the record of the engine that made a trace."""
    r = trace.record
    return EngineRecord(
        name=r.engine,
        version=r.version,
        options=r.options,
        dtype=r.dtype,
        model=r.model,
        environment=r.environment,
    )
