"""Engines without a model: each site is a random function of its inputs, computed in float64 and
rounded to the engine's dtype; what a graft pass does is done by hand.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from synthetic import BATCH, SHAPE

from rlk_align.model.sites import RowIndex, Site, model_sites
from rlk_align.probe.graft import GraftedEdge, GraftedEnd
from rlk_align.trace.reader import PassReader
from rlk_align.trace.writer import PassWriter

SITES = {s.name: s for s in model_sites(SHAPE)}
INDEX = RowIndex(BATCH)
Values = dict[str, torch.Tensor]
Fault = Callable[[torch.Tensor], torch.Tensor]
FUSED = frozenset(
    {("attn_residual", "mlp_norm"), ("mlp_residual", "attn_norm"), ("mlp_residual", "final_norm")}
)


def run(
    seed: int,
    dtype: torch.dtype,
    faults: Mapping[str, Fault] | None = None,
    recorded: Values | None = None,
    fused: frozenset[tuple[str, str]] = frozenset(),
) -> Values:
    """Every site's output for all rows of the batch; on `recorded` inputs where they are given, the
    inside of a region staying live."""
    live: Values = {}
    for site in SITES.values():
        inputs = []
        for name in (*site.inputs, *site.prefix_inputs):
            inside = (SITES[name].op, site.op) in fused
            given = live[name] if recorded is None or inside else recorded[name]
            inputs.append(_prefix_mean(given) if name in site.prefix_inputs else given.double())
        out = _operator(seed, site, inputs)
        live[site.name] = (faults or {}).get(site.name, lambda x: x)(out).to(dtype)
    return live


def _operator(seed: int, site: Site, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What the operator is, whatever the engine: weights by (seed, site)."""
    generator = torch.Generator().manual_seed(seed * 1000 + list(SITES).index(site.name))

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    if not inputs:
        return drawn(len(INDEX), site.features)
    return torch.tanh(sum((x @ drawn(x.shape[1], site.features)) / 3 for x in inputs))


def _prefix_mean(rows: torch.Tensor) -> torch.Tensor:
    """Of each row and all before it in its sample."""
    parts = []
    for start, stop in zip(INDEX.offsets, INDEX.offsets[1:], strict=False):
        counts = torch.arange(1, stop - start + 1)[:, None]
        parts.append(rows[start:stop].double().cumsum(0) / counts)
    return torch.cat(parts)


def write(
    folder: Path,
    values: Values,
    keep: Callable[..., np.ndarray] | None = None,
    overwritten: Values | None = None,
) -> PassReader:
    """A finished pass with these values."""
    writer = PassWriter(folder, keep or (lambda site, s, p: np.ones(len(s), dtype=bool)))
    for site in SITES.values():
        number = np.flatnonzero(INDEX.expected(site, decode=False))
        cells = np.array([INDEX.locate(int(n)) for n in number])
        writer(site.name, values[site.name][number], cells[:, 0], cells[:, 1])
        if overwritten is not None:
            writer.overwritten(site.name, len(number))
    writer.finish({})
    return PassReader(folder)


def graft(
    folder: Path,
    first: Callable[[Values | None], Values],
    second: Callable[[Values | None], Values],
    fused: frozenset[tuple[str, str]] = frozenset(),
    keep: Callable[..., np.ndarray] | None = None,
) -> GraftedEdge:
    """The edge of two engines, each a function of the recorded inputs (None: its own)."""
    a, b = first(None), second(None)
    folder.mkdir(parents=True, exist_ok=True)

    def end(side: str, engine: Callable[..., Values], own: Values, other: Values) -> GraftedEnd:
        return GraftedEnd(
            side,  # type: ignore[arg-type]
            "prefill",
            write(folder / f"{side}-own", own, keep),
            write(folder / f"{side}-again", engine(own), keep, own),
            write(folder / f"{side}-other", engine(other), keep, other),
        )

    return GraftedEdge(
        "prefill_vs_train",
        end("rollout", first, a, b),
        end("train", second, b, a),
        BATCH,
        SHAPE,
        fused,
    )
