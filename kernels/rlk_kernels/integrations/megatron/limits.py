"""The settings of a TransformerConfig or a GPTModel that the kernels do not support. This file
lists every option of megatron-core; an option that is set and not listed is refused."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from rlk_kernels.integrations.errors import NotSupported

SUPPORTED_VALUES = {
    "normalization": ("RMSNorm",),
    "gated_linear_unit": (True,),
    "activation_func": (torch.nn.functional.silu,),
    "softmax_type": ("vanilla",),
    "attention_dropout": (0.0,),
    "hidden_dropout": (0.0,),
    "glu_linear_offset": (0.0,),
    "transformer_impl": ("local", "transformer_engine"),
    **dict.fromkeys(
        (
            *("fp32_residual_connection", "apply_residual_connection_post_layernorm"),
            *("layernorm_zero_centered_gamma", "rotary_interleaved", "qk_l2_norm", "qk_clip"),
            *("log_max_attention_logit", "attention_output_gate"),
            *("apply_query_key_layer_scaling", "activation_func_fp8_input_store", "fp8", "fp4"),
            *("activation_func_clamp_value", "mtp_num_layers", "no_rope_freq"),
            *("experimental_attention_variant", "linear_attention_freq", "mrope_section"),
            *("is_hybrid_model", "heterogeneous_block_specs", "quant_recipe", "use_kitchen"),
            *("use_kitchen_attention", "fused_single_qkv_rope", "use_te_activation_func"),
            *("enable_autocast", "delay_wgrad_compute", "defer_embedding_wgrad_compute"),
            *("use_inference_optimized_layers", "inference_fuse_tp_communication"),
            "hybrid_context_parallel",
        ),
        (False, None, 0),
    ),
}
"""Option -> its supported values."""

SUPPORTED_IF_SPARSE = {
    "moe_router_score_function": ("softmax", "sigmoid"),
    "expert_tensor_parallel_size": (1,),
    "tensor_model_parallel_size": (1,),
    "add_bias_linear": (False,),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    **dict.fromkeys(
        (
            *("moe_shared_expert_gate", "moe_shared_expert_overlap", "moe_expert_capacity_factor"),
            "moe_router_force_load_balancing",
            *("moe_apply_probs_on_input", "moe_input_jitter_eps", "moe_latent_size"),
            *("moe_grouped_gemm", "moe_enable_routing_replay"),
        ),
        (False, None),
    ),
}
"""Option -> its supported values in a model with sparse layers."""

SUPPORTED_WITH_LATENTS = {
    **{"context_parallel_size": (1,), "sequence_parallel": (False,), "softmax_scale": (None,)},
    **{"add_bias_linear": (False,), "window_size": (None,), "rotary_percent": (1.0,)},
    "cache_mla_latents": (False,),
}
"""Option -> its supported values in a model with latent attention."""

ANY_VALUE = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("ffn_hidden_size", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    *("num_moe_experts", "softmax_scale", "window_size", "window_attn_skip_freq"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim"),
    *("qk_pos_emb_head_dim", "rope_type", "rotary_base", "rotary_percent", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "rotary_scaling_factor"),
    "original_max_position_embeddings",
    *("fp16", "bf16", "params_dtype"),
)
"""Options of which every value is supported."""

WITHOUT_EFFECT = (
    *("tensor_model_parallel_size", "sequence_parallel"),
    *("hierarchical_context_parallel_sizes", "max_seqlen_per_dp_cp_rank"),
    *("perform_initialization", "use_cpu_initialization", "timers", "finalize_model_grads_func"),
    *("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "cp_comm_type"),
    *("deterministic_mode", "autocast_dtype", "gradient_accumulation_fusion", "attention_backend"),
    *("num_microbatches_with_partial_activation_checkpoints", "barrier_with_L1_time"),
    *("async_tensor_model_parallel_allreduce", "use_te_rng_tracker", "cross_entropy_loss_fusion"),
    *("cross_entropy_fusion_impl", "overlap_moe_expert_parallel_comm", "variable_seq_lengths"),
    *("ep_overlap_early_attn_memory_release", "use_ring_exchange_p2p", "wgrad_deferral_limit"),
    *("deallocate_pipeline_outputs", "microbatch_group_size_per_vp_stage", "mtp_standalone"),
    *("mtp_loss_scaling_factor", "account_for_embedding_in_pipeline_split", "init_method"),
    *("account_for_loss_in_pipeline_split", "calculate_per_token_loss", "init_method_std"),
    *("qk_clip_alpha", "qk_clip_threshold", "output_layer_init_method", "embedding_init_method"),
    *("embedding_init_method_std", "init_model_with_meta_device", "attention_softmax_in_fp32"),
    *("disable_bf16_reduced_precision_matmul", "bias_activation_fusion", "masked_softmax_fusion"),
    *("persist_layer_norm", "memory_efficient_layer_norm", "bias_dropout_fusion"),
    *("apply_rope_fusion", "use_fused_weighted_squared_relu", "distribute_saved_activations"),
    *("tp_only_amax_red", "first_last_layers_bf16", "kitchen_attention_backend"),
    *("enable_cuda_graph", "external_cuda_graph", "clone_scatter_output_in_embedding"),
    *("disable_parameter_transpose_cache", "config_logger_dir", "flash_decode"),
    *("batch_invariant_mode", "inference_rng_tracker", "inference_sampling_seed"),
    *("symmetric_ar_type", "use_mamba_mem_eff_path", "mlp_chunks_for_prefill"),
    *("hetereogenous_dist_checkpoint", "fine_grained_activation_offloading", "offload_modules"),
    *("min_offloaded_tensor_size", "virtual_pipeline_model_parallel_size", "test_mode"),
    *("context_parallel_size", "_cpu_offloading_context"),
)
"""Options that change no value of the kernels, or none unless an option of `SUPPORTED_VALUES` is
set."""

WITHOUT_EFFECT_PREFIXES = (
    *("moe_", "fp8_", "fp4_", "mamba_", "dsa_", "linear_", "cuda_graph_", "tp_comm_", "expert_"),
    *("cpu_offloading", "num_layers_", "recompute_", "pipeline_", "batch_p2p_", "overlap_p2p_"),
)
"""Prefixes of other such options."""


def is_listed(option: str) -> bool:
    """Whether this file lists an option."""
    listed = *SUPPORTED_VALUES, *SUPPORTED_WITH_LATENTS, *ANY_VALUE, *WITHOUT_EFFECT
    return option in listed or option.startswith(WITHOUT_EFFECT_PREFIXES)


def check_config(config: Any) -> None:
    """Raises NotSupported with the names of a TransformerConfig's unsupported options."""
    unknown = [
        f"{option.name}={_shown(getattr(config, option.name))}, which is unknown"
        for option in _options(config)
        if not is_listed(option.name) and getattr(config, option.name) != _default(option)
    ]
    _refuse(_unsupported(config) + _indivisible(config) + unknown)


