"""What the loop checks in every step, and how it names a breach.

Masks are compared with the spans that the rollout engine returned, and weights, parameter by
parameter, with those of the live engine.
"""

import math
from collections.abc import Mapping, Sequence

from batch import Answer, Sample
from torch import Tensor


class LoopFault(Exception):
    """The loop would train on what is not so; the message begins with the fault's name."""


def check_masks(answers: Sequence[Answer], samples: Sequence[Sample]) -> None:
    """Raises LoopFault where there are not as many samples as answers, and for the first sample
    with other tokens than its answer's, whose mask counts what is not to be trained on, or leaves
    out what is, or whose log-probs are of other tokens than those that were sampled."""
    if len(samples) != len(answers):
        raise LoopFault(f"other number of samples: {len(samples)} of {len(answers)} answers")
    for number, (answer, sample) in enumerate(zip(answers, samples, strict=True)):
        sampled = {place for span in answer.spans for place in span.places}
        counted = {place for place, on in enumerate(sample.mask) if on}
        where = f"in sample {number}, at token {{}}"
        tokens, lengths = len(answer.ids), {len(sample.mask), len(sample.rollout_logprobs)}
        if lengths != {tokens}:
            raise LoopFault(
                f"lists of other lengths: sample {number} has {tokens} tokens, {len(sample.mask)} "
                f"of the mask and {len(sample.rollout_logprobs)} log-probs"
            )
        if (sample.ids, sample.prompt_length) != (answer.ids, answer.prompt_length):
            raise LoopFault(
                f"tokens of another answer: sample {number} does not have the prompt and the "
                f"tokens of answer {number}"
            )
        known = {place for place, x in enumerate(sample.rollout_logprobs) if x is not None}
        if others := sorted(known ^ sampled):
            raise LoopFault(f"log-prob of another token: {where.format(others[0])}")
        if not counted:
            if sampled and not answer.cut:
                raise LoopFault(f"nothing counted: sample {number} has {len(sampled)} tokens")
            continue
        if answer.cut:
            raise LoopFault(
                f"cut answer counted: sample {number} ends at its limit of tokens, so its reward "
                f"is of half an answer, and the loss counts {len(counted)} tokens of it"
            )
        for shift in (1, -1):
            # What a shift moves past the last token is lost.
            if counted == {place + shift for place in sampled} - {len(sample.mask)}:
                raise LoopFault(
                    f"mask shifted by {shift:+d}: " + where.format(min(counted ^ sampled))
                )
        if early := sorted(place for place in counted if place < answer.prompt_length):
            raise LoopFault(f"prompt token counted: {where.format(early[0])}")
        if others := sorted(counted ^ sampled):
            what = "tool's token counted" if others[0] in counted else "sampled token left out"
            raise LoopFault(f"{what}: {where.format(others[0])}")


def check_gradients(norm: float, gradients: Mapping[str, Tensor]) -> None:
    """Raises LoopFault where the norm of all gradients is not finite, and names the parameters."""
    if math.isfinite(norm):
        return
    wrong = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    where = f"{len(wrong)} of {len(gradients)} parameters, first {wrong[0]}" if wrong else ""
    raise LoopFault(
        f"gradient not finite: norm {norm}, in {where or 'gradients of another rank'}; "
        "no weight was changed"
    )


def check_weights(
    trainer: Mapping[str, str], rollout: Mapping[str, str], before: Mapping[str, str]
) -> None:
    """Raises LoopFault where a parameter's digest is not the same on both sides. `before`: the
    trainer's digests of the step before, by which a parameter that was not synced is known."""
    if missing := sorted(trainer.keys() ^ rollout.keys()):
        raise LoopFault(f"parameter on one side only: {', '.join(missing)}")
    differing = [name for name in trainer if trainer[name] != rollout[name]]
    stale = [name for name in differing if rollout[name] == before.get(name)]
    if stale:
        raise LoopFault(f"stale weights: {', '.join(stale)} of the step before in the rollout")
    if differing or not trainer:
        raise LoopFault(f"other weights in the rollout: {', '.join(differing) or 'none compared'}")
