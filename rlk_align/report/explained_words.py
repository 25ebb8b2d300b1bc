"""Sentences about an explained run that its outputs share."""

import shlex
from math import isnan

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.explain import Breach, Explanation
from rlk_align.logs.diagnose.record import Diagnosis, Name

MEANING: dict[Name, str] = {
    "vacuous": "There is nothing to compare.",
    "misaligned": "The two sides' log-probs belong to different positions.",
    "mask-shifted": "The loss mask does not lie on the sampled tokens.",
    "above-zero": "One side wrote values above 0, which are no log-probs.",
    "missing": "Log-probs are missing, or another value is in their place.",
    "low-precision": "Log-probs were stored in too few bits.",
    "duplicated": "Samples of one prompt are copies of one another.",
    "wrong-token": "One side's log-probs belong to a token that was not sampled.",
    "logprob-scaled": "One side divided log-probs by the temperature instead of logits.",
    "temperature": "The two sides use different temperatures.",
    "truncation": "One side's log-probs are of the truncated distribution (top-p, top-k, min-p).",
    "turn-boundary": "From a turn on, the two sides read different tokens.",
    "packing": "Packed sequences disturb each other.",
    "rope": "The two sides disagree more, the later the token's position.",
    "stale-cache": "The rollout's prefix cache holds states of older weights.",
    "stale-weights": "The rollout's weights are older than the trainer's.",
    "decode-state": "The rollout decoded some sequences in a broken state.",
    "routing": "Single tokens take another route through the model.",
    "dropout": "The trainer's log-probs have noise that depends on the model's certainty.",
    "quantisation": "The numerical error is larger than the dtype explains.",
    "single-token": "Single tokens are farther off than rounding explains.",
    "numerics": "The two sides agree within ordinary rounding.",
}
"""Diagnosis -> what it means, in a sentence."""
BLIND = (
    "decode, prefill or trainer: which of them is off",
    "which operator or kernel it comes from",
    "noise between micro-batches of the trainer",
)
"""What a dump cannot tell."""


def sentence(explained: Explanation) -> str:
    """The verdict in a sentence."""
    if explained.diagnoses:
        return MEANING[explained.diagnoses[0].name]
    if explained.doubts:
        return "Nothing can be concluded."
    return "The mean ratio is not 1, and no known kind of mismatch explains it."


def interval(estimate: Estimate) -> str:
    """A value with its interval."""
    if isnan(estimate.value):
        return "not known: no tokens to tell it from"
    if not estimate.low <= estimate.high:
        return f"{estimate.value:.4g}, without an interval"
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g})"


def value_words(diagnosis: Diagnosis) -> str:
    """A diagnosis' statistic: what it is, its value with its interval, and its limit."""
    shown = f"{diagnosis.value:.4g} ({diagnosis.low:.4g} to {diagnosis.high:.4g})"
    return f"{diagnosis.statistic}: {shown}, limit {diagnosis.limit:g}"


def breach_words(breach: Breach) -> str:
    """A limit of the contract that does not hold."""
    _, metric, value, bound = breach
    return f"{metric} is {value:.4g}, {bound:g} allowed"


def scope(explained: Explanation) -> str:
    """How much of the run was looked at."""
    counts = explained.counts
    compared = f"{counts.compared:,} of {counts.scored:,} scored tokens have both log-probs"
    if explained.sampled is None:
        return f"{compared}; {counts.sequences:,} sequences"
    part = f"{explained.sampled:,} of {counts.sequences:,} sequences, a seeded sample"
    return f"{compared}; the diagnoses are made from {part}"


def next_command(text: str, folder: str) -> str:
    """A command with the run's folder instead of {RUN}."""
    return text.format(RUN=shlex.quote(folder))
