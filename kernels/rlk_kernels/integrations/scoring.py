"""Log-probs instead of logits: what an output layer with the kernels returns within `scoring`.

The model's own forward runs, so that its wrappers (FSDP2, DDP, autocast) do their part; only the
last product differs: `profile.logp_of_hidden`, which never holds the logits of all rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.operators import Counted


@dataclass(frozen=True)
class Scoring:
    """What an output layer is asked for instead of logits: see `profile.logp_of_hidden`."""

    targets: Tensor
    """int64, one for each row of hidden states, shaped as the rows are."""
    temperature: float
    entropy: bool
    vocabulary: int | None = None


class Scores(Counted):
    """An output layer with the kernels, which returns log-probs instead of logits in `scoring`."""

    rlk_scoring: Scoring | None = None

    def score(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, group: Any = None
    ) -> Tensor:
        """fp32 [..., 1 or 2] of hidden[..., H]: what `rlk_scoring` asks for."""
        asked = self.rlk_scoring
        assert asked is not None
        if asked.targets.shape != hidden.shape[:-1]:
            raise NotServed(
                f"targets {tuple(asked.targets.shape)} do not fit hidden states "
                f"{tuple(hidden.shape)}: one is needed for each row"
            )
        scores = profile.logp_of_hidden(
            hidden.flatten(0, -2), weight, bias, asked.targets.to(hidden.device).flatten(),
            temperature=asked.temperature, entropy=asked.entropy, group=group,
            vocabulary=asked.vocabulary,
        )  # fmt: skip
        return scores.view(*hidden.shape[:-1], scores.shape[-1])


@contextmanager
def scoring(model: Any, asked: Scoring) -> Iterator[None]:
    """A context in which a live model's output layer returns what is asked for instead of logits.
    Raises NotServed for a model whose output layer has no kernel."""
    layers = [module for module in model.modules() if isinstance(module, Scores)]
    if len(layers) != 1:
        raise NotServed(
            f"a {type(model).__name__} with {len(layers)} output layers with the kernels is not "
            "served: call use_kernels, and do not exclude the logits"
        )
    (layer,) = layers
    layer.rlk_scoring = asked
    try:
        yield
    finally:
        layer.rlk_scoring = None
