"""The live parameters of a vLLM decoder, as canonical ones."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlk_align.engines.common.fused_places import head_path
from rlk_align.engines.common.layout import padded
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.products import Method, read_weight, weights_in_use
from rlk_align.engines.common.weights import Parameter, canonical, parameters
from rlk_align.engines.process.ranks import Ranks, all_gather
from rlk_align.engines.vllm.delta_net import as_computed, convolution_weight
from rlk_align.engines.vllm.experts import expert_weights
from rlk_align.engines.vllm.latent import absorbed, core_of, expanding_weight
from rlk_align.engines.vllm.lora import without_adapter
from rlk_align.engines.vllm.mamba import a_log
from rlk_align.engines.vllm.places import vllm_places
from rlk_align.engines.vllm.quantised import fp8_weights, in_fp8
from rlk_align.model.shape import ModelShape


def parameter_plan(model: Any, shape: ModelShape, tp: int) -> Iterator[Parameter]:
    """Every parameter of a live model of `tp` ranks."""
    rows = model.get_submodule(head_path(model)).weight.shape[0]
    places = (without_adapter(model, place) for place in vllm_places(model, shape, tp))
    return parameters(places, shape, tp, lambda op: padded(op, shape.vocab, rows, tp))


def vllm_weights(model: Any, shape: ModelShape, ranks: Ranks) -> Iterator[LiveParameter]:
    """The canonical parameters of a live vLLM model, in the checkpoint's layout."""
    plan: list[Parameter] = []
    others: list[Parameter] = []
    for entry in parameter_plan(model, shape, ranks.world):
        holder, _, name = entry.name.rpartition(".")
        if name == "weight" and in_fp8(model.get_submodule(holder)):
            continue
        # No product of a linear layer has these weights.
        other = any(op.endswith((".conv", ".latent_attn")) for op in entry.layout.ops)
        (others if other else plan).append(entry)

    def gather(local: torch.Tensor) -> list[torch.Tensor]:
        return all_gather(local, ranks)

    for parameter in weights_in_use(plan, model, partial(product_method, model), gather):
        parameter = replace(parameter, value=a_log(model, parameter.name, parameter.value))
        yield as_computed(model, parameter)
    yield from fp8_weights(model, shape)
    for entry in others:
        yield from _beside_products(entry, model, gather)
    yield from expert_weights(model, shape, ranks)


def _beside_products(
    entry: Parameter, model: Any, gather: Callable[[torch.Tensor], list[torch.Tensor]]
) -> Iterator[LiveParameter]:
    """The canonical parameter in a parameter of no product. vLLM expands latents in a prefill by
    one, and decodes with copies of it: if these have other values, they are the value."""
    (held,) = canonical([entry], partial(live_parameter, model), gather)
    attention, expands, _ = entry.name.partition(".kv_b_proj.")
    core = core_of(model.get_submodule(attention)) if expands else None
    if copies := absorbed(core):
        (used,) = canonical([entry], lambda _: copies.whole(), gather)
        if not torch.equal(used.value, held.value):
            module = next(path for path, each in model.named_modules() if each is core)
            held = replace(used, derived=module, held=held.value)
    yield held


def product_method(model: Any, path: str) -> Method:
    """The method that computes the product with the parameter at a path. On CPUs vLLM packs
    weights: it empties the parameters of linears, and keeps that of the head beside the copy."""
    holder, _, _ = path.rpartition(".")
    # vLLM 0.26 has no method of its own for the head.
    if holder == head_path(model) and hasattr(model.logits_processor, "_apply_head"):
        return model.logits_processor, "_apply_head"
    module = model.get_submodule(holder)
    # GLM-4.5's routers in vLLM 0.26 are torch's own linears.
    if isinstance(module, torch.nn.Linear):
        return _TorchLinear, "apply"
    return module.quant_method, "apply"


class _TorchLinear:
    """The product of a `torch.nn.Linear`, with the signature of vLLM's quantisation methods."""

    @staticmethod
    def apply(
        module: torch.nn.Linear, rows: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.nn.functional.linear(rows, module.weight, bias)


def linear_weight(module: Any) -> torch.Tensor:
    """The weight `[out, in]` that a linear layer computes with, also where vLLM has packed it."""
    if module.weight.numel():
        return module.weight
    return read_weight((module.quant_method, "apply"), module)


def live_parameter(model: Any, path: str) -> torch.Tensor | None:
    """The tensor at a path that a model computes with; None if there is none."""
    holder, _, name = path.rpartition(".")
    module = model.get_submodule(holder)
    value = getattr(module, name, None)
    if name == "weight" and hasattr(module, "_cpu_unpacked_conv_weight"):
        return convolution_weight(module)
    if value is None or value.numel():
        return value
    layer, _, product = holder.rpartition(".")
    if product == "kv_b_proj":
        return expanding_weight(model.get_submodule(layer))
    return read_weight(product_method(model, path), module)
