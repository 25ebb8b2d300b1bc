"""What a model does with its logits before a token is chosen, by config.json."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

MULTIPLIED = ("cohere2",)
"""Families that multiply their logits by `logit_scale`."""
DIVIDED = ("granite", "granitemoe")
"""Families that divide their logits by `logits_scaling`."""
CAPPED = ("gemma2", "gemma3_text")
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
def unfinished(config: Any) -> Iterator[None]:
    """A context in which transformers' own code leaves the logits as they are."""
    neutral = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
    stated = {name: getattr(config, name) for name in neutral if hasattr(config, name)}
    try:
        for name in stated:
            setattr(config, name, neutral[name])
        yield
    finally:
        for name, value in stated.items():
            setattr(config, name, value)
