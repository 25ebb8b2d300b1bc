"""The next step for each diagnosis, and the records of positive and of open diagnoses."""

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.diagnose.record import Confidence, Diagnosis, Name, Token, Untested

RESCORE = "rlk-align compare --tokens {RUN} --train SPEC"
_WEIGHTS = "rlk-align weights TRAINED SYNCED"
NEXT: dict[Name, str] = {
    "vacuous": "dump a run in which both sides compute their log-probs: the trainer's before its "
    "first update of the step, not a copy of the rollout's (bypass, on-policy shortcuts)",
    "misaligned": "check which token index j of each side's log-probs belongs to: heads and "
    "gathers drop the first or the last one, padding moves them; then import again",
    "mask-shifted": "compare the mask with the tokens at the start and the end of a response: it "
    "must be 1 where the rollout sampled, and nowhere else",
    "above-zero": "write log p of a normalised distribution, which is at most 0: −log p is a loss, "
    "and p a probability",
    "missing": "find what writes the value in place of a log-prob (a default of 0.0, a sentinel, "
    "nan_to_num) and record the log-prob, or leave the token out of the loss; NaN and infinite "
    "values were computed: look at that side's logits",
    "low-precision": "compute and store log-probs in float32: cast the logits before log_softmax",
    "duplicated": "give every sample a seed of its own (n > 1 in one request, or no seed at all): "
    "equal seeds on several workers or requests sample the same answer. Check, too, that the dump "
    "was not imported twice",
    "wrong-token": "take the log-prob of the sampled token's id, not the first entry of the "
    "engine's dictionary, which belongs to the most probable token",
    "logprob-scaled": "divide the logits by the temperature before log_softmax, never the "
    "log-probs after it",
    "temperature": "ask the rollout for log-probs of the distribution that it samples from "
    "(vLLM: logprobs_mode=processed_logprobs), and divide the trainer's logits by the same T",
    "truncation": "use top_p 1 and top_k off for training, or give both sides the same kept set",
    "turn-boundary": "compare the ids that the rollout saw with those that the trainer gets, at "
    "the turn that is shown: keep ids from turn to turn and never tokenise text again",
    "packing": "train the same batch without packing, or look for position ids and state that are "
    f"not reset at a sequence's start; then {RESCORE}",
    "rope": "compare rope_theta, rope_scaling and the longest position of both sides; then "
    f"{RESCORE}",
    "stale-cache": "reset the rollout's prefix cache after every update of the weights",
    "stale-weights": f"{_WEIGHTS} compares the rollout's weights with the trainer's",
    "decode-state": f"{RESCORE} --rollout SPEC compares the rollout's decode with its own prefill",
    "routing": f"{RESCORE}; replay the rollout's routes in the trainer, or compare the routers",
    "dropout": "put the trainer into evaluation mode while it computes log-probs, and set every "
    "dropout to 0",
    "quantisation": f"{RESCORE} with each side in its full precision and the trainer in evaluation "
    "mode shows which side's format, kernels or dropout cause the error",
    "single-token": f"look the shown tokens up in the dump, for another value in place of their "
    f"log-prob; then {RESCORE}",
    "numerics": f"nothing to repair; {RESCORE} names the operator that the rest comes from",
}
"""Diagnosis -> the next command or the change to make, with {RUN} for the run's folder."""


def diagnosis(
    name: Name,
    statistic: str,
    estimate: Estimate,
    limit: float,
    why: str,
    samples: list[Token],
    confidence: Confidence = "high",
) -> Diagnosis:
    """Returns the record of a positive diagnosis."""
    return Diagnosis(
        name=name,
        statistic=statistic,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        limit=limit,
        confidence=confidence,
        why=why,
        samples=samples,
        next=NEXT[name],
    )


def untested(
    name: Name,
    statistic: str,
    estimate: Estimate,
    limit: float,
    contract: RunContract,
    shaped: bool = True,
) -> Untested | None:
    """Returns the record of a diagnosis that is not positive but cannot be excluded, because its
    interval reaches far beyond the limit; None if it is excluded. The diagnosis is suspected if the
    middle of the interval's lower half is above the limit and the error has its shape
    (`shaped`)."""
    if estimate.high <= contract.threshold("untested.reach") * limit:
        return None
    if not estimate.low <= estimate.high:
        return Untested(name=name, why="too few sequences have a measurable error")
    why = (
        f"{statistic} is {estimate.value:.2g} and may be {estimate.low:.2g} to "
        f"{estimate.high:.2g}, where more than {limit:g} would be a fault"
    )
    suspected = shaped and (estimate.value + estimate.low) / 2 > limit
    return Untested(name=name, why=why, suspected=suspected)