def check_unchanged(config: Any) -> None:
    """Raises NotSupported if the config of a live model has been changed to unsupported options."""
    _refuse(_unsupported(config))


def _unsupported(config: Any) -> list[str]:
    only = SUPPORTED_VALUES | (SUPPORTED_IF_SPARSE if config.num_moe_experts else {})
    only |= SUPPORTED_WITH_LATENTS if config.multi_latent_attention else {}
    wrong = [
        f"{name}={_shown(value)}"
        for name, supported in only.items()
        if (value := getattr(config, name, None)) is not None and value not in supported
    ]
    wrong += _latents(config) if config.multi_latent_attention else []
    return wrong + (_routing(config) if config.num_moe_experts else [])


def _latents(config: Any) -> list[str]:
    """The unsupported combinations of the options of a latent attention."""
    ranks, queries = config.tensor_model_parallel_size, config.q_lora_rank
    both = config.kv_lora_rank + config.qk_pos_emb_head_dim
    shared = f"with tensor_model_parallel_size={ranks}"
    wrong = {
        # Megatron-core adds up the gradients of norms of this name, which are whole on each rank.
        f"qk_layernorm with multi_latent_attention {shared}": config.qk_layernorm and ranks > 1,
        f"q_lora_rank={queries} {shared}": (queries or 0) % ranks,
        f"kv_lora_rank + qk_pos_emb_head_dim={both} {shared}": both % ranks,
    }
    return [setting for setting, refused in wrong.items() if refused]


