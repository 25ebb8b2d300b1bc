"""Sentences and figures for several reports."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlk_align.judge.checks import LimitCheck, quantised_between
from rlk_align.judge.verdict import OverBudget, Verdict, cause_of, headline, over_budget
from rlk_align.judge.wording import how_off, why_legitimate
from rlk_align.report.sampling_distribution import sides_words, stopped_by_distributions
from rlk_align.results import (
    CodePlace,
    Comparison,
    EdgeMetrics,
    EdgeResult,
    EngineRecord,
    Introducer,
    LiveSetting,
    Mismatch,
    Noise,
    ProductionPass,
    RefereedUnit,
    SiteResult,
)
from rlk_align.text import short_printable


def engine_spec(engine: EngineRecord) -> str:
    """Returns the spec of an engine for the command line, e.g. `vllm:tp=2`."""
    options = ",".join(f"{k}={v}" for k, v in engine.options.items())
    return f"{engine.name}:{options}" if options else engine.name


def production_words(run: ProductionPass) -> str:
    """Describes one pass of the production mode: its tokens and CUDA graphs."""
    words = f"{run.metrics.tokens:,} of {run.expected:,} tokens compared"
    if run.parted:
        sample, position = run.parted[0]
        count = len(run.parted)
        depart = "1 sample departs" if count == 1 else f"{count:,} samples depart"
        words += (
            f", {depart} from the observed text (first sample {sample}, after position {position})"
        )
    graphs = run.graphs
    if graphs is None:
        return f"{words}; without CUDA graphs"
    if not run.replays:
        return f"{words}; no CUDA graph was replayed in {graphs.steps:,} steps"
    by_mode = ", ".join(f"{count:,} {mode}" for mode, count in sorted(graphs.replays.items()))
    return (
        f"{words}; {run.replays:,} CUDA graph replays ({by_mode}) in {graphs.replayed_steps:,} "
        f"of {graphs.steps:,} steps"
    )


def noise_words(noise: Noise | str | None) -> str:
    """States whether a side repeats itself bit for bit."""
    if isinstance(noise, Noise):
        return f"differs from itself by up to {noise.max_abs_dlogp:.2g}"
    return "noise not measured" if noise else "repeats bitwise"


_WHOSE_OFF = {
    "rollout": "the rollout side is off",
    "train": "the training side is off",
    "both": "both sides are off",
    "neither": "both sides are within their rounding, but too far from each other",
    None: "it is unknown which side is off",
}


def whose_off(over: OverBudget) -> str:
    """States which side is off, e.g. `the training side is off`, and which side was not checked and
    why."""
    unchecked = {u.side: u.reason for u in over.unchecked}
    parts = [f"{side} was not checked here: {why}" for side, why in unchecked.items()]
    return "; ".join([_WHOSE_OFF[over.side], *parts])


def _first_difference(verdict: Verdict, edge: EdgeResult, over: list[OverBudget]) -> str:
    """States in one sentence where the sides first differ."""
    site, first = over[0].unit.site, edge.first_bitwise
    if first is not None and first.site == site:
        return f"The sides first differ at {site}, which is over its budget."
    if first is not None:
        why, _, _ = why_legitimate(verdict, edge, first.site).partition(":")
        how = f", by {'legitimate rounding' if why == 'legitimate' else why}" if why else ""
        return f"The sides differ earlier, first at {first.site}{how}."
    differ = sum(bool(s.differ) for s in edge.sites)
    return (
        f"{differ} of {len(edge.sites)} sites differ, none of them in a row whose inputs are "
        "bit-equal."
    )


def site_figures(s: SiteResult) -> str:
    """States how many rows a site introduced, and how large its error is."""
    text = f"{s.introduced:,} of {s.rows:,} rows introduced here"
    if s.nonfinite:
        return f"{text}; {s.nonfinite:,} entries are NaN or infinite"
    if s.valued_rows:
        text += f"; relative L2 up to {s.max_rel_l2:.2g}, max |error| {s.max_abs:.2g}"
    return text


def positions_words(c: Comparison) -> str:
    """States which positions of the context were tested; empty where all were, or where the run
    does not record that."""
    if not 0 < c.longest_sequence < c.context:
        return ""
    return f"positions up to {c.longest_sequence:,} of {c.context:,} tested"


LONGER_PROMPTS = "longer prompts (--prompts FILE) test later ones"
"""The advice beside `positions_words`."""


def rank_words(unit: Introducer) -> str:
    """States which ranks of a sharded side hold the differing values; empty where that is not
    known."""
    sides = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} of {side}"
        for side, ranks in unit.ranks.items()
    ]
    return f"the differing values are on {' and '.join(sides)}" if sides else ""


EDGE_FIGURES = ("max |Δ|", "mean |Δ|", "p99 |Δ|", "k3", "ρ − 1", "clip", "≠ bits")
"""The most important figures of an edge."""


def edge_figures(m: EdgeMetrics) -> list[str]:
    """Returns the figures of EDGE_FIGURES in few digits."""
    sizes = (m.max_abs_dlogp, m.mean_abs_dlogp, m.p99_abs_dlogp, m.k3)
    shift, clipped = f"{m.ratio_mean - 1:.1g}", f"{m.clip_fraction:.1%}"
    return [*(f"{x:.2g}" for x in sizes), shift, clipped, str(m.bit_mismatches)]


_HEALTHY = ("max_abs_dlogp", "mean_abs_dlogp", "p99_abs_dlogp", "k3", "ratio_mean_error")


def healthy_figures(verdict: Verdict) -> list[str]:
    """Returns the largest value of healthy models for each of EDGE_FIGURES; empty where the
    contract does not state them."""
    healthy = verdict.contract.healthy
    if healthy is None:
        return []
    high = {metric: high for metric, (_, high) in healthy.ranges.items()}
    sizes = [f"≤{high[name]:.2g}" if name in high else "" for name in _HEALTHY]
    clipped = f"≤{high['clip_fraction']:.1%}" if "clip_fraction" in high else ""
    return [*sizes, clipped, ""]


def noise_law(verdict: Verdict, edge: EdgeResult) -> str:
    """Compares the Δ of an edge with the law of healthy noise; empty for a run of an older
    version."""
    noise = edge.metrics.noise
    if noise is None:
        return ""
    limits = [x for x in verdict.checks if x.edge == edge.name and x.metric == "noise_c"]
    allowed = f", {limits[0].fail:.2g} allowed" if limits else ""
    interval = f" ({noise.c_low:.2g} to {noise.c_high:.2g})" if noise.c_high > noise.c_low else ""
    return f"c = mean |Δ| / mean (1 − p) is {noise.c:.2g}{interval}{allowed}"


def cause_words(verdict: Verdict) -> str:
    """Names the cause of a verdict: a bug of an operator, drift, or none; empty where nothing was
    concluded."""
    cause = cause_of(verdict)
    if cause == "drift":
        return "drift beyond what the contract allows; no operator is at fault"
    if cause == "none":
        if verdict.expired:
            return "a waiver has expired"
        return "within the contract by waivers" if verdict.waived else "healthy"
    if cause is None:
        return ""
    c = verdict.comparison
    edges = [headline(verdict), *(e for e in c.edges if e.name in c.judged)]
    first = next(over[0] for e in edges if e is not None and (over := over_budget(verdict, e)))
    return f"a bug: {first.unit.site}, {_WHOSE_OFF[first.side]}"


def how_words(verdict: Verdict, over: OverBudget) -> list[tuple[str, str]]:
    """Returns (side and pass, description of the error) for each side that is off."""
    return [(f"{u.side} {u.passname}", how_off(u, verdict.contract)) for u in over.units]


def bounded(lines: Sequence[str], most: int) -> list[str]:
    """Returns the first `most` lines, and a count of the rest."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return [*lines[:most], *more]


