"""A layer spec with the kernels, the replacement of modules that GPTModel builds itself, and the
module of each operator."""

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.megatron import attention, latent, layers, limits
from rlk_kernels.integrations.megatron.sparse import SharedMLP, SparseMLP
from rlk_kernels.integrations.operators import (
    ROUTED,
    Counted,
    Watch,
    check_latent,
    check_sparse,
    excluded_operators,
    excludes,
)
from rlk_kernels.integrations.rotary import rotation


def layer_spec(
    config: Any, excluded: Iterable[str], vp_stage: int | None
) -> TransformerBlockSubmodules:
    """See the package."""
    limits.check_config(config)
    # Without a pipeline, megatron-core's parallel state need not be initialized yet.
    rank = 0 if config.pipeline_model_parallel_size == 1 else None
    count = get_num_layers_to_build(config, vp_stage, rank)
    first = get_transformer_layer_offset(config, vp_stage, rank) if count else 0
    kinds = _sparse_layers(config)[first : first + count]
    specs = {
        sparse: get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if sparse else None,
            # A latent attention has norms of its latents, whatever the setting for heads is.
            qk_layernorm=config.qk_layernorm or config.multi_latent_attention,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
        for sparse in set(kinds)
    }
    layer_specs = [specs[sparse] for sparse in kinds]
    block = TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=WrappedTorchNorm)
    return with_kernels(block, excluded, ())


def _sparse_layers(config: Any) -> list[bool]:
    """For each layer of a model, whether it sends each token to a few experts."""
    layers, every = config.num_layers, config.moe_layer_freq
    if not config.num_moe_experts:
        return [False] * layers
    return (
        [i % every == 0 for i in range(layers)] if isinstance(every, int) else [*map(bool, every)]
    )


def with_kernels(
    block: TransformerBlockSubmodules, excluded: Iterable[str], windows: tuple[int | None, ...]
) -> TransformerBlockSubmodules:
    """See the package."""
    excluded = excluded_operators(excluded)
    # A block may contain one spec several times; each spec is changed once.
    changed = {id(spec): _layer(spec, excluded, windows) for spec in block.layer_specs or []}
    return TransformerBlockSubmodules(
        layer_specs=[changed[id(spec)] for spec in block.layer_specs or []],
        layer_norm=block.layer_norm if "final_norm" in excluded else layers.MegatronNorm,
    )


def _layer(
    spec: ModuleSpec, excluded: frozenset[str], windows: tuple[int | None, ...]
) -> ModuleSpec:
    spec = copy.deepcopy(spec)
    parts = spec.submodules
    sparse = parts.mlp.module is MoELayer
    _check_modules(spec, sparse)
    attn, mlp = parts.self_attention.submodules, parts.mlp.submodules
    of_latents = parts.self_attention.module is MLASelfAttention
    if not excludes(excluded, "attn_norm"):
        parts.input_layernorm = layers.MegatronNorm
    if not excludes(excluded, "mlp_norm"):
        parts.pre_mlp_layernorm = layers.MegatronNorm
    if of_latents:
        _absorb(parts.self_attention, excluded)
    else:
        _attend(parts.self_attention, excluded, windows)
    if not excludes(excluded, "o_proj"):
        attn.linear_proj = _linear(attn.linear_proj, layers.Row)
    if sparse:
        check_sparse(excluded)
        parts.mlp.module = SparseMLP
        shared = mlp.shared_experts
        shared.module = SharedMLP
        shared.submodules.linear_fc1 = _linear(shared.submodules.linear_fc1, layers.Column)
        shared.submodules.linear_fc2 = _linear(shared.submodules.linear_fc2, layers.Row)
    elif not excludes(excluded, "gate_proj", "up_proj"):
        mlp.linear_fc1 = _linear(mlp.linear_fc1, layers.Column)
    if not sparse and not excludes(excluded, "down_proj"):
        mlp.linear_fc2 = _linear(mlp.linear_fc2, layers.Row)
    if not sparse and not excludes(excluded, "act"):
        parts.mlp.module = layers.GatedMLP
    return spec


