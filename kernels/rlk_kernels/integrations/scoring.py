"""A context in which an output layer with the kernels returns log-probs instead of logits.

The model's own forward runs, so that its wrappers (FSDP2, DDP, autocast) work as usual. Only the
last product differs: `profile.logp_of_hidden` never has the logits of all rows in memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.finish import FINISHED, Finish
from rlk_kernels.integrations.operators import Counted


@dataclass(frozen=True)
class Scoring:
    """The arguments of `profile.logp_of_hidden`."""

    targets: Tensor
    """int64: a target for each row of hidden states, in the shape of the rows."""
    temperature: float
    entropy: bool
    vocabulary: int | None = None
    entropy_gradient: bool = True
    truncation: profile.Truncation = profile.EVERYTHING
    kept: Tensor | None = None
    """bool: the kept tokens of each row, in the shape of the rows and the vocabulary."""


class Scores(Counted):
    """An output layer with the kernels that can return log-probs instead of logits (`scoring`)."""

    rlk_scoring: Scoring | None = None
    rlk_finish: Finish = FINISHED

    def score(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, group: Any = None
    ) -> Tensor:
        """fp32 [..., 1 or 2] for hidden[..., H], by the arguments in `rlk_scoring`."""
        asked = self.rlk_scoring
        assert asked is not None
        if asked.targets.shape != hidden.shape[:-1]:
            raise NotSupported(
                f"targets {tuple(asked.targets.shape)} do not fit hidden states "
                f"{tuple(hidden.shape)}: one is needed for each row"
            )
        scores = profile.logp_of_hidden(
            hidden.flatten(0, -2), weight, bias, asked.targets.to(hidden.device).flatten(),
            temperature=asked.temperature, entropy=asked.entropy, group=group,
            vocabulary=asked.vocabulary, entropy_gradient=asked.entropy_gradient,
            finish=self.rlk_finish, truncation=asked.truncation,
            kept=None if asked.kept is None else asked.kept.flatten(0, -2),
        )  # fmt: skip
        return scores.view(*hidden.shape[:-1], scores.shape[-1])


@contextmanager
def scoring(model: Any, asked: Scoring) -> Iterator[None]:
    """A context in which a live model's output layer returns log-probs by the arguments in `asked`.
    Raises NotSupported for a model whose output layer has no kernel."""
    layers = [module for module in model.modules() if isinstance(module, Scores)]
    if len(layers) != 1:
        raise NotSupported(
            f"a {type(model).__name__} has {len(layers)} output layers with the kernels, and 1 is "
            "needed: call use_kernels, and do not exclude the logits"
        )
    (layer,) = layers
    layer.rlk_scoring = asked
    try:
        yield
    finally:
        layer.rlk_scoring = None