def code_places(
    verdict: Verdict, edge: EdgeResult, site: str
) -> Iterator[tuple[str, CodePlace, list[str]]]:
    """Yields (side, location of the operator in the side's code, settings): the settings that the
    other side lacks, then those that agree with config.json."""
    units = [u for u in verdict.comparison.referee if u.site == site and edge.name in u.edges]
    places = {u.side: u.code for u in units if u.code is not None}
    for side, place in places.items():
        others = [p for s, p in places.items() if s != side]
        unlike = place.settings_unlike(others[0]) if others else {}
        known = [str(s) for s in _settings(units, side) if not s.differs]
        yield side, place, [*(f"{name}={value}" for name, value in unlike.items()), *known]


def _settings(units: Sequence[RefereedUnit], side: str) -> list[LiveSetting]:
    return next((u.settings for u in units if u.side == side and u.settings), [])


def mismatch_words(m: Mismatch) -> str:
    """Describes in one line a difference between the sides."""
    where = f" (sample {m.sample}, position {m.position})" if m.sample is not None else ""
    if m.name == "rope_frequencies":
        who_how = (("the rollout engine", m.rollout), ("the trainer", m.train))
        rounded = [
            f"{who}'s inverse frequencies were {how}" for who, how in who_how if how != "exact"
        ]
        return ", and ".join(rounded)
    sides = f"rollout {short_printable(m.rollout, 60)}, train {short_printable(m.train, 60)}"
    if m.kind == "weights" and (m.name == "adapter" or m.name.endswith(".lora")):
        of = f" of {m.name.removesuffix('.lora')}" if m.name != "adapter" else ""
        return f"LoRA adapter{of}: {sides}"
    copies = " and ".join(f"{module} of the {side}" for side, module in m.derived_copy.items())
    copied = f", derived copy in {copies}" if copies else ""
    return f"{m.kind} {m.name}{copied}{where}: {sides}"


