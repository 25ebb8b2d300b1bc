"""Small made-up traces: a two-layer llama whose values are random, and faults planted in it.

No engine runs here. Values are drawn once; a fault gives chosen rows of one site other values,
and every site that reads a changed row changes too, so that what is introduced and what is
inherited is known exactly.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlk_align.compare.measure import measure
from rlk_align.engines.common.parameters import LiveParameter, record_parameter
from rlk_align.judge.verdict import judge_by
from rlk_align.model.edges import passes_for
from rlk_align.model.prompts import Prompt, Sample, TokenBatch, save_prompts
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import Site, model_sites
from rlk_align.pipeline import measured
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import Comparison, GraphReplays
from rlk_align.trace.checksums import CHECKSUMS, add_checksums
from rlk_align.trace.reader import Trace
from rlk_align.trace.records import save_record
from rlk_align.trace.run import Run, RunRecord
from rlk_align.trace.schema import TRACE_FILES, TraceRecord
from rlk_align.trace.tables import WEIGHTS_SCHEMA
from rlk_align.trace.writer import PassWriter

torch.set_num_threads(1)

SHAPE = ModelShape(
    model_type="llama",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=12,
    vocab=16,
    context=64,
    dtype="bfloat16",
)
SITES = model_sites(SHAPE)
NAMES = [s.name for s in SITES]

BATCH = TokenBatch(
    (
        Sample("a", (1, 2, 3), (4, 5, 6, 7)),
        Sample("b", (1, 3), (2, 9, 8, 7, 6)),
        Sample("c", (5,), (5, 4, 3, 2, 1, 0)),
    )
)
FIRST_EDGE = ("prefill_vs_train",)
CONTRACT = str(Path(__file__).with_name("synthetic.toml"))
"""The contract by which these traces are judged."""

Values = dict[str, torch.Tensor]
"""Site -> `[tokens of the batch, features]`."""
Cells = Iterable[tuple[int, int]]
"""(sample, position) pairs."""


def all_cells(batch: TokenBatch = BATCH) -> list[tuple[int, int]]:
    """Every (sample, position), in the order of the batch."""
    return [(i, p) for i, s in enumerate(batch.samples) for p in range(len(s.ids))]


def wanted_cells(site: Site, decode: bool, batch: TokenBatch = BATCH) -> list[tuple[int, int]]:
    """The rows that a complete pass holds, by DESIGN's words and without arithmetic on arrays.

    Hidden states: every token that enters the model; the last sampled one never enters a decode.
    Logits and log-probs at p: where token p + 1 exists and was sampled.
    """
    found = []
    for i, s in enumerate(batch.samples):
        for p in range(len(s.ids)):
            next_is_sampled = p + 1 < len(s.ids) and p + 1 >= len(s.prompt_ids)
            enters = not decode or p + 1 < len(s.ids)
            if next_is_sampled if site.op in ("logits", "logprob") else enters:
                found.append((i, p))
    return found


def draw(seed: int = 0, batch: TokenBatch = BATCH, sites: Sequence[Site] = SITES) -> Values:
    """Random values of every site; log-probs are float32 and negative, all else is bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    values: Values = {}
    for site in sites:
        value = torch.randn(len(all_cells(batch)), site.features, generator=generator)
        values[site.name] = -value.abs() - 0.5 if site.op == "logprob" else value.bfloat16()
    return values


def changed(row: torch.Tensor) -> torch.Tensor:
    """Another row: small steps, so that log-probs stay close; never the same bits."""
    return (row.double() * 1.0625 + 0.125).to(row.dtype)


def corrupt(
    values: Values,
    site: str,
    cells: Cells,
    batch: TokenBatch = BATCH,
    sites: Sequence[Site] = SITES,
    change: Callable[[torch.Tensor], torch.Tensor] = changed,
) -> Values:
    """The values after a fault at `site` in these rows, with everything downstream changed."""
    order = all_cells(batch)
    corrupted = {name: value.clone() for name, value in values.items()}
    dirty: dict[str, set[tuple[int, int]]] = {}
    for s in sites:
        here = set(cells) if s.name == site else set()
        for name in s.inputs:
            here |= dirty.get(name, set())
        for name in s.prefix_inputs:
            reach = dirty.get(name, set())
            here |= {(i, p) for i, p in order if any(j == i and q <= p for j, q in reach)}
        dirty[s.name] = here
        for cell in here:
            row = corrupted[s.name][order.index(cell)]
            new = change(row) if s.name == site else changed(row)
            corrupted[s.name][order.index(cell)] = new
    return corrupted


def keep_all(_site: str, sample: np.ndarray, _position: np.ndarray) -> np.ndarray:
    return np.ones(len(sample), dtype=bool)


def keep_logprobs(site: str, sample: np.ndarray, _position: np.ndarray) -> np.ndarray:
    return np.full(len(sample), site == "logprob")


