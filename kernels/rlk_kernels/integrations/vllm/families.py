"""The models of vLLM that are supported, by vLLM's reading of config.json: those whose classes
compute the same as transformers' classes of the family."""

from typing import Any

from rlk_kernels.integrations.families import (
    ARCHITECTURES,
    DEEPSEEK_V2,
    DELTA_NETS,
    LATENTS,
)

OF_TRANSFORMERS = (
    *("seed_oss", "smollm3", "olmo2", "olmo3", "glm", "arcee", "starcoder2", "hunyuan_v1_dense"),
    # vLLM 0.32 has a class for it, whose windows have one key too many.
    "cohere2",
)
"""Families whose code of transformers vLLM runs: it has no class for them, or a wrong one."""
PLAIN = (*OF_TRANSFORMERS, "gemma4_text")
"""Families whose fp8 and whose adapters no test has compared. Where values are keys, vLLM would
leave the keys' adapter out of the values."""
ONE_RANK = ("glm", "gpt_oss", "minimax_m2", *LATENTS)
"""Families that are compared on one rank only."""
SPARSE = (
    *("qwen3_moe", "qwen2_moe", "granitemoe", "mixtral", "olmoe", "gpt_oss", "ernie4_5_moe"),
    *("glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe_text", *LATENTS),
)
"""Families with sparse layers."""
FP32_ROUTERS = ("ernie4_5_moe",)
"""Families whose checkpoints have routers in fp32, with values that no other dtype has."""
WINDOWS_BY_LAYER = (
    *("olmo3", "exaone4", "cohere2", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"),
)
"""Families in which vLLM gives each layer the window that it has in transformers."""

_GRANITE = ("sliding_window", "layer_types", "layer_rope_theta", "attention_sinks")
READ_ALONE = {
    "llama": ("sliding_window", "bias", "qkv_bias"),
    "mistral": ("attention_bias", "mlp_bias", "bias", "qkv_bias"),
    "ministral3": ("attention_bias", "mlp_bias", "bias", "qkv_bias"),
    "qwen2": ("qk_norm",),
    "ernie4_5": ("sliding_window", "attention_bias", "mlp_bias", "bias", "qkv_bias"),
    "ernie4_5_moe": ("sliding_window",),
    "minimax_m2": ("sliding_window", "attention_bias"),
    "phi3": (
        *("attention_bias", "mlp_bias", "bias", "qkv_bias"),
        *("rotary_pct", "rotary_emb_fraction"),
    ),
    "glm4": ("sliding_window",),
    "granite": (*_GRANITE, "bias", "logit_scale"),
    "granitemoe": _GRANITE,
    "qwen2_moe": ("sliding_window",),
    **dict.fromkeys(
        ("seed_oss", "smollm3", "olmo2", "glm", "arcee", "hunyuan_v1_dense"),
        ("sliding_window", "attn_logit_softcapping"),
    ),
    **dict.fromkeys(("olmo3", "starcoder2", "cohere2"), ("attn_logit_softcapping",)),
    "gemma": ("sliding_window",),
    **dict.fromkeys(DELTA_NETS, ("sliding_window", "qkv_bias", "dual_chunk_attention_config")),
    "exaone4": ("attention_bias", "mlp_bias", "bias", "logit_scale"),
}
"""Family -> options of config.json that vLLM's class reads and transformers' class does not."""
ROPE_READ_ALONE = ("rope_dim", "mrope_section", "use_fope")
"""Keys of `rope_parameters` that vLLM reads and transformers does not."""


SWIGLU = (1.702, 7.0)
"""GPT-OSS's `swiglu_alpha` and `swiglu_limit` in vLLM."""
CONSTANTS: dict[str, dict[str, Any]] = {
    "olmoe": {
        **{"rms_norm_eps": 1e-5, "norm_topk_prob": False, "attention_bias": False},
        "clip_qkv": None,
    },
    "gpt_oss": {
        **{"swiglu_alpha": SWIGLU[0], "swiglu_limit": SWIGLU[1], "rms_norm_eps": 1e-5},
        "attention_bias": True,
    },
}
"""Family -> settings of config.json for which vLLM's class has one value."""
YARN_ALONE = ("mscale", "mscale_all_dim", "attention_factor")
"""Keys of a yarn rope that GPT-OSS's class in vLLM does not read."""


def _alternating(layers: int) -> tuple[str, ...]:
    """The kinds of layers of which every other one, from the first on, has a window."""
    return tuple(("sliding_attention", "full_attention")[i % 2] for i in range(layers))


def is_sparse(model: Any) -> bool:
    """Whether a ModelConfig is of a family with sparse layers."""
    return model.hf_text_config.model_type in SPARSE


def has_delta_nets(model: Any) -> bool:
    """Whether a ModelConfig is of a family with gated delta nets."""
    return model.hf_text_config.model_type in DELTA_NETS


def has_latents(model: Any) -> bool:
    """Whether a ModelConfig is of a family with latent attention."""
    return model.hf_text_config.model_type in LATENTS


def refused(model: Any, ranks: int) -> dict[str, bool]:
    """Unsupported setting of vLLM's ModelConfig -> whether it is set, for a number of ranks."""
    text = model.hf_text_config
    family, loaded = text.model_type, model.architecture
    # Where layers have heads of two sizes, transformers refuses to read the attribute.
    heads = vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads
    windowed = getattr(text, "sliding_window", None) is not None
    kinds = getattr(text, "layer_types", None) or ()
    qwen = family in ("qwen2", "qwen3", "qwen2_moe")
    rope = getattr(text, "rope_parameters", None) or {}
    alone = {
        f"{name} of model_type={family}": bool(getattr(text, name, None))
        for name in READ_ALONE.get(family, ())
    } | {f"{name} in rope_parameters": bool(rope.get(name)) for name in ROPE_READ_ALONE}
    return {
        f"several ranks with {family}, which no test has compared": (
            family in ONE_RANK and ranks > 1
        ),
        f"{loaded} of model_type={family}, only {', '.join(ARCHITECTURES.values())}": (
            ARCHITECTURES.get(family) != loaded
        ),
        f"runner={model.runner_type}, only generate": model.runner_type != "generate",
        "is_causal=False": not getattr(text, "is_causal", True),
        # vLLM's class uses hidden_size / num_attention_heads, and transformers' uses head_dim.
        f"head_dim={heads} of Qwen2, which vLLM does not read": family == "qwen2"
        and heads * text.num_attention_heads != text.hidden_size,
        "attention_bias of Qwen3, because vLLM omits o_proj's bias": family == "qwen3"
        and bool(getattr(text, "attention_bias", False)),
        "qkv_bias=False of Qwen2-MoE, which vLLM does not read": family == "qwen2_moe"
        and not getattr(text, "qkv_bias", True),
        "head_dim of GraniteMoe, which vLLM does not read": family == "granitemoe"
        and heads * text.num_attention_heads != text.hidden_size,
        "attention_bias of GraniteMoe, which vLLM does not read": family == "granitemoe"
        and bool(getattr(text, "attention_bias", False)),
        **{
            f"{name} of model_type={family} other than {usual}, which vLLM does not read": (
                getattr(text, name, usual) != usual
            )
            for name, usual in CONSTANTS.get(family, {}).items()
        },
        "a rope of GPT-OSS other than yarn": family == "gpt_oss"
        and rope.get("rope_type", "yarn") != "yarn",
        f"one of {', '.join(YARN_ALONE)} in GPT-OSS's rope, which vLLM does not read": (
            family == "gpt_oss" and any(rope.get(key) for key in YARN_ALONE)
        ),
        "layer_types of GPT-OSS that do not alternate, which vLLM does not read": (
            family == "gpt_oss" and windowed and tuple(kinds) != _alternating(len(kinds))
        ),
        "use_bias of ERNIE, which vLLM does not read": family in ("ernie4_5", "ernie4_5_moe")
        and bool(getattr(text, "use_bias", False)),
        "use_routing_bias=False of MiniMax-M2, which transformers does not read": (
            family == "minimax_m2" and not getattr(text, "use_routing_bias", False)
        ),
        "a scoring_func of MiniMax-M2 other than sigmoid, which transformers does not read": (
            family == "minimax_m2" and getattr(text, "scoring_func", "") != "sigmoid"
        ),
        "a sliding window in some layers, which vLLM applies to all": windowed
        and "full_attention" in kinds
        and family not in WINDOWS_BY_LAYER,
        "a sliding window in no layer, for which transformers rotates none": windowed
        and "sliding_attention" not in kinds
        and family == "exaone4",
        "dual_chunk_attention_config": qwen
        and bool(getattr(text, "dual_chunk_attention_config", None)),
        "attn_output_gate=False, which transformers does not read": family in DELTA_NETS
        and not getattr(text, "attn_output_gate", True),
        "layer_scale, which transformers does not read": family in DELTA_NETS
        and bool(getattr(text, "layer_scale", False)),
        "attention_bias of a model with gated delta nets, which vLLM does not read": (
            family in DELTA_NETS and bool(getattr(text, "attention_bias", False))
        ),
        "rope_interleave=False, which vLLM does not read": family in LATENTS
        and not getattr(text, "rope_interleave", True),
        "attention_bias of latent attention, which vLLM does not read": family in LATENTS
        and bool(getattr(text, "attention_bias", False)),
        "float16 with latent attention, for which vLLM scales the stream": family in LATENTS
        and str(model.dtype) == "torch.float16",
        **{
            f"{name} of DeepSeek-V2 other than {usual}": family == "deepseek_v2"
            and getattr(text, name, usual) not in (None, usual)
            for name, usual in DEEPSEEK_V2.items()
        },
        "a topk_method other than noaux_tc, without which vLLM does not correct scores": (
            family == "deepseek_v3" and getattr(text, "topk_method", None) != "noaux_tc"
        ),
        "a scoring_func other than sigmoid, which transformers does not read": (
            family == "deepseek_v3" and getattr(text, "scoring_func", None) != "sigmoid"
        ),
        "llama_4_scaling": getattr(text, "llama_4_scaling", None) is not None,
        "ada_rms_norm_t_cond": bool(getattr(text, "ada_rms_norm_t_cond", False)),
        **{f"{name}, which transformers does not read": is_set for name, is_set in alone.items()},
    }