def check_words(check: LimitCheck) -> str:
    """Describes a check, e.g. `prefill_vs_train max_abs_dlogp: 0.082, 0.06 allowed (max-dlogp)`."""
    where = " ".join(filter(None, [check.edge, check.side, check.site, check.metric]))
    value = f"{abs(check.value):.3g}"
    if check.low is not None:
        value += f" (at least {check.low:.3g})"
    words = f"{where}: {value}, {check.fail:.3g} allowed ({check.limit})"
    if check.outcome == "warn":
        words += f", warns above {check.warn:.3g}"
    return f"{words}; waived by {check.waiver.owner}" if check.waiver else words


def outcome(verdict: Verdict) -> tuple[str, str]:
    """Returns a sentence on what is wrong, if anything, and a second text with the reasons."""
    c, edge = verdict.comparison, headline(verdict)
    if c.stopped and stopped_by_distributions(c):
        return f"The log-probs are of different distributions: {sides_words(c)}.", ""
    if c.stopped:
        return f"The two sides have different inputs: {mismatch_words(c.stopping[0])}.", ""
    if verdict.status == "inconclusive" or edge is None:
        over = over_budget(verdict, edge) if edge is not None and c.not_recorded else []
        found = _over_words(verdict, edge, over) if edge is not None and over else ""
        return f"Nothing can be concluded: {verdict.doubts[0]}.", found
    cause = cause_words(verdict)
    return f"{cause[0].upper()}{cause[1:]}.", _finding(verdict, edge)


def finding(verdict: Verdict) -> str:
    """States what is wrong, or the evidence of a pass."""
    return " ".join(filter(None, outcome(verdict)))


def _finding(verdict: Verdict, edge: EdgeResult) -> str:
    """States what is wrong on an edge, or the evidence of a pass."""
    c = verdict.comparison
    over = over_budget(verdict, edge)
    if over:
        return _over_words(verdict, edge, over)
    first_difference = edge.first_bitwise
    if first_difference is None:
        text = f"Every row of {edge.name} is bit-equal on both sides."
    else:
        text = f"The sides first differ at {first_difference.site}."
        if c.referee and verdict.contract.budgets:
            more = "quantisation, " if quantised_between(edge, c) else ""
            text = (
                "No operator that was recomputed is further from exact than its rounding explains: "
                f"{more}rounding and the order of sums add up, "
                f"first at {first_difference.site}."
            )
        legitimate = why_legitimate(verdict, edge, first_difference.site)
        if legitimate:
            text += f" There it is {legitimate}."
    if verdict.breaches:
        return f"The two sides of {edge.name} are further apart than the contract allows. {text}"
    if verdict.expired:
        return f"A waiver has expired: {verdict.expired[0]}. {text}"
    if verdict.waived:
        count = len(verdict.waived)
        return f"{count} {'breach is' if count == 1 else 'breaches are'} waived. {text}"
    return text if first_difference is None else f"The sides differ within all limits. {text}"


def _over_words(verdict: Verdict, edge: EdgeResult, over: list[OverBudget]) -> str:
    first = over[0]
    text = f"{first.unit.site} computes something that its budget does not allow"
    if how := how_words(verdict, first):
        text = f"{first.unit.site} is further from exact than rounding explains: {how[0][1]}"
    later = len(over) - 1
    more = f" {later} later operator{'s are' if later > 1 else ' is'} off too." if later else ""
    return f"{text}.{more} {_first_difference(verdict, edge, over)}"


