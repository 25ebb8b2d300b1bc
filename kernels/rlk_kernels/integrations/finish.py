"""What a model does with its logits before a token is chosen, by config.json."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

MULTIPLIED = ("cohere2",)
"""Families that multiply their logits by `logit_scale`."""
DIVIDED = ("granite", "granitemoe")
"""Families that divide their logits by `logits_scaling`."""
CAPPED = ("gemma2", "gemma3_text", "gemma4_text")
"""Families that cap their logits by `final_logit_softcapping`, if config.json states it."""


class Finish(NamedTuple):
    """Logits are capped, then multiplied."""

    cap: float | None = None
    """c of c tanh(x / c); None for no cap."""
    scale: float = 1.0


FINISHED = Finish()
"""Logits that are neither capped nor multiplied."""


def finish_of(config: Any) -> Finish:
    """What a family of transformers does with its logits."""
    scale = 1.0 / config.logits_scaling if config.model_type in DIVIDED else 1.0
    scale = config.logit_scale if config.model_type in MULTIPLIED else scale
    cap = config.final_logit_softcapping if config.model_type in CAPPED else None
    return Finish(cap, scale)


@contextmanager
def unfinished(model: Any) -> Iterator[None]:
    """A context in which the code of a model of transformers leaves the logits as they are. It
    reads the settings in the model's config, or Cohere 2's in the model itself."""
    neutral = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
    owners = model.config, model
    stated = [
        (owner, name, getattr(owner, name))
        for owner in owners
        for name in neutral
        if hasattr(owner, name)
    ]
    try:
        for owner, name, _ in stated:
            setattr(owner, name, neutral[name])
        yield
    finally:
        for owner, name, value in stated:
            setattr(owner, name, value)
