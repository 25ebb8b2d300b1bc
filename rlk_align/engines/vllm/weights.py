"""The live parameters of a vLLM decoder, as canonical ones."""

from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.fused_places import head_path
from rlk_align.engines.common.layout import padded
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.weights import Parameter, canonical, parameters
from rlk_align.engines.process.ranks import Ranks, all_gather
from rlk_align.engines.vllm.experts import expert_weights
from rlk_align.engines.vllm.places import vllm_places
from rlk_align.model.families import ModelShape


def parameter_plan(model: Any, shape: ModelShape, tp: int) -> Iterator[Parameter]:
    """Every parameter of a live model of `tp` ranks."""
    rows = model.get_submodule(head_path(model)).weight.shape[0]
    places = vllm_places(model, shape, tp)
    return parameters(places, shape, tp, lambda op: padded(op, shape.vocab, rows, tp))


def vllm_weights(model: Any, shape: ModelShape, ranks: Ranks) -> Iterator[LiveParameter]:
    """The canonical parameters of a live vLLM model, in the checkpoint's layout."""
    plan = parameter_plan(model, shape, ranks.world)
    yield from canonical(
        plan, lambda path: live_parameter(model, path), lambda local: all_gather(local, ranks)
    )
    yield from expert_weights(model, shape, ranks)


def live_parameter(model: Any, path: str) -> torch.Tensor | None:
    """The tensor at a path that a model computes with; None if there is none."""
    holder, _, name = path.rpartition(".")
    module = model.get_submodule(holder)
    value = getattr(module, name, None)
    return live_weight(module) if name == "weight" and value is not None else value


def live_weight(module: Any) -> torch.Tensor:
    """The weight `[out, in]` that a linear layer computes with.

    On CPUs vLLM packs the weight and empties the parameter. The layer's product with the identity
    restores the weight bit for bit, except for the sign of zero.
    """
    if module.weight.numel():
        return module.weight
    dtype = module.params_dtype
    # A layer that every rank has whole has no partition.
    size = getattr(module, "input_size_per_partition", module.input_size)
    columns = [
        module.quant_method.apply(module, block, None)
        for block in torch.eye(size, dtype=dtype).split(1024)
    ]
    return torch.cat(columns).T
