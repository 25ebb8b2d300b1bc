"""The known decoder families: what each layer computes, and what their configs say of it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.config_keys import PAGE
from rlk_align.model.family import Family
from rlk_align.model.layers import (
    beside_shared_expert,
    beside_state_space,
    corrected_mixture,
    dense,
    hybrid,
    latent,
    layer_normed,
    mixture,
    normed_after,
    normed_after_by_head,
    normed_after_rotation,
    one_part,
    parallel,
    partly_rotated,
    plain_sandwich,
    sandwich,
    scaled_residuals,
    state_space,
    ungated,
    values_normed,
    with_sinks,
)
from rlk_align.model.sparse_config import ExpertSettings
from rlk_align.model.stored import Stacks


def _no_rope_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """SmolLM3's layers without a rotation: those with 0 in `no_rope_layers` or, if config.json
    lacks it, every layer whose number is a multiple of `no_rope_layer_interval`, counted from 1."""
    step, layers = config.get("no_rope_layer_interval"), config.get("num_hidden_layers")
    if (rotated := config.get("no_rope_layers")) is None:
        if not (isinstance(step, int) and isinstance(layers, int) and step > 0):
            raise ModelError(f"config.json: no_rope_layer_interval is {step!r}")
        return tuple(range(step - 1, layers, step))
    if not isinstance(rotated, list) or len(rotated) != layers or set(rotated) - {0, 1}:
        raise ModelError(f"config.json: no_rope_layers is {rotated!r}: not 0 or 1 for each layer")
    return tuple(i for i, rotates in enumerate(rotated) if not rotates)


def _layers_without_window(config: Mapping[str, Any]) -> tuple[int, ...]:
    """In a model with windows, the layers that see all keys."""
    if config.get("sliding_window", 4096) is None:
        return ()
    layers = range(int(config["num_hidden_layers"]))
    return tuple(i for i in layers if layer_kind(config, i) == "full_attention")


def _unless_rope(config: Mapping[str, Any]) -> tuple[int, ...]:
    """All layers, unless `position_embedding_type` says that they rotate."""
    rotates = config.get("position_embedding_type") == "rope"
    return () if rotates else tuple(range(int(config["num_hidden_layers"])))


def _all_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """In a model that rotates nothing."""
    return tuple(range(int(config["num_hidden_layers"])))


_SCALED: dict[str, Any] = {
    "before": ("scaled_embed",),
    "after": ("final_norm", "divided_logits", "logprob"),
    "attention_scale": ("attention_multiplier", 1.0),
    "adds_outside_norms": True,
    "defaults": {
        **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0},
        **{"attention_multiplier": 1.0, "logits_scaling": 1.0},
    },
}
"""What Granite's multipliers add to a family."""
_GRANITE_EXPERTS = ExpertSettings("intermediate_size", norm_topk=True)
_GRANITE_ROUTER = "block_sparse_moe.router.layer"
_GRANITE_STACKS = Stacks(
    gate_up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
)
_NOT_MEASURED = "no test has compared it there"
_STATE_SPACE = {
    **{"delta_key_heads": "mamba_n_groups", "delta_heads": "mamba_n_heads"},
    **{"delta_key_width": "mamba_d_state", "delta_width": "mamba_d_head"},
    "conv_taps": "mamba_d_conv",
}
_NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""The `time_step_limit` that limits nothing, as published and as transformers saves it."""
_WITH_STATE_SPACES = dict.fromkeys(("megatron", "deepspeed", "sglang"), _NOT_MEASURED) | {
    "kernels": "they have no state-space scan"
}
_MULTIPLIES = "it multiplies neither the embedding nor branches nor logits"
_LATENT_HF = "its latent attention is compared in transformers, vLLM and Megatron alone"
_NORMED_AFTER = {
    "megatron": "it has no norms after attention and MLP, and norms each head of q alone"
}
_WITH_A_GATED_EXPERT = ExpertSettings(
    "moe_intermediate_size",
    shared="shared_expert_intermediate_size",
    known={"shared_expert_intermediate_size": None},
)
_GATED_EXPERT = {
    op: f"mlp.shared_expert.{op.removeprefix('shared_')}"
    for op in ("shared_gate_proj", "shared_up_proj", "shared_down_proj")
}
"""The modules of a shared expert with a gate."""
_GROUPED = ExpertSettings(
    "moe_intermediate_size",
    sigmoid=True,
    grouped=True,
    known={
        **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), None),
        **{"routed_scaling_factor": None, "scoring_func": ("sigmoid",)},
        "topk_method": ("noaux_tc",),
    },
)
"""The experts of DeepSeek-V3 and of GLM-4.5."""
_WITH_DELTA_NETS: dict[str, Any] = {
    "hybrid": True,
    "period": 4,
    "period_keys": ("full_attention_interval",),
    "one_plus_weight": True,
    "ignored": "mtp.",
    "defaults": {
        **{"partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256},
    },
    "biases": {"decay": True},
    "refused": {
        "megatron": "its gated delta net needs TransformerEngine and flash-linear-attention, whose "
        "kernels are for GPUs, and the norms of its local spec have no 1 + weight",
        "deepspeed": _NOT_MEASURED,
        "sglang": "on a CPU its gated delta nets are kernels of sgl_kernel, which has no build for "
        "CPUs on PyPI, and on a GPU no test has compared them",
    },
}
"""What gated delta nets add to a family."""
_WITH_LATENTS: dict[str, Any] = {
    "latent": True,
    "interleaved": True,
    "predictors": "num_nextn_predict_layers",
    "refused": dict.fromkeys(("sglang", "deepspeed"), _LATENT_HF),
    "vllm_on_one_rank": "its ranks share the heads of a latent",
}
"""What latent attention adds to a family."""
_OF_QWEN3_5 = (
    # The three positions of text are equal, whatever the sections.
    *("rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"),
    # Published configs state the number of layers that predict further tokens.
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
)
_NORMED: dict[str, tuple[Any, ...]] = {"use_qk_norm": (True,)}
"""Norms of q and k that no key of the config turns off."""
_ALWAYS = {"sliding_window": 4096, "use_sliding_window": True}
"""Windows that no key of the config turns off."""
_QWEN_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=_ALWAYS),
    "ministral3": Family(
        window={"sliding_window": None, "use_sliding_window": True},
        temperature=True,
        refused={"megatron": "its attention has one scale for all positions"},
    ),
    "seed_oss": Family(
        backend=True,
        biases={"o_proj": "attention_out_bias"},
        defaults={"attention_bias": True, "attention_out_bias": False},
        refused={"megatron": _NOT_MEASURED},
    ),
    "smollm3": Family(
        backend=True,
        layer=partly_rotated(),
        defaults={"no_rope_layer_interval": 4, "tie_word_embeddings": True},
        settings=("no_rope_layers",),
        unrotated=_no_rope_layers,
        refused={"megatron": _NOT_MEASURED},
    ),
    "olmo2": Family(
        backend=True, layer=normed_after, reads={"normed": "stream"}, refused=_NORMED_AFTER
    ),
    "olmo3": Family(
        backend=True,
        layer=normed_after,
        reads={"normed": "stream"},
        window=_ALWAYS,
        period=4,
        rope_by_kind=True,
        theta=5e5,
        local_theta=("rope_theta", 5e5),
        refused=_NORMED_AFTER,
    ),
    "qwen2": Family(
        biases={"q_proj": True, "k_proj": True, "v_proj": True, "o_proj": False},
        window=_QWEN_WINDOW,
    ),
    "qwen3": Family(layer=dense(qk_norm=True), window=_QWEN_WINDOW, values=_NORMED),
    "qwen3_moe": Family(
        values=_NORMED,
        layer=mixture(qk_norm=True),
        window={"sliding_window": 4096, "use_sliding_window": False},
        experts=ExpertSettings("moe_intermediate_size"),
    ),
    "qwen3_next": Family(
        layer=hybrid(mixture(qk_norm=True, shared="gated")),
        experts=_WITH_A_GATED_EXPERT,
        modules=_GATED_EXPERT,
        fused={
            "linear_attn.in_proj_qkvz": ("qkv_in", "z"),
            "linear_attn.in_proj_ba": ("b", "a"),
        },
        by_key_head=True,
        **_WITH_DELTA_NETS | {"defaults": _WITH_DELTA_NETS["defaults"] | {"norm_topk_prob": True}},
    ),
    "qwen2_moe": Family(
        layer=mixture(shared="gated"),
        biases={"q_proj": "qkv_bias", "k_proj": "qkv_bias", "v_proj": "qkv_bias", "o_proj": False},
        experts=_WITH_A_GATED_EXPERT,
        defaults={"qkv_bias": True},
        modules=_GATED_EXPERT,
        refused={"megatron": _NOT_MEASURED},
    ),
    "gemma2": Family(
        layer=plain_sandwich,
        window=_ALWAYS,
        period=2,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=("query_pre_attn_scalar", -0.5),
        # Published configs state the window under both names.
        settings=("sliding_window_size",),
        score_cap="attn_logit_softcapping",
        logit_cap="final_logit_softcapping",
        one_plus_weight=True,
        embedding_scale="sqrt_hidden",
        one_activation=True,
        defaults={
            **{"tie_word_embeddings": True, "query_pre_attn_scalar": 256},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        },
        modules={"mlp_norm": "pre_feedforward_layernorm"},
        refused={"megatron": "it has neither norms after attention and MLP nor caps"},
    ),
    "gemma3_text": Family(
        layer=sandwich,
        window=_ALWAYS,
        period=6,
        period_keys=("sliding_window_pattern", "_sliding_window_pattern"),
        rope_by_kind=True,
        theta=1e6,
        local_theta=("rope_local_base_freq", 1e4),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=("query_pre_attn_scalar", -0.5),
        one_plus_weight=True,
        embedding_scale="sqrt_hidden",
        heads_first=True,
        one_activation=True,
        # Published configs leave out what they have in common.
        defaults={
            **{"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6},
            **{"vocab_size": 262208, "max_position_embeddings": 131072, "head_dim": 256},
            **{"num_attention_heads": 8, "num_key_value_heads": 4},
        },
        modules={"mlp_norm": "pre_feedforward_layernorm"},
        refused={
            "megatron": "it has neither norms after attention and MLP nor two rotary embeddings"
        },
    ),
    "gemma4_text": Family(
        layer=values_normed,
        window=_ALWAYS,
        period=6,
        rope_by_kind=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        # The norms of q and k take the place of a scale: any number to the power of 0.
        attention_scale=("head_dim", 0.0),
        logit_cap="final_logit_softcapping",
        embedding_scale="sqrt_hidden",
        one_activation=True,
        adds_outside_norms=True,
        wide_heads=True,
        # It counts only with per-layer embeddings, or in layers that share keys.
        settings=("vocab_size_per_layer_input", "use_double_wide_mlp"),
        uncovered={"hidden_size_per_layer_input": 256},
        defaults={
            **{"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "vocab_size": 262144},
            **{"max_position_embeddings": 131072, "head_dim": 256, "global_head_dim": 512},
            **{"num_attention_heads": 8, "num_key_value_heads": 4},
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    **{"rope_type": "proportional", "rope_theta": 1e6},
                    "partial_rotary_factor": 0.25,
                },
            },
        },
        modules={"mlp_norm": "pre_feedforward_layernorm"},
        refused={
            "megatron": "it has neither norms of v nor heads of two sizes",
        },
    ),
    "granite": Family(layer=scaled_residuals(), refused={"megatron": _MULTIPLIES}, **_SCALED),
    "granitemoe": Family(
        layer=scaled_residuals(mixture()),
        experts=_GRANITE_EXPERTS,
        modules={"router": _GRANITE_ROUTER},
        stacks=_GRANITE_STACKS,
        refused={"megatron": _MULTIPLIES},
        **_SCALED,
    ),
    "granitemoehybrid": Family(
        layer=beside_shared_expert(scaled_residuals(state_space(partly_rotated(mixture())))),
        state_space=_STATE_SPACE,
        experts=replace(_GRANITE_EXPERTS, shared="shared_intermediate_size", optional=True),
        stacks=_GRANITE_STACKS,
        inner="shared_intermediate_size",
        unrotated=_unless_rope,
        biases={"conv": "mamba_conv_bias"},
        # The last is the order of sums.
        settings=("position_embedding_type", "mamba_expand", "mamba_proj_bias", "mamba_chunk_size"),
        values={
            **{"normalization_function": ("rmsnorm",), "mamba_proj_bias": (False,)},
            "time_step_limit": _NO_LIMIT,
        },
        modules={
            **{"conv": "mamba.conv1d", "out_proj": "mamba.out_proj"},
            **dict.fromkeys(("down_proj", "shared_down_proj"), "shared_mlp.output_linear"),
            "router": _GRANITE_ROUTER,
        },
        fused={
            "mamba.in_proj": ("z", "xbc_in", "dt_in"),
            # The one MLP of a dense model, and the shared expert of a sparse one.
            "shared_mlp.input_linear": (
                *("gate_proj", "up_proj", "shared_gate_proj", "shared_up_proj"),
            ),
        },
        vllm_on_one_rank="its ranks share the channels of a convolution",
        refused=_WITH_STATE_SPACES,
        **_SCALED
        | {
            "defaults": _SCALED["defaults"]
            | {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
            | {"mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2}
            | {"mamba_conv_bias": True, "shared_intermediate_size": 1024}
            | {"num_local_experts": 8}
        },
    ),
    "falcon_h1": Family(
        layer=beside_state_space,
        before=("scaled_embed",),
        after=("final_norm", "head_scaled_logits", "logprob"),
        state_space=_STATE_SPACE,
        beside_attention=True,
        normed_by_group=True,
        adds_outside_norms=True,
        biases={"conv": "mamba_conv_bias"},
        scales={
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("attention_in_multiplier",)),
            **dict.fromkeys(("z", "xbc_in", "dt_in"), ("ssm_in_multiplier",)),
            **{"conv": ("ssm_multipliers.1-3",), "dt": ("ssm_multipliers.4",)},
            "scan": ("", "ssm_multipliers.4"),
            **dict.fromkeys(("mamba_norm", "mamba_gate"), ("", "ssm_multipliers.0")),
            "k_rope": ("key_multiplier",),
            "two_branch_residual": ("", "attention_out_multiplier", "ssm_out_multiplier"),
            "act": ("mlp_multipliers.0", ""),
            "mlp_residual": ("", "mlp_multipliers.1"),
        },
        defaults={
            **{"mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto"},
            **{"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2},
            **{"mamba_conv_bias": True, "mamba_rms_norm": False, "num_key_value_heads": 8},
            **{"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0},
        },
        settings=("mamba_chunk_size", "num_logits_to_keep", "rope_parameters.rope_theta"),
        values={
            **dict.fromkeys(("mamba_proj_bias", "projectors_bias", "attention_bias"), (False,)),
            **{"mlp_bias": (False,), "mamba_norm_before_gate": (False,)},
            **{"time_step_limit": _NO_LIMIT, "mamba_use_mlp": (True,)},
        },
        uncovered={"mamba_norm_before_gate": True},
        modules={
            **{"mlp_norm": "pre_ff_layernorm", "final_norm": "model.final_layernorm"},
            **{op: f"feed_forward.{op}" for op in ("gate_proj", "up_proj", "down_proj")},
            **{"conv": "mamba.conv1d", "out_proj": "mamba.out_proj"},
        },
        fused={"mamba.in_proj": ("z", "xbc_in", "dt_in")},
        vllm_on_one_rank="its ranks share the channels of a convolution",
        refused=_WITH_STATE_SPACES,
    ),
    "nemotron_h": Family(
        layer=one_part,
        state_space={
            **{"delta_key_heads": "n_groups", "delta_heads": "mamba_num_heads"},
            **{"delta_key_width": "ssm_state_size", "delta_width": "mamba_head_dim"},
            "conv_taps": "conv_kernel",
        },
        normed_by_group=True,
        norm_eps="layer_norm_epsilon",
        activation=("mlp_hidden_act", "relu2"),
        unrotated=_all_layers,
        biases={"conv": "use_conv_bias"},
        defaults={
            **{"n_groups": 8, "mamba_num_heads": 128, "ssm_state_size": 128, "mamba_head_dim": 64},
            **{"conv_kernel": 4, "use_conv_bias": True, "layer_norm_epsilon": 1e-5},
            **{"head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 21504},
        },
        settings=(
            *("layers_block_type", "hybrid_override_pattern", "layer_types.mlp"),
            # No layer has experts or predicts further tokens, and no engine reads the others.
            *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "n_group"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "topk_group"),
            *("num_experts_per_tok", "norm_topk_prob", "mtp_layers_block_type"),
            *("mtp_hybrid_override_pattern", "num_logits_to_keep", "expand", "chunk_size"),
            *("rescale_prenorm_residual", "use_mamba_kernels", "time_step_min", "time_step_max"),
            *("time_step_floor", "time_step_rank", "norm_eps"),
        ),
        values={
            **dict.fromkeys(("use_bias", "mamba_proj_bias", "attention_bias"), (False,)),
            **{"residual_in_fp32": (False,), "mamba_hidden_act": ("silu",)},
            **{"mamba_ssm_cache_dtype": ("float32",), "time_step_limit": _NO_LIMIT},
        },
        ignored="mtp.",
        modules={
            **{"embed": "model.embeddings", "final_norm": "model.norm_f"},
            **{"attn_norm": "norm", "mlp_norm": "norm", "conv": "mixer.conv1d"},
            **{op: f"mixer.{op}" for op in ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")},
            **{op: f"mixer.{op}" for op in ("up_proj", "down_proj")},
            **{"mamba_norm": "mixer.norm", "dt": "mixer", "dt_a": "mixer", "scan": "mixer"},
        },
        fused={"mixer.in_proj": ("z", "xbc_in", "dt_in")},
        vllm_on_one_rank="its ranks share the channels of a convolution",
        refused=_WITH_STATE_SPACES,
    ),
    "glm4": Family(
        layer=plain_sandwich,
        biases={"o_proj": False},
        interleaved=True,
        defaults={"attention_bias": True, "partial_rotary_factor": 0.5},
        modules={
            "attn_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        fused={"mlp.gate_up_proj": ("gate_proj", "up_proj")},
        refused={"megatron": "it has no norms after attention and MLP"},
    ),
    "glm": Family(
        backend=True,
        biases={"o_proj": False},
        interleaved=True,
        defaults={"attention_bias": True, "partial_rotary_factor": 0.5},
        fused={"mlp.gate_up_proj": ("gate_proj", "up_proj")},
        vllm_on_one_rank="each rank computes all of its MLP's inner features",
        refused={"megatron": _NOT_MEASURED},
    ),
    "helium": Family(
        backend=True,
        interleaved=True,
        biases={"o_proj": False},
        refused={"megatron": _NOT_MEASURED, "kernels": _NOT_MEASURED},
    ),
    "arcee": Family(
        backend=True,
        layer=ungated,
        activation=("hidden_act", "relu2"),
        refused={"megatron": _NOT_MEASURED},
    ),
    "ernie4_5": Family(
        interleaved=True,
        theta=5e5,
        defaults={"tie_word_embeddings": True},
        refused={"megatron": _NOT_MEASURED},
    ),
    "phi3": Family(
        biases=dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), False),
        window={"sliding_window": None, "use_sliding_window": True},
        defaults={"partial_rotary_factor": 1.0},
        settings=("original_max_position_embeddings",),
        values={"full_attn_mod": (1,), "interpolate_factor": (1,)},
        fused={
            "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "mlp.gate_up_proj": ("gate_proj", "up_proj"),
        },
        refused={"megatron": _NOT_MEASURED},
    ),
    "exaone4": Family(
        layer=normed_after_by_head,
        reads={"normed": "stream"},
        biases=dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), False),
        window=_ALWAYS,
        period=4,
        # A pattern in letters stands beside `layer_types`, which count.
        period_keys=("sliding_window_pattern",),
        unrotated=_layers_without_window,
        heads_first=True,
        adds_outside_norms=True,
        refused={"megatron": "it has no norms after attention and MLP alone"},
    ),
    "starcoder2": Family(
        backend=True,
        layer=layer_normed(ungated),
        after=("final_layer_norm", "logits", "logprob"),
        biases={
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "use_bias"),
            **dict.fromkeys(("up_proj", "down_proj"), "use_bias"),
            **dict.fromkeys(("attn_layer_norm", "mlp_layer_norm", "final_layer_norm"), True),
        },
        window={"sliding_window": None, "use_sliding_window": True},
        activation=("hidden_act", "gelu_pytorch_tanh"),
        norm_eps="norm_epsilon",
        defaults={"use_bias": True, "tie_word_embeddings": True},
        # Published configs state what the code of transformers has one form of.
        settings=("embedding_dropout", "activation_function", "layer_norm_epsilon"),
        values={
            **{"norm_type": ("layer_norm",), "mlp_type": ("default",)},
            **{"scale_attention_softmax_in_fp32": (True,), "scale_attn_weights": (True,)},
        },
        modules={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
        refused={"megatron": _NOT_MEASURED},
    ),
    "stablelm": Family(
        layer=layer_normed(),
        after=("final_layer_norm", "logits", "logprob"),
        biases={
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "use_qkv_bias"),
            **dict.fromkeys(("attn_layer_norm", "mlp_layer_norm", "final_layer_norm"), True),
            "o_proj": False,
        },
        norm_eps="layer_norm_eps",
        adds_outside_norms=True,
        defaults={"partial_rotary_factor": 0.25, "use_qkv_bias": False},
        refused=dict.fromkeys(("megatron", "kernels"), _NOT_MEASURED),
    ),
    "cohere2": Family(
        layer=parallel,
        after=("final_layer_norm", "scaled_logits", "logprob"),
        window=_ALWAYS,
        period=4,
        period_keys=("sliding_window_pattern",),
        unrotated=_layers_without_window,
        interleaved=True,
        norm_eps="layer_norm_eps",
        adds_outside_norms=True,
        defaults={"tie_word_embeddings": True, "logit_scale": 0.0625},
        # Published configs state what both engines have one form of.
        settings=("layer_switch", "use_parallel_embedding", "use_embedding_sharing"),
        values={
            **{"order_of_interleaved_layers": ("local_attn_first",), "rotary_pct": (1,)},
            **{"position_embedding_type": ("rope_gptj",), "use_gated_activation": (True,)},
            "use_parallel_block": (True,),
        },
        refused={"megatron": "its layers add attention before the MLP reads the stream"},
    ),
    "hunyuan_v1_dense": Family(
        backend=True,
        layer=normed_after_rotation,
        heads_first=True,
        # Published configs state tokens, sizes of other models, and what the code has one form of.
        settings=(
            *("rope_parameters.alpha", "attention_head_dim", "org_vocab_size", "cla_share_factor"),
            *("pad_id", "im_start_id", "im_end_id", "im_newline_id", "mask_init_id"),
            *("text_start_id", "text_end_id", "dense_list", "pool_type"),
        ),
        values={**_NORMED, "norm_type": ("rms",), "use_rotary_pos_emb": (True,)},
        # The names of tensors follow from the first operator with that site.
        modules={"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        refused={"megatron": "it norms q and k before it rotates them"},
    ),
    "gemma": Family(
        # Both engines take the tanh form, also where an early config says hidden_act=gelu.
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        one_plus_weight=True,
        embedding_scale="sqrt_hidden",
        one_activation=True,
        defaults={"tie_word_embeddings": True},
        refused={"megatron": _NOT_MEASURED},
    ),
    "mixtral": Family(
        layer=mixture(),
        experts=ExpertSettings("intermediate_size", norm_topk=True),
        modules={
            "router": "block_sparse_moe.gate",
            "expert_gate_proj": "block_sparse_moe.experts.{}.w1",
            "expert_up_proj": "block_sparse_moe.experts.{}.w3",
            "expert_down_proj": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "olmoe": Family(
        layer=mixture(wide=True),
        experts=ExpertSettings("intermediate_size"),
        refused={"megatron": "it norms each head of q and of k alone"},
    ),
    "ernie4_5_moe": Family(
        layer=mixture(
            routing=("fp32_stored_router", "statics_corrected_experts", "routing_weights"),
            shared="added",
        ),
        interleaved=True,
        theta=5e5,
        experts=ExpertSettings(
            "moe_intermediate_size",
            norm_topk=True,
            corrected=True,
            names={
                "num_experts": "moe_num_experts",
                "num_experts_per_tok": "moe_k",
                "n_shared_experts": "moe_num_shared_experts",
                "first_k_dense_replace": "moe_layer_start_index",
                "last_sparse_layer": "moe_layer_end_index",
                "decoder_sparse_step": "moe_layer_interval",
            },
        ),
        biases=dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "use_bias")
        | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "use_bias"),
        # No tensor has this module's name in other families.
        modules={"corrected_experts": "mlp.moe_statics"},
        defaults={
            **{"tie_word_embeddings": True, "moe_k": 6, "moe_num_experts": 64},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1},
        },
        # The first is a guard against division by 0, and no engine reads the second.
        settings=("moe_norm_min", "moe_capacity"),
        values={"moe_gate": ("topk",), "moe_use_aux_free": (True,)},
        predictors="num_nextn_predict_layers",
        refused={"megatron": _NOT_MEASURED},
    ),
    "minimax_m2": Family(
        layer=mixture(wide=True, routing=("router", "corrected_experts", "fp32_routing_weights")),
        theta=5e6,
        experts=ExpertSettings(
            "intermediate_size",
            norm_topk=True,
            sigmoid=True,
            known={"scoring_func": ("sigmoid",)},
        ),
        modules={
            "router": "block_sparse_moe.gate",
            "corrected_experts": "block_sparse_moe",
            "expert_gate_proj": "block_sparse_moe.experts.{}.w1",
            "expert_up_proj": "block_sparse_moe.experts.{}.w3",
            "expert_down_proj": "block_sparse_moe.experts.{}.w2",
        },
        # A published config states the rotated part by `rotary_dim`.
        defaults={"partial_rotary_factor": 1.0},
        settings=("rotary_dim", "use_mtp", "mtp_transformer_layers"),
        values={**_NORMED, "qk_norm_type": ("per_layer",), "use_routing_bias": (True,)},
        predictors="num_mtp_modules",
        refused={
            "megatron": "it norms each head of q and of k alone",
        },
        needs_kernels={
            "vllm": "its router on a CPU asserts a softmax, and calls no module for the norms of q "
            "and k"
        },
        vllm_on_one_rank="its norms over all heads need all ranks",
        vllm_constants={"scoring_func": "sigmoid", "use_routing_bias": True},
        vllm_needs=("rotary_dim",),
    ),
    "gpt_oss": Family(
        layer=with_sinks,
        biases=dict.fromkeys(
            ("biased_router", "expert_gate_proj", "expert_up_proj", "expert_down_proj"), True
        ),
        window={"sliding_window": 128, "use_sliding_window": True},
        period=2,
        theta=1.5e5,
        # Both engines ignore hidden_act.
        activation=("", "swigluoai"),
        experts=ExpertSettings("intermediate_size", norm_topk=True, clamped=True),
        stacks=Stacks(transposed=True, interleaved=True),
        # The names of tensors follow from the first operator with that site.
        modules={"router": "mlp.router"},
        defaults={
            **{"attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4},
            **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"truncate": False, "original_max_position_embeddings": 4096},
            },
        },
        # Published configs state two settings under a second name.
        settings=("experts_per_token", "initial_context_length"),
        vllm_on_one_rank="its ranks share sinks and the biases of experts",
        vllm_constants={
            **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
            **{"attention_bias": True, "rope_type": "yarn"},
        },
        refused={"megatron": _NOT_MEASURED},
    ),
    "qwen3_5_text": Family(
        layer=hybrid(dense(qk_norm=True)),
        settings=_OF_QWEN3_5,
        **_WITH_DELTA_NETS,
    ),
    "qwen3_5_moe_text": Family(
        layer=hybrid(mixture(qk_norm=True, shared="gated")),
        experts=replace(_WITH_A_GATED_EXPERT, norm_topk=True),
        modules=_GATED_EXPERT,
        settings=_OF_QWEN3_5,
        # Every layer is sparse, and published configs state no size of another.
        **_WITH_DELTA_NETS | {"defaults": _WITH_DELTA_NETS["defaults"] | {"intermediate_size": 1}},
    ),
    "glm4_moe": Family(
        layer=corrected_mixture,
        biases={"o_proj": False},
        experts=_GROUPED,
        defaults={
            **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
            "routed_scaling_factor": 1.0,
        },
        qk_norm="use_qk_norm",
        predictors="num_nextn_predict_layers",
    ),
    "deepseek_v2": Family(
        layer=latent(
            mixture(routing=("fp32_router", "experts", "fp32_routing_weights"), shared="added")
        ),
        experts=ExpertSettings(
            "moe_intermediate_size",
            norm_topk=False,
            names={
                "n_shared_experts": "n_shared_experts",
                "first_k_dense_replace": "first_k_dense_replace",
            },
            known={"n_shared_experts": None},
        ),
        defaults={
            **{"n_shared_experts": 2, "first_k_dense_replace": 0, "rope_interleave": True},
            **{"topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False},
        },
        settings=("ep_size", "num_mtp_layers", "moe_router_dtype", "seq_aux", "aux_loss_alpha"),
        # transformers divides no weights by their sum.
        values={"moe_layer_freq": (1,), "norm_topk_prob": (False,)},
        vllm_needs=("n_group", "topk_group"),
        **_WITH_LATENTS | {"refused": _WITH_LATENTS["refused"] | {"megatron": _NOT_MEASURED}},
    ),
    "deepseek_v3": Family(
        layer=latent(corrected_mixture),
        experts=_GROUPED,
        defaults={
            **{"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
            **{"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "rope_interleave": True},
        },
        # Published configs state the frequency of sparse layers, which is 1, and sizes of training.
        # vLLM on a GPU reads `moe_router_dtype`.
        settings=("ep_size", "num_mtp_layers", "moe_router_dtype"),
        values={"moe_layer_freq": (1,)},
        vllm_needs=("topk_method", "scoring_func"),
        **_WITH_LATENTS,
    ),
    "glm4_moe_lite": Family(
        layer=latent(corrected_mixture),
        experts=replace(_GROUPED, layer_kinds="mlp_layer_types"),
        defaults={
            **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "rope_interleave": True},
        },
        vllm_needs=("first_k_dense_replace",),
        **_WITH_LATENTS,
    ),
}
"""The config's `model_type` -> the family. A new family is an entry here."""
WITHOUT_FAMILY = (
    "`compare --modules` compares any model, module by module; "
    f"known: {', '.join(sorted(FAMILIES))}; the log-probs of any model can be judged: `import` and "
    "`explain` a dump of the run, or `monitor` it; `weights` compares any two checkpoints; "
    f"{PAGE} shows how to describe a family"
)
"""The remedy for a model of another family."""


_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers by their earlier names -> by those that transformers 5 saves."""


def layer_kind(config: Mapping[str, Any], layer: int) -> str:
    """`full_attention`, `sliding_attention` for a layer with a window, or `linear_attention` for
    one with a gated delta net or a state-space model, by config.json or, if that has no
    `layer_types`, by the period of its family; empty if neither says it."""
    family, kinds = FAMILIES.get(str(config.get("model_type"))), config.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return _KINDS.get(str(kinds[layer]), str(kinds[layer]))
    if family is None or not family.period:
        return ""
    period = next(
        (p for k in family.period_keys if type(p := config.get(k)) is int and p), family.period
    )
    other = "linear_attention" if family.hybrid else "sliding_attention"
    return other if (layer + 1) % int(period) else "full_attention"