def _attend(spec: ModuleSpec, excluded: frozenset[str], windows: tuple[int | None, ...]) -> None:
    """Changes the spec of an attention before its last product."""
    attn = spec.submodules
    for op, norm in (("q", layers.MegatronQueryNorm), ("k", layers.MegatronKeyNorm)):
        name = f"{op}_layernorm"
        if not excludes(excluded, f"{op}_norm") and getattr(attn, name) is not IdentityOp:
            setattr(attn, name, norm)
    if not excludes(excluded, "q_proj", "k_proj", "v_proj"):
        attn.linear_qkv = _linear(attn.linear_qkv, layers.Column)
    if not excludes(excluded, "attn"):
        attn.core_attention = functools.partial(attention.CoreAttention, windows=windows)
    if not excludes(excluded, "q_rope", "k_rope"):
        spec.module = layers.RotatingAttention


def _absorb(spec: ModuleSpec, excluded: frozenset[str]) -> None:
    """Changes the spec of a latent attention before its last product. `use_kernels` changes the
    products of latents."""
    check_latent(excluded)
    attn = spec.submodules
    for name, op in (("q_layernorm", "q_a_norm"), ("kv_layernorm", "kv_a_norm")):
        if op not in excluded and getattr(attn, name) is not IdentityOp:
            setattr(attn, name, layers.MegatronNorm)
    for name, op in (("linear_q_proj", "q_proj"), ("linear_q_up_proj", "q_b")):
        if op not in excluded:
            setattr(attn, name, _linear(getattr(attn, name), layers.Column))
    attn.core_attention = latent.LatentCore
    spec.module = latent.LatentAttention


def _check_modules(spec: ModuleSpec, sparse: bool) -> None:
    """Raises NotSupported for the spec of a layer that is not a decoder layer, dense or sparse."""
    parts = spec.submodules
    latents = parts.self_attention.module is MLASelfAttention
    modules = {
        "layer": (spec.module, TransformerLayer),
        "self_attention": (
            parts.self_attention.module,
            MLASelfAttention if latents else SelfAttention,
        ),
        "mlp": (parts.mlp.module, MoELayer if sparse else MLP),
    }
    if sparse:
        modules["experts"] = (parts.mlp.submodules.experts.module, SequentialMLP)
        modules["router"] = (parts.mlp.submodules.router, TopKRouter)
        modules["shared_experts"] = (parts.mlp.submodules.shared_experts.module, SharedExpertMLP)
    for name, (actual, supported) in modules.items():
        if actual is not supported:
            raise NotSupported(
                f"the spec's {name} is a {actual.__name__}; only a {supported.__name__} is "
                "supported"
            )


def _linear(stock: type, ours: type) -> type:
    """`ours` instead of `stock`, which may be a subclass of ours's base with another constructor,
    for example one without a bias."""
    base = ours.__mro__[2]
    if stock is base:
        return ours
    if not issubclass(stock, base):
        raise NotSupported(f"the spec's {stock.__name__} is not a {base.__name__} of megatron-core")
    return type(f"Rlk{stock.__name__}", (ours, stock), {})


def use_kernels(model: Any, rope_parameters: Mapping[str, Any], excluded: Iterable[str]) -> Any:
    """See the package."""
    excluded = excluded_operators(excluded)
    if not isinstance(model, GPTModel):
        raise NotSupported(
            f"a {type(model).__name__} is not supported; pass a GPTModel before it is wrapped"
        )
    limits.check_config(model.config)
    rotates = not excludes(excluded, "q_rope", "k_rope")
    if rotates:
        limits.check_rope(model, rope_parameters)
        _check_rotating(model)
    if model.config.multi_latent_attention:
        for layer in model.decoder.layers:
            layer.self_attention.absorb(excluded)
    _check_layers(model, excluded)
    if "embed" not in excluded and model.pre_process:
        model.embedding.word_embeddings.__class__ = layers.MegatronEmbedding
    if "logits" not in excluded and model.post_process:
        model.output_layer.__class__ = layers.OutputLayer
        if "logprob" not in excluded:
            model.compute_language_model_loss = functools.partial(
                layers.language_model_loss, group=model.output_layer.tp_group
            )
    if rotates:
        for layer in model.decoder.layers:
            attn = layer.self_attention
            rotary = _rotary(model, attn)
            if not isinstance(rotary, Counted):
                _become_positions(rotary, rope_parameters)
            attn.rlk_rotary = (rotary,)
    model.register_forward_pre_hook(Watch(model, operators))
    model.register_forward_pre_hook(lambda live, _inputs: limits.check_unchanged(live.config))
    return model


