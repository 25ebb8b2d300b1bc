"""Made-up runs for reports: any number of layers, and figures like those of a real run.

Real captures of a small model lie below them, so that a run's checksums hold; what the comparison
says is made up: every operator differs a little, chosen ones are beyond their budgets.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparisons
import numpy as np
import pyarrow as pa
from synthetic import SHAPE, compared_run

from rlk_align.comparison_table import HEAD
from rlk_align.model.sites import Site, model_sites
from rlk_align.probe.perturbation_record import Amplification, Response
from rlk_align.probe.record import Probe, ProbedEdge
from rlk_align.probe.unit_record import Difference, Order, Split, Unit
from rlk_align.results import (
    CodePlace,
    Comparison,
    EdgeResult,
    EngineRecord,
    ErrorPattern,
    Introducer,
    Mismatch,
    RefereedUnit,
    RoundingErrors,
    SiteResult,
)
from rlk_align.trace.run import Run

HOSTILE = "<script>alert(1)</script></style>\"'&{{7*7}}\x1b[31m\u202egpj.exe\x00 🦊 مرحبا"
"""What must be shown as text, wherever it comes from."""
ROWS = 96
UNIT = 0.00226


def report_run(
    folder: Path,
    *,
    layers: int = 2,
    samples: int = 3,
    length: int = 32,
    worst: int | None = None,
    over: Sequence[str] = (),
    text: str = " word",
    probed: bool = True,
    noisy: Sequence[str] = (),
    nan: Sequence[str] = (),
    **changes: Any,
) -> Run:
    """A run of the edge `prefill_vs_train` whose train side is off at the sites `over`; `text` is
    what every token says, `worst` the position of the worst one; the rows of the sites `noisy` do
    not repeat, those of `nan` are not finite, and `changes` are those of the Comparison."""
    run = compared_run(folder)
    sites = model_sites(replace(SHAPE, layers=layers))
    comparison = made_comparison(sites, over, noisy, nan, **changes)
    run.save_comparison(comparison, made_rows(sites, samples, length, text, worst, nan))
    if probed:
        run.save_probe(made_probe(sites, over))
    run.finish()
    return Run(folder)


def made_comparison(
    sites: list[Site],
    over: Sequence[str],
    noisy: Sequence[str] = (),
    nan: Sequence[str] = (),
    **changes: Any,
) -> Comparison:
    """Every site but the first differs."""
    name = sites[1].name
    first = Introducer(
        site=name,
        layer=sites[1].layer,
        op=sites[1].op,
        sample=0,
        position=0,
        last_equal=sites[0].name,
    )
    large = bool(over)
    metrics = comparisons.metrics(
        tokens=ROWS,
        max_abs_dlogp=0.6 if large else 0.01,
        mean_abs_dlogp=0.002,
        p99_abs_dlogp=0.01,
        p999_abs_dlogp=0.01,
        bit_mismatches=ROWS,
        k3=1e-5,
    )
    site_results = [
        _site(n, s, s.name in over).model_copy(
            update=(_NOT_FINITE if s.name in nan else {})
            | ({"noisy": ROWS} if s.name in noisy else {})
        )
        for n, s in enumerate(sites)
    ]
    edge = EdgeResult(
        name="prefill_vs_train",
        metrics=metrics,
        sites=site_results,
        first_bitwise=first,
        expected_rows=ROWS * len(sites),
        paired_rows=ROWS * len(sites),
        unpaired=[("layers.0.attn", "the engine keeps it to itself", True)],
    )
    referee = [_refereed(s, side, s.name in over) for s in sites for side in ("rollout", "train")]
    defaults = {"referee": referee, "tokens": ROWS, "judged": ["prefill_vs_train"]}
    return comparisons.comparison(edge, **defaults | changes)


_NOT_FINITE = {"nonfinite": ROWS, "first_nonfinite": (0, 0), "mean_rel_l2": math.nan} | {
    "max_rel_l2": math.nan
}


def _size(number: int) -> float:
    return UNIT * (1 + number % 7)


def _site(number: int, site: Site, over: bool) -> SiteResult:
    differ = ROWS if number else 0
    introduced = differ if number == 1 else 0
    return comparisons.site(
        site.name,
        layer=site.layer,
        op=site.op,
        op_class=site.op_class,
        rows=ROWS,
        differ=differ,
        introduced=introduced,
        introduced_valued=introduced,
        first_introduced=(0, 0) if introduced else None,
        valued_rows=differ,
        max_rel_l2=_size(number) * (30 if over else 2) if differ else 0.0,
        mean_rel_l2=_size(number) * (20 if over else 1) if differ else 0.0,
    )


def _refereed(site: Site, side: Any, over: bool) -> RefereedUnit:
    errors = dict.fromkeys(("gain", "row_gain", "head_gain", "feature_gain", "feature_shift"), 0.0)
    rms = 40.0 if over and side == "train" else 0.0 if site.op == "embed" else 1.0
    module = f"model.{site.name}" if side == "rollout" else f"decoder.{site.name}"
    return RefereedUnit(
        side=side,
        passname="prefill",
        edges=["prefill_vs_train"],
        site=site.name,
        layer=site.layer,
        op=site.op,
        op_class=site.op_class,
        rows=ROWS,
        errors=RoundingErrors(
            unit=UNIT,
            rms=rms,
            **errors,
            head=0,
            feature_rms=rms,
            feature=0,
            row_rms=rms,
            row=(0, 0),
            peak=rms,
            pattern=ErrorPattern(place="everywhere", at=0, manner="scaled", amount=0.02),
        ),
        code=CodePlace(
            module=module, kind="Linear", file="engine/layers.py", line=12, settings={"size": 8}
        ),
    )


def made_rows(
    sites: list[Site], samples: int, length: int, text: str, worst: int | None, nan: Sequence[str]
) -> pa.Table:
    """As `rlk_align.comparison_table` describes; the first half of each sequence is prompt."""
    drawn = np.random.default_rng(0)
    count, half = samples * length, length // 2
    sample, position = np.repeat(np.arange(samples), length), np.tile(np.arange(length), samples)
    spoken = (position >= half - 1) & (position < length - 1)
    first = -drawn.random(count)
    # The second sample holds the worst token.
    delta = drawn.normal(0, 0.003, count) + 0.6 * (
        (sample == 1) & (position == (half + 2 if worst is None else worst - 1))
    )
    if nan:
        delta[np.flatnonzero(spoken)[0]] = np.nan
    head = [
        pa.array(["prefill_vs_train"] * count).dictionary_encode(),
        pa.array(sample, pa.int32()),
        pa.array(position, pa.int32()),
        pa.array(position + 3, pa.int32()),
        pa.array([text] * count, pa.string()).dictionary_encode(),
        pa.array(position >= half),
        pa.array(first, mask=~spoken),
        pa.array(first + delta, mask=~spoken),
    ]
    names = [s.name for s in sites if s.op != "logprob"]
    errors = []
    for n, name in enumerate(names):
        values = drawn.lognormal(np.log(_size(n)), 0.5, count).astype(np.float32) * bool(n)
        if name in nan:
            values[:] = np.nan
        errors.append(pa.array(values, pa.float32(), mask=~spoken if name == "logits" else None))
    return pa.table([*head, *errors], names=[*HEAD, *names])


def made_probe(sites: list[Site], over: Sequence[str]) -> Probe:
    """Every third unit introduces, and those that are off."""
    units = []
    for n, s in enumerate(sites):
        introduces = bool(n) and (n % 3 == 1 or s.name in over)
        part = _size(n) * (20 if s.name in over else 1)
        units.append(_unit(s, part if introduces else 0.0, _size(n) if n > 1 else 0.0))
    responses = [Response(name=u.name, rel_l2=0.01, inputs_rel_l2=0.005) for u in units[1:]]
    moved = Amplification(
        side="train",
        passname="prefill",
        perturbed="embed",
        ulps=1,
        seed=0,
        rel_l2=0.005,
        responses=responses,
        mean_abs_dlogp=0.002,
        max_abs_dlogp=0.08,
    )
    edge = ProbedEdge(name="prefill_vs_train", units=units, amplification=moved, attribution=None)
    return Probe(edges=[edge])


def _unit(site: Site, introduced: float, inherited: float) -> Unit:
    def difference(size: float) -> Difference:
        return Difference(rms=size, rel_l2=size, max_abs=size)

    order = Order(
        grafted="train",
        passname="prefill",
        rows=ROWS,
        left_out=0,
        reason="",
        introduced_rows=ROWS if introduced else 0,
        first=(0, 0) if introduced else None,
        largest=(0, 0) if introduced else None,
        splits=[
            Split(
                site=site.name,
                introduced=difference(introduced),
                inherited=difference(inherited),
                rounding=0.0,
            )
        ],
        inputs_rel_l2=inherited or None,
    )
    return Unit(
        edge="prefill_vs_train",
        name=site.name,
        sites=[site.name],
        region=False,
        layer=site.layer,
        op_class=site.op_class,
        inputs=list(site.inputs),
        label="introducer" if introduced else "clean",
        reason="",
        orders=[order],
        interaction=[],
    )


def hostile_engines() -> dict[str, EngineRecord]:
    """Both sides of several ranks, with names that are not to be trusted."""
    engine = EngineRecord(
        name="hf",
        version="1",
        options={"tp": 2, "path": HOSTILE},
        dtype="bfloat16",
        model=HOSTILE,
        environment={"ranks": "2", "untested": HOSTILE},
    )
    other = engine.model_copy(update={"options": {HOSTILE: "x"}})
    return {"rollout": engine, "train": other}


def hostile_mismatch() -> Mismatch:
    """Of a parameter that rank 1 holds."""
    return Mismatch(
        kind="weights", name=HOSTILE, rollout=HOSTILE, train="x", ranks=[1], detail=HOSTILE
    )
