"""The page of monitored runs: the metrics over the steps, and the findings."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlk_align.logs.monitor.history import History
from rlk_align.report.html.figure import Figure
from rlk_align.report.html.page import render
from rlk_align.report.html.steps_chart import Series, steps_figure
from rlk_align.report.html.svg import figure

SERIES = (
    Series(
        "ratio-error",
        "E[ρ] − 1",
        "0 whatever the numerics, if the rollout's log-probs are those of the sampled "
        "distribution. The band is the interval, clustered by sequence.",
        lambda r: r.ratio_error,
    ),
    Series("noise", "c, mean |Δ| / mean (1 − p)", "Over both sides, in nats.", lambda r: r.c),
    Series("k3", "k3, KL", "In nats; it should not grow with the steps.", lambda r: r.k3),
    Series(
        "k2-scaled",
        "k2, scaled by (1 − p)²",
        "It rises when weights are not synced, and not when the entropy changes.",
        lambda r: r.k2_scaled,
    ),
    Series("mean-dlogp", "mean |Δ|", "In nats.", lambda r: r.mean_abs),
    Series("ess", "effective sample size / N", "Of the tokens' ratios.", lambda r: r.ess),
    Series(
        "clip",
        "share of ρ outside [0.8, 1.2]",
        "Of the compared tokens.",
        lambda r: r.clip_fraction,
    ),
    Series("kl-entropy", "k3 / entropy", "Of the trainer's entropy.", lambda r: r.kl_entropy),
    Series(
        "outliers",
        "share of outlier sequences",
        "The noise of these is more than ten times that of the median sequence.",
        lambda r: r.outliers,
    ),
    Series(
        "lag",
        "version lag",
        "By how many versions the trainer's weights are ahead of the rollout's.",
        lambda r: r.version_lag,
    ),
    Series("reward", "reward", "The mean over the sequences.", lambda r: r.reward),
)


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """One run of the page."""

    name: str
    status: str
    figures: list[Figure]
    findings: list[list[str]]
    """A row for each finding, with the columns of COLUMNS."""


COLUMNS = (
    *("finding", "level", "first step", "last step", "steps", "value", "limit"),
    "the finding at the last of these steps",
)
"""Columns of the table of findings."""


def steps_page(runs: Mapping[str, History]) -> str:
    """Returns the page of one run, or of several below one another."""
    views = [run_steps(n, name, history) for n, (name, history) in enumerate(runs.items())]
    return render("steps.html", runs=views, columns=COLUMNS)


def run_steps(number: int, name: str, history: History) -> RunSteps:
    """Returns the section of a run; `number` is unique on the page."""
    spans, records = history.spans, history.records
    levels = {span.latest.level for span in spans}
    status = next((level for level in ("inconclusive", "fail") if level in levels), "pass")
    figures = [f for s in SERIES if (f := steps_figure(f"r{number}-{s.name}", s, records))]
    rows = [
        [
            *(span.latest.name, span.latest.level),
            *(str(n) for n in (span.first, span.last, span.steps)),
            *(figure(value) for value in (span.latest.value, span.latest.limit)),
            span.latest.why,
        ]
        for span in spans
    ]
    return RunSteps(
        name=name,
        status=status if records else "inconclusive",
        figures=figures,
        findings=rows,
    )
