"""Builds a GPTModel of megatron-core for a checkpoint, without filling its parameters.

Settings that the checkpoint does not determine have TransformerConfig's defaults: no fusions, and
softmax in float32 whatever the dtype.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from rlk_align.engines.common.kernels import Kernels
from rlk_align.engines.info import ReadOption
from rlk_align.engines.megatron.latent import latent_settings
from rlk_align.engines.megatron.layout import padded_vocab
from rlk_align.engines.megatron.limits import check_megatron
from rlk_align.engines.megatron.rope import rope_arguments, yarn_settings
from rlk_align.engines.megatron.stages import Stage
from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import transformers_config
from rlk_align.model.rotary import partial_rotary_factor
from rlk_align.model.shape import ModelShape
from rlk_align.model.tensors import biased_operators

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
"""The config's `hidden_act` -> the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of the engine spec that affect how the model is built."""

    tp: int
    cp: int
    ep: int
    stage: Stage
    device: torch.device
    dtype: torch.dtype
    spec: str = "local"
    sequence_parallel: bool = False
    packed: bool = False
    padding: str = "right"
    dispatcher: str = "allgather"
    """The kind of dispatcher that sends the tokens of a sparse layer to their experts."""

    @property
    def own_positions(self) -> bool:
        """Whether the position of a row may differ from its index in the input."""
        return self.packed or self.padding == "left" or self.cp > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The settings of the checkpoint's config beyond its shape."""

    norm_eps: float
    activation: str
    tied: bool
    biased: frozenset[str]
    """The operators of a layer that have a bias."""
    rope: dict[str, Any]
    rotary_percent: float
    """The part of a head that is rotated."""
    windows: tuple[int | None, ...]
    """For each layer, the number of keys that a query sees; None for all keys."""


def read_checkpoint(model: Path, shape: ModelShape, option: ReadOption) -> Checkpoint:
    """Raises the errors of `check_megatron`, and ModelError for a config that cannot be read."""
    try:
        config = transformers_config(model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"transformers cannot read {model}/config.json: {error}") from error
    settings = config.to_dict()
    check_megatron(option, settings, shape)
    return Checkpoint(
        norm_eps=float(config.rms_norm_eps),
        activation=str(config.hidden_act),
        tied=bool(config.tie_word_embeddings),
        biased=biased_operators(settings, shape),
        rope=dict(config.rope_parameters),
        rotary_percent=partial_rotary_factor(settings),
        windows=_windows(config, shape.layers),
    )


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def transformer_config(shape: ModelShape, checkpoint: Checkpoint, settings: Settings) -> Any:
    """The TransformerConfig, with dropout off."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    kind = MLATransformerConfig if shape.latent else TransformerConfig
    heads = {"num_query_groups": shape.kv_heads, "kv_channels": shape.head_dim}
    config = kind(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        **(latent_settings(shape, checkpoint.rope) if shape.latent else heads),
        ffn_hidden_size=shape.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=checkpoint.norm_eps,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[checkpoint.activation],
        add_bias_linear=not checkpoint.biased.isdisjoint({"o_proj", "down_proj"}),
        add_qkv_bias="q_proj" in checkpoint.biased,
        qk_layernorm=shape.has("q_norm"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tp,
        sequence_parallel=settings.sequence_parallel,
        context_parallel_size=settings.cp,
        pipeline_model_parallel_size=settings.stage.count,
        pipeline_dtype=settings.dtype,
        params_dtype=settings.dtype,
        bf16=settings.dtype == torch.bfloat16,
        fp16=settings.dtype == torch.float16,
        use_cpu_initialization=settings.device.type == "cpu",
        # The checkpoint fills every parameter.
        perform_initialization=False,
        **(expert_settings(shape, settings) if shape.sparse_layers else {}),
    )
    if not shape.latent:
        for name, value in yarn_settings(checkpoint.rope).items():
            setattr(config, name, value)
    return config


def expert_settings(shape: ModelShape, settings: Settings) -> dict[str, Any]:
    """The settings of TransformerConfig that a sparse model adds."""
    return {
        **(_corrected_settings(shape) if shape.family.sigmoid else {}),
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.expert_intermediate,
        "moe_layer_freq": [int(i in shape.sparse_layers) for i in range(shape.layers)],
        # The softmax over all experts, or over the chosen ones alone.
        "moe_router_pre_softmax": not (shape.norm_topk or shape.family.sigmoid),
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": settings.dispatcher,
        "expert_model_parallel_size": settings.ep,
    }


def _corrected_settings(shape: ModelShape) -> dict[str, Any]:
    """The settings for routers that correct a sigmoid's scores, and for shared experts."""
    grouped = shape.groups > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": shape.groups if grouped else None,
        "moe_router_group_topk": shape.top_groups if grouped else None,
        "moe_router_topk_scaling_factor": shape.weight_scale,
        "moe_shared_expert_intermediate_size": shape.shared_intermediate,
    }


