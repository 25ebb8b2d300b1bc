"""The live parameters of a vLLM decoder, as canonical ones."""

from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.vllm.parallel import TensorParallel


def vllm_weights(model: Any, parallel: TensorParallel) -> Iterator[LiveParameter]:
    """Canonical parameters of a live vLLM model, unfused and un-sharded, in the checkpoint's
    layout."""
    config, vocab = model.config, model.config.vocab_size

    def whole(name: str, module: Any) -> LiveParameter:
        value = module.weight
        return LiveParameter(name, value, replicas=parallel.replicas(value))

    def vocabulary(name: str, module: Any) -> LiveParameter:
        value = parallel.gather(module.weight, 0)[:vocab]
        return LiveParameter(name, value, parallel.shards(0, module.weight.shape[0], vocab))

    yield vocabulary("embed", model.model.embed_tokens)
    for i, layer in enumerate(model.model.layers):
        name, attention, mlp = f"layers.{i}", layer.self_attn, layer.mlp
        copies = max(1, parallel.world // config.num_key_value_heads)
        yield whole(f"{name}.attn_norm", layer.input_layernorm)
        sizes = {"q_proj": attention.q_size, "k_proj": attention.kv_size}
        sizes["v_proj"] = attention.kv_size
        yield from _columns(name, sizes, attention.qkv_proj, parallel, copies)
        for op in ("q_norm", "k_norm"):
            if hasattr(attention, op):
                yield whole(f"{name}.{op}", getattr(attention, op))
        yield from _input_sharded(f"{name}.o_proj", attention.o_proj, parallel)
        yield whole(f"{name}.mlp_norm", layer.post_attention_layernorm)
        half = live_weight(mlp.gate_up_proj).shape[0] // 2
        both = {"gate_proj": half, "up_proj": half}
        yield from _columns(name, both, mlp.gate_up_proj, parallel)
        yield from _input_sharded(f"{name}.down_proj", mlp.down_proj, parallel)
    yield whole("final_norm", model.model.norm)
    yield vocabulary("lm_head", model.lm_head)


def _columns(
    layer: str, sizes: dict[str, int], module: Any, parallel: TensorParallel, copies: int = 1
) -> Iterator[LiveParameter]:
    """Fused operators, each sharded by its outputs. `copies`: how many ranks hold one and the
    same k and v, where there are more ranks than heads."""
    parameters = [("", live_weight(module))]
    if getattr(module, "bias", None) is not None:
        parameters.append((".bias", module.bias))
    for suffix, value in parameters:
        for (op, size), part in zip(sizes.items(), value.split(list(sizes.values())), strict=True):
            each = copies if op in ("k_proj", "v_proj") else 1
            whole = parallel.gather(part, 0, each)
            shards = parallel.shards(0, size, whole.shape[0], each)
            yield LiveParameter(f"{layer}.{op}{suffix}", whole, shards)


def _input_sharded(name: str, module: Any, parallel: TensorParallel) -> Iterator[LiveParameter]:
    """An operator sharded by its inputs, whose bias every rank holds."""
    part = live_weight(module)
    whole = parallel.gather(part, 1)
    yield LiveParameter(name, whole, parallel.shards(1, part.shape[1], whole.shape[1]))
    if getattr(module, "bias", None) is not None:
        yield LiveParameter(f"{name}.bias", module.bias)


def live_weight(module: Any) -> torch.Tensor:
    """The weight `[out, in]` that a linear layer computes with.

    On CPUs vLLM packs it into another layout and empties the parameter: the identity, pushed
    through the layer, gives it back bit for bit, but for the sign of zero.
    """
    if module.weight.numel():
        return module.weight
    dtype = module.params_dtype
    size = module.input_size_per_partition
    columns = [
        module.quant_method.apply(module, block, None)
        for block in torch.eye(size, dtype=dtype).split(1024)
    ]
    return torch.cat(columns).T