def _rotary(model: Any, attn: Any) -> Any:
    """The rotary embedding of an attention: a latent one has its own."""
    return attn.rotary_pos_emb if isinstance(attn, MLASelfAttention) else model.rotary_pos_emb


def _become_positions(rotary: Any, rope_parameters: Mapping[str, Any]) -> None:
    """Makes a rotary embedding return positions, with the frequencies of the checkpoint."""
    inv_freq, scaling = rotation(rope_parameters, 2 * rotary.inv_freq.numel())
    # The live module has them, so that later changes to them take effect.
    device = rotary.inv_freq.device
    rotary.inv_freq = inv_freq.to(device)
    rotary.rlk_scaling = None if scaling is None else scaling.to(device)
    yarn = isinstance(rotary, YarnRotaryEmbedding)
    rotary.__class__ = layers.ScaledPositions if yarn else layers.Positions


def _check_rotating(model: Any) -> None:
    """Raises NotSupported if a layer would take positions for angles."""
    for layer in model.decoder.layers:
        attn = layer.self_attention
        if not isinstance(attn, (layers.RotatingAttention, latent.LatentAttention)):
            raise NotSupported(
                f"layer {layer.layer_number} rotates in its own {type(attn).__name__}: make the "
                "GPTModel with layer_spec(config), and exclude the same operators in both calls"
            )


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_rope", "k_rope"))
"""Groups of operators, each of which one module computes."""
WIRED = ("embed", "q_rope", "k_rope", "logits")
"""The operators whose modules GPTModel builds itself."""


def _check_layers(model: Any, excluded: frozenset[str]) -> None:
    """Raises NotSupported if the layers' spec excluded other operators than this call does."""
    excluded = excluded.union(*(group for group in FUSED if excludes(excluded, *group)))
    for name, o in operators(model).items():
        op = name.rpartition(".")[2]
        if op not in WIRED and isinstance(o, Counted) == (op in excluded):
            raise NotSupported(
                f"{name} is a {type(o).__module__}.{type(o).__qualname__}: make the GPTModel with "
                "layer_spec(config), exclude the same operators in both calls, and merge adapters"
            )


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it, for the model's pipeline stage."""
    named = {"embed": model.embedding.word_embeddings} if model.pre_process else {}
    for layer in model.decoder.layers:
        i = layer.layer_number - 1
        attn = layer.self_attention
        rotary = _rotary(model, attn)
        here = {
            **{"attn_norm": layer.input_layernorm, "mlp_norm": layer.pre_mlp_layernorm},
            **(_of_latents if isinstance(attn, MLASelfAttention) else _of_heads)(attn),
            **{"q_rope": rotary, "k_rope": rotary, "o_proj": attn.linear_proj},
            **_of_mlp(layer.mlp),
        }
        named |= {f"layers.{i}.{op}": module for op, module in here.items() if module is not None}
    if model.post_process:
        named |= {"final_norm": model.decoder.final_layernorm, "logits": model.output_layer}
    return named


def _of_heads(attn: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), attn.linear_qkv),
        **{"q_norm": _norm(attn.q_layernorm), "k_norm": _norm(attn.k_layernorm)},
        "attn": attn.core_attention,
    }


def _of_latents(attn: Any) -> dict[str, Any]:
    whole = attn.config.q_lora_rank is None
    queries = {"q_proj": attn.linear_q_proj} if whole else {
        **{"q_a": attn.linear_q_down_proj, "q_b": attn.linear_q_up_proj},
        "q_a_norm": _norm(attn.q_layernorm),
    }  # fmt: skip
    latents = {"kv_a": attn.linear_kv_down_proj, "kv_a_norm": _norm(attn.kv_layernorm)}
    return queries | latents | {"latent_attn": attn.core_attention}


def _of_mlp(mlp: Any) -> dict[str, Any]:
    if isinstance(mlp, MoELayer):
        shared = {} if mlp.shared_experts is None else _of_mlp(mlp.shared_experts)
        return dict.fromkeys(ROUTED, mlp) | {
            f"shared_{op}": module for op, module in shared.items()
        }
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    return {"gate_proj": fc1, "up_proj": fc1, "act": mlp, "down_proj": fc2}


def _norm(module: Any) -> Any:
    """The module; None if the model has no such norm."""
    return module if isinstance(getattr(module, "weight", None), torch.Tensor) else None
