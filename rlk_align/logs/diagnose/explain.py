"""The diagnoses in their order, and the verdict on a run."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from rlk_align.interval import DEVIATIONS, UNKNOWN, Estimate
from rlk_align.logs.diagnose.bookkeeping import (
    above_zero,
    low_precision,
    mask_shifted,
    misaligned,
    missing,
    vacuous,
)
from rlk_align.logs.diagnose.contract import Dtype, RunContract
from rlk_align.logs.diagnose.distributions import (
    logprob_scaled,
    temperature,
    truncation,
    wrong_token,
)
from rlk_align.logs.diagnose.error_positions import packing, rope, turn_boundary
from rlk_align.logs.diagnose.error_size import (
    dropout,
    numerics,
    quantisation,
    routing,
    single_token,
    stale_weights,
)
from rlk_align.logs.diagnose.evidence import Evidence
from rlk_align.logs.diagnose.record import Diagnosis, Name, Untested
from rlk_align.logs.diagnose.sample import EMPTY, Counts, RatioSums, gather
from rlk_align.logs.diagnose.whole_sequences import decode_state, duplicated, stale_cache
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.dumps.sequences import Sequences

Status = Literal["pass", "fail", "inconclusive"]
EXIT_CODES: dict[Status, int] = {
    "pass": EXIT_PASS,
    "fail": EXIT_FAIL,
    "inconclusive": EXIT_INCONCLUSIVE,
}
Check = Callable[[Evidence], Diagnosis | Untested | None]
Breach = tuple[str, str, float, float]
"""(Limit, metric, value, the limit's bound)."""
FAMILIES: tuple[tuple[Check, ...], ...] = (
    (misaligned, mask_shifted),
    (above_zero, missing, low_precision, duplicated),
    (wrong_token, logprob_scaled, temperature, truncation),
    (turn_boundary, packing, rope, stale_cache),
    (stale_weights, decode_state),
    (dropout,),
    (routing,),
    (quantisation,),
    (single_token,),
)
"""The diagnoses in their order: the first one that holds is the verdict. A mismatch that a family
finds or suspects distorts the statistics of later families, which are then skipped."""
BOOKKEEPING = 2
"""The number of families that need only few tokens."""
GOES_ON: frozenset[Name] = frozenset({"missing", "low-precision", "duplicated"})
"""Diagnoses after which later families are still tested, because their tokens are excluded, counted
once, or hardly wrong."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The verdict on a run, and its evidence."""

    status: Status
    contract: RunContract
    diagnoses: list[Diagnosis]
    """The first one is the verdict; the others hold, too. The list is empty if only the mean ratio
    is off, or if nothing was concluded."""
    counts: Counts
    mean_ratio: Estimate
    """E[ρ] over the whole run."""
    c: Estimate
    sampled: int | None
    """The number of sequences that the diagnoses are based on; None means all."""
    dtype: Dtype
    doubts: list[str]
    """The reasons why nothing can be concluded."""
    untested: list[Untested]
    """Mismatches that can be neither confirmed nor excluded."""
    breaches: list[Breach]
    sampling: Sampling | None
    """What the dump states of the rollout's sampling; None if its sequences state several
    settings."""

    @property
    def exit_code(self) -> int:
        """The exit code of the process."""
        return EXIT_CODES[self.status]


def explain(batches: Iterable[Sequences], contract: RunContract, seed: int = 0) -> Explanation:
    """Reads a run once and diagnoses its mismatch."""
    sample = gather(batches, contract, seed)
    counts, mean_ratio = sample.counts, mean_of(sample.ratio)
    evidence = Evidence(sample.kept or EMPTY, counts, contract)
    few = counts.compared < contract.min_tokens
    # Values in place of log-probs are no evidence about a distribution or about noise.
    unusable = len(evidence.index) < contract.min_tokens
    diagnoses, untested = _answers(evidence, FAMILIES[:BOOKKEEPING] if unusable else FAMILIES)
    doubts = []
    if counts.compared and few:
        doubts.append(f"{counts.compared:,} tokens are compared, {contract.min_tokens:,} needed")
    elif unusable and not diagnoses:
        doubts.append(
            f"only {len(evidence.index):,} of the sampled tokens have log-probs on both sides, "
            f"{contract.min_tokens:,} needed"
        )
    if not diagnoses:
        doubts += [f"{x.name} is probable: {x.why}" for x in untested if x.suspected]
        diagnoses = [] if doubts else [numerics(evidence, mean_ratio)]
    if diagnoses and diagnoses[0].name == "vacuous":
        doubts.append(diagnoses[0].why)
    c = evidence.c()
    level_limit = contract.limit("quantisation", dtype=evidence.dtype)
    if diagnoses and diagnoses[0].name == "numerics" and not c.value <= level_limit:
        doubts.append(
            f"c is {c.value:.2g}, more than {level_limit:g}, and may be {max(c.low, 0.0):.2g} to "
            f"{c.high:.2g}: the sequences are too few or too different to name a cause"
        )
        diagnoses = []
    breaches: list[Breach] = [
        (d.name, d.statistic, d.value, d.limit) for d in diagnoses if d.name != "numerics"
    ]
    breaches += _ratio_breach(mean_ratio, contract)
    if breaches and diagnoses and diagnoses[0].name == "numerics":
        diagnoses = []
    status: Status = "inconclusive" if doubts else "fail" if breaches else "pass"
    assert doubts or breaches or diagnoses, "an explanation says something"
    return Explanation(
        status=status,
        contract=contract,
        diagnoses=diagnoses,
        counts=counts,
        mean_ratio=mean_ratio,
        c=c,
        sampled=None if sample.whole or sample.kept is None else len(sample.kept),
        dtype=evidence.dtype,
        doubts=doubts,
        untested=untested,
        breaches=breaches,
        sampling=_stated(evidence.run),
    )


def _stated(run: Sequences) -> Sampling | None:
    settings = {sampling.model_dump_json(): sampling for sampling in run.sampling}
    return next(iter(settings.values())) if len(settings) == 1 else None


def _answers(
    e: Evidence, families: Sequence[tuple[Check, ...]]
) -> tuple[list[Diagnosis], list[Untested]]:
    nothing = vacuous(e)
    if nothing is not None:
        return [nothing], []
    diagnoses: list[Diagnosis] = []
    untested: list[Untested] = []
    for family in families:
        for check in family:
            answer = check(e)
            if isinstance(answer, Diagnosis):
                diagnoses.append(answer)
            elif answer is not None:
                untested.append(answer)
        if any(d.name not in GOES_ON for d in diagnoses) or any(x.suspected for x in untested):
            break
    return diagnoses, untested


def mean_of(sums: RatioSums) -> Estimate:
    """E[ρ] with its interval, from sums over answers."""
    excess, tokens = sums.by_answer()
    if len(tokens) < 2:
        return UNKNOWN
    mean = float(excess.sum() / tokens.sum())
    squares = float(((excess - mean * tokens) ** 2).sum())
    error = math.sqrt(squares * len(tokens) / (len(tokens) - 1)) / float(tokens.sum())
    return Estimate(1 + mean, 1 + mean - DEVIATIONS * error, 1 + mean + DEVIATIONS * error)


def _ratio_breach(mean_ratio: Estimate, contract: RunContract) -> list[Breach]:
    limit = contract.limit("numerics")
    off = mean_ratio.above(1 + limit) or (-mean_ratio).above(limit - 1)
    return [("numerics", "|E[ρ] − 1|", abs(mean_ratio.value - 1), limit)] if off else []
