"""The live parameters of an SGLang decoder, as canonical ones."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from rlk_align.engines.common.layout import padded
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.products import Method, weights_in_use
from rlk_align.engines.common.weights import Parameter, parameters
from rlk_align.engines.process.ranks import Ranks, all_gather
from rlk_align.engines.sglang.experts import expert_weights
from rlk_align.engines.sglang.head import HEAD
from rlk_align.engines.sglang.places import sglang_places
from rlk_align.model.shape import ModelShape


def parameter_plan(model: Any, shape: ModelShape, tp: int) -> Iterator[Parameter]:
    """Every parameter of a live model of `tp` ranks."""
    rows = model.lm_head.weight.shape[0]
    places = sglang_places(model, shape, tp)
    return parameters(places, shape, tp, lambda op: padded(op, shape.vocab, rows, tp))


def sglang_weights(model: Any, shape: ModelShape, ranks: Ranks) -> Iterator[LiveParameter]:
    """The canonical parameters of a live model, in the checkpoint's layout."""
    plan = parameter_plan(model, shape, ranks.world)
    yield from weights_in_use(
        plan, model, partial(product_method, model), lambda local: all_gather(local, ranks)
    )
    yield from expert_weights(model, ranks)


def product_method(model: Any, path: str) -> Method:
    """The method that computes the product with the parameter at a path."""
    module = model.get_submodule(path.rpartition(".")[0])
    if module is model.lm_head:
        return model.logits_processor.get_submodule(HEAD), "forward"
    return module.quant_method, "apply"


def live_parameter(model: Any, path: str) -> torch.Tensor | None:
    """The tensor at a path that a model computes with; None if there is none."""
    holder, _, name = path.rpartition(".")
    return getattr(model.get_submodule(holder), name, None)
