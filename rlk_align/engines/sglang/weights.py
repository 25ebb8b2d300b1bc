"""The live parameters of an SGLang decoder, as canonical ones."""

from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.layout import padded
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.weights import Parameter, canonical, parameters
from rlk_align.engines.sglang.experts import expert_weights
from rlk_align.engines.sglang.places import sglang_places
from rlk_align.model.families import ModelShape


def parameter_plan(model: Any, shape: ModelShape) -> Iterator[Parameter]:
    """Every parameter of a live model."""
    rows = model.lm_head.weight.shape[0]
    places = sglang_places(model, shape)
    return parameters(places, shape, 1, lambda op: padded(op, shape.vocab, rows, 1))


def sglang_weights(model: Any, shape: ModelShape) -> Iterator[LiveParameter]:
    """The canonical parameters of a live model, in the checkpoint's layout."""
    yield from canonical(
        parameter_plan(model, shape), lambda path: live_parameter(model, path), lambda x: [x]
    )
    yield from expert_weights(model)


def live_parameter(model: Any, path: str) -> torch.Tensor | None:
    """The tensor at a path that a model computes with; None if there is none."""
    holder, _, name = path.rpartition(".")
    return getattr(model.get_submodule(holder), name, None)
