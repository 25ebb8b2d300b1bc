"""The checks of every step, whose errors name the fault.

Masks are compared with the spans that the rollout engine returned, and weights, parameter by
parameter, with the weights of the live engine.
"""

import math
from collections.abc import Mapping, Sequence

from batch import Answer, Sample
from torch import Tensor


class LoopFault(Exception):
    """The loop would train on wrong data. The message begins with the fault's name."""


def check_masks(answers: Sequence[Answer], samples: Sequence[Sample]) -> None:
    """Raises LoopFault if the numbers of samples and answers differ, and for the first sample whose
    tokens are not its answer's, whose mask is not that of the answer's sampled tokens, or whose
    log-probs belong to other tokens than the sampled ones."""
    if len(samples) != len(answers):
        raise LoopFault(f"other number of samples: {len(samples)} of {len(answers)} answers")
    for number, (answer, sample) in enumerate(zip(answers, samples, strict=True)):
        sampled = {index for span in answer.spans for index in span.indices}
        counted = {index for index, on in enumerate(sample.mask) if on}
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
        known = {index for index, x in enumerate(sample.rollout_logprobs) if x is not None}
        if others := sorted(known ^ sampled):
            raise LoopFault(f"log-prob of another token: {where.format(others[0])}")
        if not counted:
            if sampled and not answer.cut:
                raise LoopFault(f"nothing counted: sample {number} has {len(sampled)} tokens")
            continue
        if answer.cut:
            raise LoopFault(
                f"cut answer counted: sample {number} ends at the token limit, so its reward is "
                f"that of an incomplete answer, and the loss counts {len(counted)} of its tokens"
            )
        for shift in (1, -1):
            # A shift loses a token that it moves past the last one.
            if counted == {index + shift for index in sampled} - {len(sample.mask)}:
                raise LoopFault(
                    f"mask shifted by {shift:+d}: " + where.format(min(counted ^ sampled))
                )
        if early := sorted(index for index in counted if index < answer.prompt_length):
            raise LoopFault(f"prompt token counted: {where.format(early[0])}")
        if others := sorted(counted ^ sampled):
            what = "tool's token counted" if others[0] in counted else "sampled token left out"
            raise LoopFault(f"{what}: {where.format(others[0])}")


def check_gradients(norm: float, gradients: Mapping[str, Tensor]) -> None:
    """Raises LoopFault with the names of the parameters if the norm of all gradients is not
    finite."""
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
    """Raises LoopFault if a parameter's digests differ. before: the trainer's digests in the
    previous step, which identify a parameter that was not synced."""
    if missing := sorted(trainer.keys() ^ rollout.keys()):
        raise LoopFault(f"parameter on one side only: {', '.join(missing)}")
    differing = [name for name in trainer if trainer[name] != rollout[name]]
    stale = [name for name in differing if rollout[name] == before.get(name)]
    if stale:
        raise LoopFault(f"stale weights: {', '.join(stale)} of the step before in the rollout")
    if differing or not trainer:
        raise LoopFault(f"other weights in the rollout: {', '.join(differing) or 'none compared'}")