def side_off(verdict: Verdict) -> str:
    """States which side is off."""
    c, edge = verdict.comparison, headline(verdict)
    if c.stopped or edge is None:
        return "unknown: nothing was judged"
    over = over_budget(verdict, edge)
    if over and c.not_recorded:
        assumed = any("weights" in kinds for kinds in c.not_recorded.values())
        return whose_off(over[0]) + (", if it has the weights of its model" if assumed else "")
    if verdict.status == "inconclusive":
        return "unknown: nothing was judged"
    if over:
        return whose_off(over[0])
    if edge.first_bitwise is None:
        return "none: the sides are equal"
    if c.referee and verdict.contract.budgets:
        return "neither: every operator that was recomputed is within its budget on both sides"
    return "unknown: no operator was checked against float64"


MORE_TOKENS = "capture with more --prompts, or a larger --max-new-tokens"
"""The advice for a comparison with too few tokens."""


def _settle(verdict: Verdict) -> str:
    """States what would make the next run conclusive."""
    c, contract = verdict.comparison, verdict.contract
    noisy = [s for s, n in (c.controls.noise if c.controls else {}).items() if isinstance(n, Noise)]
    if noisy:
        return f"make {' and '.join(noisy)} repeat itself, or judge by a contract with max_noise"
    if c.not_recorded:
        return "record both sides by rlk_align.record, which keeps their weights and attributes too"
    short = [e for e in c.edges if e.name in c.judged and e.metrics.tokens < contract.min_tokens]
    rest = [name for name in c.judged if name not in {e.name for e in short}]
    if short and rest and all(_never_shown(e) for e in short):
        return f"judge only what both sides can show: --edges {','.join(rest)}"
    if short:
        return MORE_TOKENS
    return "correct the causes named above, then capture and compare again with --fresh"


def _never_shown(edge: EdgeResult) -> bool:
    """Whether a side can never show this edge's log-probs, however many tokens are captured."""
    return any(site == "logprob" and explained for site, _, explained in edge.unpaired)


def next_step(verdict: Verdict, folder: Path) -> str:
    """States what the user should do next."""
    c = verdict.comparison
    if c.stopped:
        kinds = dict.fromkeys(m.kind for m in c.stopping)
        flags = " ".join(f"--allow-mismatch {kind}" for kind in kinds)
        return f"correct it, or compare anyway with {flags}"
    edge = headline(verdict)
    if verdict.status == "inconclusive":
        over = over_budget(verdict, edge) if edge is not None and c.not_recorded else []
        if over and over[0].side in ("rollout", "train"):
            return f"check {over[0].unit.site} on the {over[0].side} side, and its weight there"
        return _settle(verdict)
    if verdict.status == "pass":
        contract = shlex.quote(verdict.contract.reference)
        return f"in CI: rlk-align gate {shlex.quote(str(folder))} --contract {contract}"
    if edge is None:
        return "see the breaches above"
    if verdict.expired and not verdict.breaches:
        waiver = verdict.expired[0].waiver
        return (
            f"ask {waiver.owner} to fix what the waiver of {waiver.limit} excused, or to renew "
            "the waiver"
        )
    over = over_budget(verdict, edge)
    first = over[0].unit if over else edge.first_bitwise
    if first is None:
        return "see the breaches above"
    where = shlex.quote(str(folder))
    if edge.name == "decode_vs_prefill":
        return f"compare {first.site} in the rollout engine's decode and in its prefill"
    unlike = [s for u in over[0].units for s in u.unlike_config] if over else []
    if unlike:
        s = unlike[0]
        return (
            f"give the {over[0].units[0].side} side {s.name} {s.configured} at {first.site}, as in "
            f"config.json: it uses {s.live}"
        )
    if over and over[0].side in ("rollout", "train"):
        return f"check {first.site} on the {over[0].side} side"
    if first.op == "logprob":
        return (
            "the logits are equal and the log-probs are not: compare how both sides compute them "
            "(temperature, raw or processed log-probs, the softmax's dtype)"
        )
    if not over:
        return f"see which operators move the log-probs most: rlk-align probe {where} --attribute"
    if over[0].unchecked:
        unchecked = over[0].unchecked[0].side
        return f"give {unchecked} the checkpoint's own {first.site}, and compare again"
    return f"see {first.site} on a page: rlk-align report html {where} -o report.html"
