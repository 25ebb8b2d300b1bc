"""The families that the kernels compute in HF transformers and in vLLM."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm": "GlmForCausalLM",
    "arcee": "ArceeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}
"""model_type -> the class that both engines load. Other models load through subclasses of vLLM's
classes, which compute something else, or through transformers' classes."""
UNGATED = {"arcee": "relu2", "starcoder2": "gelu_pytorch_tanh"}
"""Families whose MLP has no gate -> their `hidden_act`."""
GEMMA = ("gemma2", "gemma3_text", "gemma")
"""Families whose activation is gelu's tanh form, and whose norms multiply by 1 + weight."""
GELU = (*GEMMA, "gemma4_text")
"""Families whose activation is gelu's tanh form, under a key of its own."""
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families in which some layers have a gated delta net, and the others an attention with a gate."""
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Families whose keys and values are computed from a latent (MLA)."""
DEEPSEEK_V2 = {"topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False}
"""The settings of DeepSeek-V2's routers -> the value that the kernels compute, which is that of
DeepSeek-V2-Lite."""
COMPLEX = ("deepseek_v2",)
"""Families whose code of transformers rotates by complex numbers."""
ONE_PLUS = (*GEMMA, *DELTA_NETS)
"""Families whose norms multiply by 1 + weight."""


LAYER_NORMS = ("starcoder2", "cohere2")
"""Families whose norms subtract the mean."""
TEMPERED = ("ministral3",)
"""Families that multiply queries by a factor of their position."""


def of_code(model_type: str) -> str:
    """The folder of transformers with a family's code."""
    return model_type.removesuffix("_text")