def layer_spec(shape: ModelShape, checkpoint: Checkpoint, settings: Settings) -> Any:
    """The spec of this stage's layers, with megatron-core's own modules wherever they suffice."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from rlk_align.engines.megatron.attention import (
        LatentCore,
        SequenceParallelRMSNorm,
        SequencesAttention,
    )

    if settings.spec == "te":
        return _te_spec(shape, checkpoint)
    norm: Any = SequenceParallelRMSNorm if settings.sequence_parallel else WrappedTorchNorm

    def spec(experts: int | None) -> Any:
        """The spec of a sparse layer, or of a dense one."""
        layer = get_gpt_layer_local_spec(
            num_experts=experts,
            qk_layernorm=shape.has("q_norm") or bool(shape.latent),
            multi_latent_attention=bool(shape.latent),
            normalization="RMSNorm",
        )
        choose_biases(layer, checkpoint.biased)
        attention = layer.submodules.self_attention.submodules
        if shape.latent:
            attention.core_attention = LatentCore
            return layer
        if settings.sequence_parallel:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
            if shape.has("q_norm"):
                attention.q_layernorm = attention.k_layernorm = norm
        if settings.packed or any(checkpoint.windows) or settings.cp > 1:
            core = functools.partial(SequencesAttention, windows=checkpoint.windows)
            attention.core_attention = core
        return layer

    kinds = {False: spec(None), True: spec(shape.experts) if shape.sparse_layers else None}
    first, share = settings.stage.first, settings.stage.share
    layers = [kinds[i in shape.sparse_layers] for i in range(first, first + share)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def choose_biases(layer: Any, biased: frozenset[str]) -> None:
    """Removes the bias of those linears of a layer's spec that are not in `biased`.

    TransformerConfig has one setting for all linears and one for q, k and v, so it may add a bias
    that the checkpoint lacks. A bias of zeros would be an additional parameter, which is trained.
    """
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    for owner, name, op in (
        (attention, "linear_qkv", "q_proj"),
        (attention, "linear_proj", "o_proj"),
        (mlp, "linear_fc1", "gate_proj"),
        (mlp, "linear_fc2", "down_proj"),
    ):
        # The experts of a sparse layer have no bias.
        if op not in biased and hasattr(owner, name):
            setattr(owner, name, _without_bias(getattr(owner, name)))


def _without_bias(linear: Any) -> Any:
    """A subclass without bias, because megatron-core's specs accept only classes here."""

    class WithoutBias(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"bias": False})

    return WithoutBias


def _te_spec(shape: ModelShape, checkpoint: Checkpoint) -> Any:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.has("q_norm"))
    choose_biases(spec, checkpoint.biased)
    return TransformerBlockSubmodules(layer_specs=[spec] * shape.layers, layer_norm=TENorm)


def build(
    shape: ModelShape, checkpoint: Checkpoint, settings: Settings, kernels: Kernels | None = None
) -> Any:
    """A GPTModel, or this stage of it, on the device, in eval mode, with unfilled parameters.

    megatron-core's parallel state must be initialised.
    """
    from megatron.core.models.gpt import GPTModel

    from rlk_align.engines.megatron.attention import PositionedGPTModel

    kind = PositionedGPTModel if settings.own_positions else GPTModel
    layers = layer_spec(shape, checkpoint, settings)
    if kernels is not None:
        layers = kernels.in_spec(layers, checkpoint.windows)
    model = kind(
        config=transformer_config(shape, checkpoint, settings),
        transformer_layer_spec=layers,
        vocab_size=padded_vocab(shape.vocab, settings.tp),
        max_sequence_length=shape.context,
        **rope_arguments(checkpoint.rope, latent=bool(shape.latent)),
        rotary_percent=checkpoint.rotary_percent,
        share_embeddings_and_output_weights=checkpoint.tied,
        pre_process=settings.stage.number == 0,
        post_process=settings.stage.is_last,
    )
    if checkpoint.rope["rope_type"] == "llama3":
        model.rotary_pos_emb = llama3_rotary(shape, checkpoint.rope, settings)
    if kernels is not None:
        kernels.in_model(model, checkpoint.rope)
    # Megatron creates torch norms in float32 on the CPU; trainers cast and move the whole model.
    return model.to(device=settings.device, dtype=settings.dtype).eval()


def llama3_rotary(shape: ModelShape, rope: dict[str, Any], settings: Settings) -> Any:
    """megatron-core's rotary embedding with the checkpoint's numbers; GPTModel's own setting uses
    those of Llama 3.1, except for the factor."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = RotaryEmbedding(
        kv_channels=shape.head_dim,
        rotary_percent=1.0,
        rotary_base=rope["rope_theta"],
        use_cpu_initialization=settings.device.type == "cpu",
    )
    rotary.inv_freq = rotary._apply_scaling(
        rotary.inv_freq,
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )
    return rotary
