"""The live parameters of a model with the kernels, by their names in a checkpoint of transformers.

With the kernels every rank holds rows of a parameter, never columns: see `RlkRowParallelLinear`.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlk_kernels.integrations.transformers_modules import HFLayerNorm


def held(model: Any) -> Iterator[tuple[str, Tensor, int]]:
    """(name, the rows that this rank holds, the number of the first) of every parameter, where
    vLLM fuses none: q, k, v and gate, up are apart."""
    for path, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            shard = module.shard_indices
            first, rows = shard.org_vocab_start_index, shard.num_org_elements
            yield f"{path}.weight", module.weight[:rows], first
        elif isinstance(module, QKVParallelLinear):
            yield from _shares(path, module, "qkv_proj", _of_attention(module))
        elif (names := _of_delta_net(path, module)) is not None:
            yield from _shares(path, module, path.rpartition(".")[2], names)
        elif isinstance(module, MergedColumnParallelLinear):
            rank, ranks = module.tp_rank, module.tp_size
            sizes = [size // ranks for size in module.output_sizes]
            names = zip(("gate_proj", "up_proj"), sizes, strict=True)
            parts = [(name, size, rank * size) for name, size in names]
            yield from _shares(path, module, "gate_up_proj", parts)
        elif isinstance(module, LinearBase):
            first = module.tp_rank if getattr(module, "rlk_shares_outputs", False) else 0
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", parameter, first * len(parameter)
        elif _is_norm(module):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", parameter, 0
        elif hasattr(module, "A_log"):  # a gated delta net, on one rank
            yield f"{path}.A_log", module.A_log, 0
            yield f"{path}.dt_bias", module.dt_bias, 0
            yield f"{path}.norm.weight", module.norm.weight, 0
        elif hasattr(module, "w13_weight"):
            yield from _experts(path.removesuffix(".routed_experts"), module)


def _is_norm(module: Any) -> bool:
    return isinstance(module, RMSNorm | GemmaRMSNorm | HFLayerNorm)


def _of_delta_net(path: str, module: Any) -> list[tuple[str, int, int]] | None:
    """(name, rows, the first of them) of a product of a gated delta net, which is on one rank; None
    for another module. Qwen3-Next stores the fused products, Qwen3.5 their parts."""
    product = path.rpartition(".")[2]
    if product not in ("in_proj_qkvz", "in_proj_ba"):
        return None
    sizes = module.output_sizes
    if len(sizes) == 1:
        return [(product, sizes[0], 0)]
    if product == "in_proj_ba":
        return [("in_proj_b", sizes[0], 0), ("in_proj_a", sizes[1], 0)]
    return [("in_proj_qkv", sum(sizes[:3]), 0), ("in_proj_z", sizes[3], 0)]


def _of_attention(module: Any) -> list[tuple[str, int, int]]:
    """(name, rows of this rank, the first of them)."""
    queries = module.num_heads * module.head_size
    group = module.tp_rank // module.num_kv_head_replicas
    keys = module.num_kv_heads * module.head_size
    values = module.num_kv_heads * getattr(module, "v_head_size", module.head_size)
    return [
        ("q_proj", queries, module.tp_rank * queries),
        ("k_proj", keys, group * keys),
        ("v_proj", values, group * values),
    ]


def _shares(
    path: str, module: Any, fused: str, parts: list[tuple[str, int, int]]
) -> Iterator[tuple[str, Tensor, int]]:
    holder = path.removesuffix(fused)
    sizes = [size for _, size, _ in parts]
    for kind, parameter in module.named_parameters(recurse=False):
        for (name, _, first), rows in zip(parts, parameter.split(sizes), strict=True):
            yield f"{holder}{name}.{kind}", rows, first


def _experts(path: str, module: Any) -> Iterator[tuple[str, Tensor, int]]:
    """w13[E, 2 I / R, H] and w2[E, H / R, I] of R ranks."""
    rank = module.quant_method.moe.tp_rank
    for e, (gate_up, down) in enumerate(zip(module.w13_weight, module.w2_weight, strict=True)):
        gate, up = gate_up.chunk(2)
        for name, rows in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            yield f"{path}.{e}.{name}.weight", rows, rank * len(rows)