def _routing(config: Any) -> list[str]:
    """The unsupported combinations of a router's options."""
    corrected, k = config.moe_router_enable_expert_bias, config.moe_router_topk
    some, groups = config.moe_router_group_topk, config.moe_router_num_groups
    scale = config.moe_router_topk_scaling_factor
    sigmoid = config.moe_router_score_function == "sigmoid"
    wrong = {
        "moe_router_score_function=sigmoid without moe_router_enable_expert_bias": sigmoid
        and not corrected,
        # Megatron-core divides the scores of several experts by their sum, but not a single one.
        "moe_router_score_function=sigmoid with moe_router_topk=1": sigmoid and k == 1,
        f"moe_router_num_groups={groups} of a softmax": bool(groups) and not sigmoid,
        f"moe_router_topk_scaling_factor={scale} of a softmax": bool(scale) and not sigmoid,
        # A group's score is the sum of its best moe_router_topk / moe_router_group_topk scores.
        f"moe_router_group_topk={some} with moe_router_topk={k}": bool(some)
        and some != groups
        and k // some != 2,
    }
    return [setting for setting, refused in wrong.items() if refused]


def _indivisible(config: Any) -> list[str]:
    """A hidden size that the tensor-parallel ranks do not divide, because each rank computes some
    columns of o_proj and down_proj; and a rank's heads that context-parallel ranks do not
    divide."""
    hidden, ranks = config.hidden_size, config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads, config.num_query_groups
    context, own = config.context_parallel_size, max(1, groups // ranks)
    tensor = f"tensor_model_parallel_size={ranks}"
    wrong = {
        f"hidden_size={hidden} with {tensor}": hidden % ranks,
        f"num_attention_heads={heads} with {tensor} and context_parallel_size={context}": heads
        // ranks
        % context,
        f"num_query_groups={groups} with {tensor} and context_parallel_size={context}": own
        % context
        and context % own,
    }
    return [setting for setting, refused in wrong.items() if refused]


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise NotSupported(
            f"the TransformerConfig asks for what is not supported: {'; '.join(wrong)}"
        )


def _options(config: Any) -> list[dataclasses.Field]:
    """The options of megatron-core's own class; only a subclass's own code reads the options that
    it adds."""
    core_classes = [c for c in type(config).__mro__ if c.__module__.startswith("megatron.core")]
    return [
        f for c in core_classes[:1] if dataclasses.is_dataclass(c) for f in dataclasses.fields(c)
    ]


def _default(option: dataclasses.Field) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return option.default


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


def check_rope(model: Any, rope: Mapping[str, Any]) -> None:
    """Raises NotSupported for a GPTModel whose rotary embedding has no kernel, or does not agree
    with `rope_parameters`."""
    if model.config.multi_latent_attention:
        _check_rope_of_latents(model.config, rope)
        return
    kind, position = rope.get("rope_type", "default"), model.position_embedding_type
    rotary = getattr(model, "rotary_pos_emb", None)
    stretched = getattr(rotary, "seq_len_interpolation_factor", None)
    wrong = {
        f"position_embedding_type={position}": position not in ("rope", "yarn"),
        f"rotary_percent={model.rotary_percent}": model.rotary_percent
        != (rope.get("partial_rotary_factor") or 1.0),
        f"rotary_base={model.rotary_base}": model.rotary_base != rope.get("rope_theta"),
        "rope_scaling": getattr(model, "rotary_scaling", False) and kind != "llama3",
        f"seq_len_interpolation_factor={stretched}": stretched is not None
        and (kind != "linear" or stretched != rope.get("factor")),
        "position_embedding_type=yarn": position == "yarn" and kind != "yarn",
    }
    _refuse_rope(wrong, rope)


def _check_rope_of_latents(config: Any, rope: Mapping[str, Any]) -> None:
    """The same for latent attention, whose rotary embedding follows from the config."""
    kind = rope.get("rope_type", "default")
    of_config = {
        "rotary_base": config.rotary_base,
        "rotary_scaling_factor": config.rotary_scaling_factor,
        "original_max_position_embeddings": config.original_max_position_embeddings,
    }
    of_rope = {
        "rotary_base": rope.get("rope_theta"),
        "rotary_scaling_factor": rope.get("factor"),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
    }
    compared = list(of_config) if kind == "yarn" else ["rotary_base"]
    usual = {"default": "rope", "yarn": "yarn"}.get(kind)
    wrong = {f"{name}={of_config[name]}": of_config[name] != of_rope[name] for name in compared}
    wrong[f"rope_type={config.rope_type}"] = config.rope_type != usual
    _refuse_rope(wrong, rope)


def _refuse_rope(wrong: Mapping[str, bool], rope: Mapping[str, Any]) -> None:
    if refused := [setting for setting, is_wrong in wrong.items() if is_wrong]:
        raise NotSupported(
            f"the GPTModel was made with {', '.join(refused)}, which is not supported or does not "
            f"agree with rope_parameters: {dict(rope)}"
        )