def write_pass(
    folder: Path,
    values: Values,
    *,
    batch: TokenBatch = BATCH,
    sites: Sequence[Site] = SITES,
    decode: bool = False,
    keep: Callable[[str, np.ndarray, np.ndarray], np.ndarray] = keep_all,
    statistics: bool = True,
    without: dict[str, Cells | None] | None = None,
    also: Sequence[tuple[str, torch.Tensor, Sequence[int], Sequence[int]]] = (),
    unexposed: dict[str, str] | None = None,
    graphs: GraphReplays | None = None,
    parted: Cells = (),
    cached: dict[int, int] | None = None,
) -> None:
    """Writes one pass; `without` drops rows of sites (None: all of them), `also` adds rows,
    `cached`: sample -> its first tokens that the engine says it took from a cache."""
    order = {cell: n for n, cell in enumerate(all_cells(batch))}
    without = without or {}
    with PassWriter(folder, keep, statistics=statistics) as writer:
        for site in sites:
            dropped = without.get(site.name, ())
            if dropped is None or site.name not in values:
                continue
            cells = [c for c in wanted_cells(site, decode, batch) if c not in set(dropped)]
            rows = values[site.name][[order[c] for c in cells]]
            sample, position = (np.array([c[k] for c in cells], dtype=np.int64) for k in (0, 1))
            writer(site.name, rows, sample, position)
        for name, extra, sample_list, position_list in also:
            writer(name, extra, np.array(sample_list), np.array(position_list))
        for i, tokens in (cached or {}).items():
            writer.took_from_cache(i, tokens)
        writer.finish(unexposed or {}, graphs, list(parted))


def write_trace(
    folder: Path,
    values: Values,
    *,
    batch: TokenBatch = BATCH,
    sites: Sequence[Site] = SITES,
    passes: Sequence[str] = ("prefill",),
    repeat: Values | None = None,
    untapped: Values | None = None,
    untapped_sites: Sequence[str] = ("logprob",),
    controls: Sequence[str] = ("untapped", "repeat"),
    production: Values | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    record: dict[str, Any] | None = None,
    **options: Any,
) -> Trace:
    """A whole trace: `passes`, each with its controls, which repeat the values unless told."""
    folder.mkdir(parents=True)
    batch.save(folder / "tokens.parquet")
    save_prompts(
        [Prompt(s.prompt_id, None, s.prompt_ids) for s in batch.samples], folder / "prompts.jsonl"
    )
    write_weights(folder, weights if weights is not None else {"embed": torch.ones(16, 8)})
    fields = {
        "key": "synthetic",
        "engine": "hf",
        "version": "1",
        "options": {},
        "model": "synthetic",
        "shape": SHAPE,
        "dtype": "bfloat16",
        "environment": {"torch": "none"},
        "attributes": {"layers": 2, "temperature": 1.0},
        "prompt_ids": {s.prompt_id: list(s.prompt_ids) for s in batch.samples},
    }
    save_record(TraceRecord(**fields | (record or {})), folder / "trace.json")
    logprob = [s for s in SITES if s.op == "logprob"]
    for name in passes:
        decode = name == "decode"
        write_pass(folder / name, values, batch=batch, sites=sites, decode=decode, **options)
        control: dict[str, Any] = {"batch": batch, "decode": decode, "keep": keep_logprobs}
        if "untapped" in controls:
            shown = untapped if untapped is not None else values
            path = folder / f"{name}.untapped"
            some = [s for s in SITES if s.name in untapped_sites]
            write_pass(path, shown, sites=some, statistics=False, **control)
        if "repeat" in controls:
            shown = repeat if repeat is not None else values
            path = folder / f"{name}.repeat"
            write_pass(path, shown, sites=sites, statistics=False, **control)
    if production is not None:
        path = folder / "prefill.production"
        write_pass(path, production, batch=batch, sites=logprob, statistics=False)
    seal(folder)
    return Trace(folder)


def compared_run(
    folder: Path,
    train: Values | None = None,
    judged: Sequence[Any] = FIRST_EDGE,
    rollout: Values | None = None,
    contract: str | Path = CONTRACT,
    **options: Any,
) -> Run:
    """A run whose two sides are equal unless `train` is given, compared and judged; `options`: of
    `write_trace`."""
    values, run = rollout or draw(), Run(folder)
    sides = {
        side: write_trace(
            folder / "captures" / side, shown, passes=passes_for(judged, side), **options
        )
        for side, shown in (("rollout", values), ("train", train or values))
    }
    captures = {side: f"captures/{side}" for side in sides}
    command = ["rlk-align", "compare"]
    run.save(RunRecord(command=command, captures=captures, judged=judged))
    comparison, rows = measured(sides["rollout"], sides["train"], judged, (), _silent)
    run.save_comparison(comparison, rows)
    run.save_verdict(verdict_json(judge_by(comparison, str(contract))))
    run.finish()
    return Run(folder)


def seal(folder: Path) -> None:
    """checksums.json of a trace as it is now, as a capture leaves it."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    passes = [f"{p.parent.name}/pass.json" for p in folder.glob("*/pass.json")]
    add_checksums(folder, [*TRACE_FILES, *passes])


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """weights.parquet, as a worker writes it."""
    records = [record_parameter(LiveParameter(name, w)) for name, w in weights.items()]
    columns = {c: [getattr(r, c) for r in records] for c in WEIGHTS_SCHEMA.names}
    table = pa.table(columns, schema=WEIGHTS_SCHEMA)
    pq.write_table(table, folder / "weights.parquet", write_page_checksum=True)


def compared(
    rollout: Trace, train: Trace, judged: Sequence[str] = FIRST_EDGE, allowed: Sequence[Any] = ()
) -> Comparison:
    """`measure`, silently."""
    return measure(rollout, train, judged, allowed, _silent)[0]


def _silent(_stage: str, _done: int, _total: int) -> None:
    return
