"""Which distribution log-probs are of, in words."""

from collections.abc import Mapping

from rlk_align.results import DISTRIBUTION, Comparison, SamplingDistribution, SideName

OWNERS: dict[SideName, str] = {"rollout": "the rollout's", "train": "the trainer's"}


def softmax_words(temperature: float | None, limits: Mapping[str, float]) -> str:
    """Describes a softmax: its temperature (None: not stated), and the tokens that it is over."""
    heat = "an unstated temperature" if temperature is None else f"temperature {temperature:g}"
    kept = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in limits.items())
    keep = "keeps" if len(limits) == 1 else "keep"
    among = f"the tokens that {kept} {keep}" if limits else "all tokens"
    return f"at {heat} among {among}"


def distribution_words(d: SamplingDistribution) -> str:
    """Names the kind of a distribution, and describes it."""
    kind = "raw" if d.temperature == 1 else "divided by the temperature"
    if d.limits:
        kind = "truncated and renormalised"
    return f"{kind}, {softmax_words(d.temperature, d.limits)}"


def sides_words(c: Comparison) -> str:
    """Says of which distribution the log-probs of each side are; "" if no side states it."""
    if not c.distributions:
        return ""
    words = {
        side: distribution_words(c.distributions[side]) if side in c.distributions
        else "of a distribution that the engine does not state"
        for side in OWNERS
    }  # fmt: skip
    if len(set(words.values())) == 1:
        return f"both sides' are {words['rollout']}"
    return "; ".join(f"{OWNERS[side]} are {text}" for side, text in words.items())


def stopped_by_distributions(c: Comparison) -> bool:
    """Whether the first mismatch that stops the comparison is of the distributions."""
    first = c.stopping[0]
    apart = len({d.model_dump_json() for d in c.distributions.values()}) > 1
    return apart and first.kind == "attributes" and first.name in DISTRIBUTION
