"""The models of the matrix of engines.

A new family is an entry of `MODELS`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from random_model import write_random_model

from rlk_align.data import data_path
from rlk_align.model.families import FAMILIES

SPARSE, TRAINED_HYBRID = (Path(__file__).parents[2] / "fixtures" / n for n in ("sparse", "hybrid"))
STRETCHED_FROM = 16
"""Positions before `llama3` and `yarn` ropes are stretched; the prompts are longer."""
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 2.0, "original_max_position_embeddings": STRETCHED_FROM}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0}
YARN |= {"original_max_position_embeddings": STRETCHED_FROM}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
CORRECTED: dict[str, Any] = {
    **{"head_dim": 32, "num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 96, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    **{"attention_bias": True},
}
"""Scores that are corrected for the choice, groups of experts, and a shared expert."""
HYBRID: dict[str, Any] = {
    **{"head_dim": 32, "num_hidden_layers": 4, "linear_key_head_dim": 64},
    **{"linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
"""Three layers with a gated delta net, and one with attention."""
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 48, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32},
    **{"v_head_dim": 24, "num_key_value_heads": 4, "moe_intermediate_size": 96},
}
"""Widths that only the kernels compute on a CPU in vLLM."""
GATED: dict[str, Any] = {
    **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
    "shared_expert_intermediate_size": 160,
}
"""Experts beside a shared expert with a gate."""


@dataclass(frozen=True)
class Model:
    """A model of the matrix."""

    family: str
    """The `model_type` of its config.json."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What a random model sets beside `random_model.SMALL`."""
    path: Path | None = None
    """Where the model is stored; None for a random one."""
    sparse: bool = False
    every_layout: bool = False
    """Whether the whole matrix has it in every layout, or in those of `Layouts.few` alone."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    kernels: tuple[str, ...] = ("rlk", "off")
    """What the engines compute it with."""
    without: tuple[str, ...] = ()
    """Engines that refuse it."""
    sglang: bool = False
    """Whether SGLang runs it."""
    as_in: str = ""
    """The model of the default pairs with its variants; empty if they have it itself."""
    rarely: bool = False
    """Whether only the whole matrix has it."""
    like: str = ""
    """The family whose operators it has in other modules, and as which the default pairs count
    it."""

    @property
    def adds_outside_norms(self) -> bool:
        """Whether vLLM adds residuals outside of norms."""
        family = FAMILIES[self.family]
        return family.backend or family.adds_outside_norms

    def stored(self, folder: Path, name: str, dtype: str) -> Path:
        """Where the checkpoint is; a random one is written below `folder` the first time."""
        made = self.path or folder / f"{name}-{dtype}"
        if not made.exists():
            write_random_model(
                made, model_type=self.family, dtype=dtype, rounded=True, **self.settings
            )
        return made


MODELS = {
    "embedded": Model("qwen3", path=data_path("model"), every_layout=True, sglang=True),
    "grouped": Model(
        "llama",
        {
            # One key-value head, row-parallel biases, a tied head and a padded vocabulary; hidden
            # size / heads is 24.
            **{"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
            **{"tie_word_embeddings": True, "vocab_size": 1031, "rope_parameters": LLAMA3},
            **{"hidden_size": 96, "head_dim": 32, "num_hidden_layers": 4},
        },
        every_layout=True,
    ),
    "llama": Model(
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0}, "attention_bias": True},
        sglang=True,
    ),
    "mistral": Model("mistral", {"rope_parameters": LINEAR, "sliding_window": 8}),
    "qwen2": Model(
        "qwen2",
        {"rope_parameters": YARN},
        dtypes=("float16",),
        without=("deepspeed",),
        sglang=True,
    ),
    "qwen3": Model(
        "qwen3",
        {
            "head_dim": 64,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        },
        sglang=True,
    ),
    # One product for q, k and v, and one for gate and up, as the checkpoint has them. vLLM's class
    # is Llama's. `test_family_variants.py` compares this family without the kernels.
    "phi3": Model(
        "phi3",
        {"sliding_window": 8, "rope_parameters": PARTIAL},
        kernels=("rlk",),
        without=("megatron",),
        like="llama",
    ),
    # Features 2j and 2j + 1 of a head are a pair; vLLM's class is Llama's.
    "ernie4_5": Model(
        "ernie4_5",
        {"head_dim": 32, "num_hidden_layers": 4, "tie_word_embeddings": True},
        kernels=("rlk",),
        without=("megatron",),
        like="llama",
    ),
    # Numbers that multiply the embedding, the branches, the scores and the logits.
    "granite": Model(
        "granite",
        {
            **{"head_dim": 32, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
            **{"attention_multiplier": 0.4, "logits_scaling": 6.0, "tie_word_embeddings": True},
            "num_hidden_layers": 4,
        },
        kernels=("rlk",),
        without=("megatron",),
        like="llama",
    ),
    # Norms before and after each branch, and a rotation of a part of each head, in neighbours.
    "glm4": Model(
        "glm4",
        {"head_dim": 32},
        kernels=("rlk",),
        without=("megatron",),
        as_in="exaone4",
        like="llama",
    ),
    # Norms after the branches alone, and layers without a rotation.
    "exaone4": Model(
        "exaone4",
        {
            **{"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 4},
            **{"layer_types": KINDS, "num_hidden_layers": 4},
        },
        kernels=("rlk",),
        without=("megatron",),
        like="llama",
    ),
    # Norms by 1 + weight, a scaled embedding, gelu; caps, windows and two ropes by layer.
    "gemma": Model(
        "gemma",
        {"head_dim": 32, "tie_word_embeddings": True},
        kernels=("rlk",),
        without=("megatron",),
        as_in="gemma2",
        like="llama",
    ),
    "gemma2": Model(
        "gemma2",
        {
            **{"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24},
            **{"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0},
            **{"layer_types": KINDS[-2:], "tie_word_embeddings": True},
        },
        kernels=("rlk",),
        without=("megatron",),
        like="llama",
    ),
    "gemma3": Model(
        "gemma3_text",
        {
            **{"head_dim": 32, "sliding_window": 8, "layer_types": KINDS, "num_hidden_layers": 4},
            **{"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
            "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": LINEAR},
        },
        kernels=("rlk",),
        without=("megatron",),
        as_in="gemma2",
        like="llama",
    ),
    # Norms of v, heads of two sizes, values that are keys, a rope of a part of the wide heads, and
    # a stream that each layer multiplies.
    "gemma4": Model(
        "gemma4_text",
        {
            **{"head_dim": 32, "global_head_dim": 64, "attention_k_eq_v": True},
            **{"num_global_key_value_heads": 1, "sliding_window": 8, "layer_types": KINDS},
            **{"num_hidden_layers": 4, "hidden_size_per_layer_input": 0},
            **{"final_logit_softcapping": 1.0, "tie_word_embeddings": True},
        },
        kernels=("rlk",),
        without=("megatron",),
        like="llama",
    ),
    # vLLM runs the code of transformers for these.
    "olmo2": Model(
        "olmo2",
        {"head_dim": 32, "attention_bias": True, "rope_parameters": YARN},
        kernels=("rlk",),
        without=("megatron",),
        as_in="olmo3",
        like="llama",
    ),
    "olmo3": Model(
        "olmo3",
        {
            **{"sliding_window": 8, "layer_types": KINDS, "num_hidden_layers": 4},
            "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": YARN},
        },
        kernels=("rlk",),
        without=("megatron",),
        like="llama",
    ),
    "seed_oss": Model(
        "seed_oss",
        {"head_dim": 32, "attention_out_bias": True},
        kernels=("rlk",),
        without=("megatron",),
        as_in="olmo3",
        like="llama",
    ),
    "smollm3": Model(
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "rope_parameters": LLAMA3},
        kernels=("rlk",),
        without=("megatron",),
        as_in="olmo3",
        like="llama",
    ),
    "glm": Model(
        "glm",
        {"head_dim": 32, "num_hidden_layers": 4},
        kernels=("rlk",),
        without=("megatron",),
        as_in="exaone4",
        like="llama",
    ),
    # Norms of q and of k after the rotation.
    "hunyuan": Model(
        "hunyuan_v1_dense",
        {"head_dim": 32, "attention_bias": True, "num_hidden_layers": 4},
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="llama",
    ),
    # An MLP without a gate.
    "arcee": Model(
        "arcee",
        {"head_dim": 32, "mlp_bias": True, "rope_parameters": YARN, "num_hidden_layers": 4},
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="llama",
    ),
    # The same with LayerNorms.
    "starcoder2": Model(
        "starcoder2",
        {
            **{"head_dim": 32, "sliding_window": 8, "tie_word_embeddings": True},
            "num_hidden_layers": 4,
        },
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="llama",
    ),
    # LayerNorms, parallel branches, layers without a rotation, multiplied logits.
    "cohere2": Model(
        "cohere2",
        {
            **{"sliding_window": 8, "layer_types": KINDS, "num_hidden_layers": 4},
            **{"logit_scale": 0.3, "tie_word_embeddings": True},
        },
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="llama",
    ),
    # Queries are multiplied by a factor of their position.
    "ministral3": Model(
        "ministral3",
        {
            **{"head_dim": 32, "num_hidden_layers": 4},
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="llama",
    ),
    # The kernels have no such activation, and vLLM on a CPU no heads of such a size.
    "gelu": Model(
        "qwen3",
        {"head_dim": 24, "hidden_act": "gelu_pytorch_tanh"},
        dtypes=("float32",),
        kernels=("off",),
        without=("vllm",),
    ),
    "sparse": Model("qwen3_moe", path=SPARSE, sparse=True, every_layout=True),
    "not-normalized": Model(
        "qwen3_moe",
        {
            **{"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4},
            **{"moe_intermediate_size": 96, "norm_topk_prob": False, "decoder_sparse_step": 2},
        },
        sparse=True,
    ),
    # vLLM's own kernels do not take these sizes.
    "odd-sizes": Model(
        "qwen3_moe",
        {
            **{"head_dim": 32, "hidden_size": 100, "num_experts": 5},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 36},
        },
        sparse=True,
        kernels=("rlk",),
    ),
    # SGLang makes every layer of a Qwen3-MoE sparse, and unties the head.
    "untied": Model(
        "qwen3_moe",
        {
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
            **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        },
        sparse=True,
        sglang=True,
    ),
    "mixtral": Model(
        "mixtral", {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3}, sparse=True
    ),
    # A shared expert with a gate.
    "gated": Model(
        "qwen2_moe",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
            **{"shared_expert_intermediate_size": 160, "mlp_only_layers": [1]},
            "num_hidden_layers": 4,
        },
        sparse=True,
        kernels=("rlk",),
        without=("megatron",),
        like="qwen3_moe",
    ),
    "granitemoe": Model(
        "granitemoe",
        {
            **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0},
            **{"attention_multiplier": 0.4, "num_local_experts": 8, "num_experts_per_tok": 3},
            **{"intermediate_size": 96, "tie_word_embeddings": True},
        },
        sparse=True,
        kernels=("rlk",),
        without=("megatron",),
        as_in="granite",
        like="qwen3_moe",
    ),
    # Norms over all heads of q and of k.
    "olmoe": Model(
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3},
        sparse=True,
        kernels=("rlk",),
        without=("megatron",),
        as_in="gated",
        like="qwen3_moe",
    ),
    # Sinks, and experts with biases and a clamped activation.
    "gpt_oss": Model(
        "gpt_oss",
        {
            **{"head_dim": 32, "sliding_window": 8, "num_local_experts": 8},
            **{"num_experts_per_tok": 3, "intermediate_size": 96, "num_hidden_layers": 4},
            "rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
        sparse=True,
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="qwen3_moe",
    ),
    # A softmax over all experts, corrected for the choice, and routers in fp32.
    "ernie4_5_moe": Model(
        "ernie4_5_moe",
        {
            **{"head_dim": 32, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 96},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "num_hidden_layers": 3},
            "tie_word_embeddings": True,
        },
        sparse=True,
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="qwen3_moe",
    ),
    # Norms over all heads of q and of k, a rotation of a part of each head, corrected sigmoids.
    "minimax_m2": Model(
        "minimax_m2",
        {
            **{"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 16},
            **{"intermediate_size": 96, "num_hidden_layers": 3},
            **{"scoring_func": "sigmoid", "use_routing_bias": True},
        },
        sparse=True,
        kernels=("rlk",),
        without=("megatron",),
        rarely=True,
        like="qwen3_moe",
    ),
    # Gated delta nets, in a dense model and in sparse ones.
    "qwen3_5": Model(
        "qwen3_5_text",
        HYBRID,
        path=TRAINED_HYBRID,
        dtypes=("bfloat16",),
        kernels=("rlk",),
        without=("megatron", "deepspeed"),
        as_in="qwen3_next",
        like="llama",
    ),
    "qwen3_next": Model(
        "qwen3_next",
        HYBRID | GATED | {"mlp_only_layers": [1], "norm_topk_prob": True},
        sparse=True,
        dtypes=("bfloat16",),
        kernels=("rlk",),
        without=("megatron", "deepspeed"),
        like="qwen3_moe",
    ),
    "qwen3_5_moe": Model(
        "qwen3_5_moe_text",
        HYBRID | GATED,
        sparse=True,
        dtypes=("bfloat16",),
        kernels=("rlk",),
        without=("megatron", "deepspeed"),
        as_in="qwen3_next",
        like="qwen3_moe",
    ),
    # Keys and values of a latent, queries without one, and a softmax in fp32; corrected sigmoids.
    "deepseek_v2": Model(
        "deepseek_v2",
        LATENT
        | {
            **{"first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 4},
            **{"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3},
            **{"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1}},
        },
        sparse=True,
        kernels=("rlk",),
        without=("megatron", "deepspeed"),
        rarely=True,
        like="qwen3_moe",
    ),
    "deepseek_v3": Model(
        "deepseek_v3",
        LATENT
        | {
            **{"first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 4},
            **{"n_group": 4, "topk_group": 2, "num_hidden_layers": 3},
            **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        },
        sparse=True,
        kernels=("rlk",),
        without=("deepspeed",),
        rarely=True,
        like="qwen3_moe",
    ),
    # The same with dense layers alone, which tensor-parallel ranks of Megatron share.
    "deepseek_v3_dense": Model(
        "deepseek_v3",
        LATENT
        | {
            **{"first_k_dense_replace": 3, "num_hidden_layers": 3},
            **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        },
        dtypes=("bfloat16",),
        kernels=("rlk",),
        without=("deepspeed",),
        rarely=True,
        like="llama",
    ),
    "glm4_moe_lite": Model(
        "glm4_moe_lite",
        LATENT
        | {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1},
            **{"rms_norm_eps": 1e-3, "num_hidden_layers": 3},
        },
        sparse=True,
        dtypes=("bfloat16",),
        kernels=("rlk",),
        without=("deepspeed",),
        rarely=True,
        like="qwen3_moe",
    ),
    "corrected": Model("glm4_moe", CORRECTED, sparse=True),
    "one-group": Model(
        "glm4_moe",
        {
            **{"head_dim": 32, "n_routed_experts": 10, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 64, "n_shared_experts": 2, "partial_rotary_factor": 1.0},
        },
        sparse=True,
    ),
}
