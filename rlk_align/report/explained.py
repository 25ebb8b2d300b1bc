"""The explanation of an imported run, as a document."""

import shlex
from collections.abc import Iterator
from math import isnan

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.explain import Breach, Explanation
from rlk_align.logs.diagnose.record import Diagnosis, Name, Token
from rlk_align.logs.dumps.record import Sampling
from rlk_align.report.document import DataTable, Document, Fact, Section
from rlk_align.report.sampling_distribution import softmax_words

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
"""Diagnosis -> its meaning, in a sentence."""
_NEUTRAL = {"top_k": (-1, 0), "top_p": (1,), "min_p": (0,)}
"""Limit -> the values at which it drops no token."""
BLIND = (
    "decode, prefill or trainer: which of them is off",
    "which operator or kernel it comes from",
    "noise between micro-batches of the trainer",
)
"""Questions that a dump cannot answer."""


def explained_document(explained: Explanation, folder: str) -> Document:
    """Returns the verdict on an imported run, which is in `folder`."""
    first = explained.diagnoses[0].next if explained.diagnoses else ""
    return Document(
        status=explained.status,
        headline=sentence(explained),
        folder=folder,
        facts=[
            *measured(explained),
            *(Fact("doubt", doubt, "doubt") for doubt in explained.doubts),
            # A breach of another limit has a diagnosis, which names it.
            *(
                Fact("breach", breach_words(breach), "breach")
                for breach in explained.breaches
                if breach[0] == "numerics"
            ),
        ],
        sections=[*diagnosis_sections(explained, folder), unknown(explained)],
        next_steps=[next_command(first, RUN=folder)] if first else [],
    )


def measured(explained: Explanation) -> list[Fact]:
    """Returns the contract, and the figures that every verdict on a dump states."""
    contract = explained.contract
    return [
        Fact("contract", f"{contract.id} {contract.version}, {explained.dtype}"),
        Fact("judged", scope(explained)),
        Fact("E[ρ]", f"{interval(explained.mean_ratio)}; 1 where the distributions agree"),
        Fact("c", f"{interval(explained.c)}; mean |Δ| per 1 − p"),
        Fact("log-probs", f"the rollout's are {rollout_distribution(explained.sampling)}"),
    ]


def rollout_distribution(sampling: Sampling | None) -> str:
    """Which distribution the rollout's log-probs are of, by what the dump states."""
    if sampling is None:
        return "of distributions that differ from sequence to sequence, by the dump"
    if sampling.logprobs_mode is None:
        return "of a distribution that the dump does not state"
    given = {name: getattr(sampling, name) for name in _NEUTRAL}
    limits = {n: x for n, x in given.items() if x is not None and x not in _NEUTRAL[n]}
    drawn = softmax_words(sampling.temperature, limits)
    if sampling.logprobs_mode == "processed_logprobs":
        return f"those {drawn}, by the dump, as the tokens were drawn"
    raw = softmax_words(1.0, {})
    return f"those {raw}, by the dump; the tokens were drawn {drawn}"


def diagnosis_sections(explained: Explanation, folder: str) -> Iterator[Section]:
    """Yields a section for each diagnosis. The first is the verdict."""
    for number, diagnosis in enumerate(explained.diagnoses):
        kind = "also" if number else "verdict"
        further = [Fact("next", next_command(diagnosis.next, RUN=folder))] if number else []
        yield Section(
            heading=f"{kind}: {diagnosis.name}, confidence {diagnosis.confidence}",
            text=[diagnosis.why, value_words(diagnosis)],
            table=_tokens(diagnosis) if diagnosis.samples else None,
            facts=further,
        )


def unknown(explained: Explanation) -> Section:
    """Lists what could not be tested, and what no dump can show."""
    untested = [f"{x.name} could not be tested: {x.why}" for x in explained.untested]
    blind = f"a dump cannot tell: {'; '.join(BLIND)}"
    return Section(heading="not known", items=[*untested, blind], tone="soft")


def _tokens(diagnosis: Diagnosis) -> DataTable:
    return DataTable(
        name=diagnosis.name,
        caption=f"Tokens that show {diagnosis.name} most",
        columns=("sequence", "position", "token id", "rollout", "trainer", "Δ"),
        rows=[_cells(token) for token in diagnosis.samples],
    )


def _cells(t: Token) -> list[str]:
    shift = None if t.rollout is None or t.train is None else t.train - t.rollout
    return [t.id, str(t.position), str(t.token), *map(_value, (t.rollout, t.train, shift))]


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def sentence(explained: Explanation) -> str:
    """Returns the verdict in a sentence."""
    if explained.diagnoses:
        return MEANING[explained.diagnoses[0].name]
    if explained.doubts:
        return "Nothing can be concluded."
    return "The mean ratio is not 1, and no known kind of mismatch explains it."


def interval(estimate: Estimate) -> str:
    """Writes a value with its interval."""
    if isnan(estimate.value):
        return "not known: there are no tokens to estimate it from"
    if not estimate.low <= estimate.high:
        return f"{estimate.value:.4g}, without an interval"
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g})"


def value_words(diagnosis: Diagnosis) -> str:
    """Writes a diagnosis' statistic with its value, its interval and its limit."""
    shown = f"{diagnosis.value:.4g} ({diagnosis.low:.4g} to {diagnosis.high:.4g})"
    return f"{diagnosis.statistic}: {shown}, limit {diagnosis.limit:g}"


def breach_words(breach: Breach) -> str:
    """Describes a breached limit of the contract."""
    _, metric, value, bound = breach
    return f"{metric} is {value:.4g}, {bound:g} allowed"


def scope(explained: Explanation) -> str:
    """States how much of the run was examined."""
    counts = explained.counts
    compared = f"{counts.compared:,} of {counts.scored:,} scored tokens have both log-probs"
    if explained.sampled is None:
        return f"{compared}; {counts.sequences:,} sequences"
    part = f"{explained.sampled:,} of {counts.sequences:,} sequences, a seeded sample"
    return f"{compared}; the diagnoses are based on {part}"


def next_command(text: str, **folders: str) -> str:
    """Replaces the names of folders in a command, e.g. {RUN}, with their paths, quoted."""
    return text.format(**{name: shlex.quote(folder) for name, folder in folders.items()})
