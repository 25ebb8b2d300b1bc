"""Converts the sequences of a dump to a batch that an engine scores."""

import numpy as np

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.model.prompts import Prompt, Sample, TokenBatch
from rlk_align.model.shape import ModelShape
from rlk_align.text import short_printable


def token_batch(run: Sequences) -> TokenBatch:
    """Returns the sequences of the dump as a batch. A response begins with the first scored token,
    or with the dump's own response if that is earlier. The log-probs within the dump's mask
    count."""
    samples = []
    for k, (start, end) in enumerate(zip(run.offsets[:-1], run.offsets[1:], strict=True)):
        ids = tuple(run.token_ids[start:end].tolist())
        first_scored = int(np.argmax(run.scored[start:end]))
        prompt = max(1, min(int(run.prompt_lengths[k]), first_scored))
        mask = tuple(run.scored[start:end][prompt:].tolist())
        # Ids may repeat from step to step.
        name = f"{k}:{short_printable(run.ids[k])}"
        counted = None if all(mask) else mask
        samples.append(Sample(name, ids[:prompt], ids[prompt:], counted))
    return TokenBatch(tuple(samples))


def prompts_of(batch: TokenBatch) -> list[Prompt]:
    """Returns the prompts of a batch, as ids."""
    return [Prompt(s.prompt_id, None, s.prompt_ids) for s in batch.samples]


def check_fits(batch: TokenBatch, shape: ModelShape, positions: int, engine: str) -> None:
    """Raises DumpError for a sequence with an id outside the model's vocabulary, or with more
    tokens than the engine has positions."""
    for s in batch.samples:
        if max(s.ids) >= shape.vocab:
            raise DumpError(
                f"sequence {s.prompt_id!r} has token id {max(s.ids)}; the vocabulary of the "
                f"{engine} side's model has {shape.vocab} entries",
                "name the checkpoint of the run with --model",
            )
        if len(s.ids) > positions:
            raise DumpError(
                f"sequence {s.prompt_id!r} is too long: {len(s.ids)} tokens, and the {engine} side "
                f"has {positions} positions",
                "name the checkpoint of the run with --model, or import only shorter sequences",
            )
