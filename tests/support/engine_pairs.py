"""The matrix of engine pairs: the models, the layouts of each engine, and the pairs that tests run.

A new family is an entry of `MODELS`, and a new layout one of `ENGINES` or `ROLLOUTS`; a new engine
has an entry in `FACTS` too.
`tests/fix_path/test_pairs.py` runs every pair of `WHOLE` that has the kernels, and
`tests/real_runs/test_healthy_pairs.py` every other one. Without the marker `whole_matrix` they run
those of `DEFAULT`, in which every two values of the axes meet. RLK_PAIRS=FILE.jsonl collects what
each comparison found, for the reports.
"""

import json
import os
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from command import Cli, Outcome, capture_of, require_engine, spec_here, write_few_prompts
from covering import covering
from random_model import write_random_model
from rlk_kernels.integrations.vllm.families import ONE_RANK

from rlk_align.data import data_path
from rlk_align.model.edges import EDGES

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


@dataclass(frozen=True)
class Layouts:
    """The options by which an engine lays out rows and ranks."""

    few: tuple[str, ...]
    """For every model."""
    few_dense: tuple[str, ...] = ()
    """For every dense model."""
    few_sparse: tuple[str, ...] = ()
    """For every sparse model."""
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    """For the models that have every layout."""

    def of(self, model: Model) -> tuple[str, ...]:
        few = (*self.few, *(self.few_sparse if model.sparse else self.few_dense))
        more = self.sparse if model.sparse else self.dense
        return (*few, *more) if model.every_layout else few


@dataclass(frozen=True)
class Facts:
    """What is known of an engine's own kernels."""

    numbers: str
    """Engines with the same name here compute the same numbers."""
    other_rounding: frozenset[str] = frozenset()
    """Operators that may introduce a difference from vLLM in the embedded model."""
    hidden: frozenset[str] = frozenset()
    """Operators of experts that it computes in one kernel, so that no row can be paired."""
    together: frozenset[str] = frozenset()
    """Operators that are excluded from the kernels with another one, because the engine computes
    both by one product or one function."""
    alike: frozenset[str] = frozenset()
    """Operators that it computes as the kernels' profile says anyway."""


_ROUNDING = {"q_rope", "k_rope", "attn", "mlp_norm", "attn_norm", "q_norm", "k_norm", "o_proj"}
# HF rounds every operation of a rotation, and vLLM rotates in fp32 and rounds once; vLLM's norms
# multiply by the weight before they round; sums of attention and of products have other orders.
_TORCH = Facts(
    numbers="torch",
    other_rounding=frozenset(_ROUNDING),
    together=frozenset({"k_rope"}),
    alike=frozenset({"embed"}),
)
FACTS = {
    "hf": _TORCH,
    "fsdp": _TORCH,
    "deepspeed": _TORCH,
    "megatron": Facts(
        numbers="megatron",
        # torch's norm rounds once, the fp32 sums of vLLM and Megatron have other orders, and a
        # row-parallel product adds rounded halves.
        other_rounding=frozenset(_ROUNDING),
        hidden=frozenset({"act", "down_proj"}),
        together=frozenset({"k_proj", "v_proj", "up_proj", "k_rope"}),
        alike=frozenset({"embed"}),
    ),
    "vllm": Facts(
        numbers="vllm",
        hidden=frozenset({"gate_proj", "up_proj", "act", "down_proj"}),
        together=frozenset({"k_proj", "v_proj", "up_proj", "k_rope"}),
        # A copy, and on CPUs the rotation.
        alike=frozenset({"embed", "q_rope"}),
    ),
    "sglang": Facts(
        numbers="sglang",
        other_rounding=frozenset(_ROUNDING),
        hidden=frozenset({"gate_proj", "up_proj", "act", "down_proj"}),
    ),
}
_SGLANG_MORE = ("chunked_prefill_size=32", "radix_cache=1", "tp=4")
_SGLANG = Layouts(
    ("", "tp=2", "chunked_prefill_size=32,page_size=16,max_running_requests=3,radix_cache=1"),
    few_sparse=_SGLANG_MORE,
    dense=_SGLANG_MORE,
)
ENGINES = {
    "hf": Layouts(("", "batch=4,padding=left"), dense=("batch=4,padding=right", "batch=1")),
    "fsdp": Layouts(("dp=2",), dense=("dp=1", "dp=4")),
    "deepspeed": Layouts(
        ("dp=2",),
        dense=(
            "checkpointing=1",
            *(
                ",".join(filter(None, (f"stage={stage}", dp, mixed)))
                for mixed in ("", "mixed=autocast")
                for dp in ("", "dp=2")
                for stage in range(4)
                if (stage, dp, mixed) != (3, "dp=2", "")
            ),
        ),
    ),
    "megatron": Layouts(
        ("", "input=packed"),
        few_dense=("tp=2",),
        dense=(
            *("batch=1", "batch=4,padding=left", "batch=4,padding=right"),
            *("tp=2,sp=1", "tp=4", "tp=4,sp=1", "tp=4,sp=1,input=packed"),
            *("tp=2,batch=4,padding=left", "cp=2", "cp=4,input=packed"),
            *("tp=2,cp=2,sp=1", "tp=2,cp=2,sp=1,input=packed", "tp=2,pp=2,sp=1"),
            *("pp=2", "cp=2,pp=2", "cp=2,pp=2,batch=1", "pp=4"),
        ),
        sparse=(
            *("dispatcher=alltoall,batch=4", "ep=2", "ep=2,dispatcher=alltoall"),
            *("ep=2,batch=4,padding=left", "ep=4,pp=2,input=packed"),
            *("cp=2,ep=2,dispatcher=alltoall", "cp=2,pp=4"),
        ),
    ),
    "vllm": Layouts(
        ("", "max_num_seqs=2,max_num_batched_tokens=64,enable_prefix_caching=1"),
        dense=(
            "max_num_seqs=1,block_size=128",
            *("max_num_seqs=3,max_num_batched_tokens=64", "enable_prefix_caching=1"),
        ),
    ),
    "sglang": _SGLANG,
}
"""What scores: engine -> its layouts."""
ROLLOUTS = {
    "vllm": Layouts(("", "tp=2"), dense=("tp=4",), sparse=("tp=4",)),
    "hf": Layouts(("",)),
    "sglang": _SGLANG,
}
"""What samples: engine -> its layouts."""


@dataclass(frozen=True)
class Pair:
    """A model in two engines: one point of the matrix."""

    model: str
    dtype: str
    kernels: str
    rollout: str
    train: str

    @property
    def id(self) -> str:
        return "-".join((self.kernels, self.model, self.dtype, self.rollout, self.train))

    @property
    def engines(self) -> tuple[str, str]:
        return self.rollout.partition(":")[0], self.train.partition(":")[0]

    @property
    def drifts(self) -> bool:
        """Whether the engines' own kernels compute other numbers."""
        rollout, train = (FACTS[engine].numbers for engine in self.engines)
        return rollout != train or self.autocast

    @property
    def autocast(self) -> bool:
        """Whether the trainer keeps its residual stream and its norms in fp32."""
        return "mixed=autocast" in self.train

    @cached_property
    def goals(self) -> frozenset[Hashable]:
        """The combinations that this pair reaches, of two axes each.

        Every two values of these axes meet: family, dtype, kernels, rollout engine, training
        engine and its ranks; of the training engines that run the code of transformers, one meets
        a family. With the kernels, every two options of a training engine's layout meet, each
        model without `as_in` and `rarely` occurs, and several ranks of the rollout meet dense and
        sparse models, each dtype and each training engine. Without the kernels, every dense family
        meets HF and Megatron. SGLang, which starts slowly, samples once on two ranks, with the
        kernels and a sparse model, and scores once, on one rank without them.
        """
        rollout, train = self.engines
        model = MODELS[self.model]
        if "sglang" in self.engines:
            if self.kernels == "rlk" and model.sparse and self.rollout == "sglang:tp=2":
                return frozenset({("sglang", "rlk"), ("model", self.model)})
            scores = (self.kernels, self.train) == ("off", "sglang")
            return frozenset({("sglang", "off")} if scores else ())
        axes = {
            "dtype": self.dtype,
            "kernels": self.kernels,
            "rollout": rollout,
            "engine": train,
            "ranks": any(option in self.train for option in ("dp=", "tp=", "cp=", "pp=", "ep=")),
        }
        reached: set[Hashable] = set(combinations(axes.items(), 2))
        of_family = axes | {"engine": FACTS[train].numbers}
        reached |= {(model.like or model.family, axis) for axis in of_family.items()}
        if self.kernels == "rlk":
            options = [(train, option) for option in self.train.partition(":")[2].split(",")]
            reached |= {*options, *combinations(options, 2)}
            reached |= set() if model.as_in or model.rarely else {("model", self.model)}
        elif not model.sparse and train in ("hf", "megatron"):
            reached.add((model.family, model.kernels, train))
        if "tp=" in self.rollout:
            reached.add(("ranks of the rollout", model.sparse))
        return frozenset(reached)

    def run(self, cli: Cli, folder: Path, prompts: Path) -> Outcome:
        """What `rlk-align compare` says of the pair; the run is `folder / "run"`. Skips where an
        engine is not installed."""
        for engine in self.engines:
            require_engine(engine)
        more = f"dtype={self.dtype},kernels={self.kernels}"
        rollout, train = (
            spec_here(f"{spec}{',' if ':' in spec else ':'}{more}")
            for spec in (self.rollout, self.train)
        )
        contract = ("--contract", "bitwise") if self.kernels == "rlk" else ()
        done = cli(
            *("compare", "--model", MODELS[self.model].stored(folder, self.model, self.dtype)),
            *("--prompts", prompts, "--max-new-tokens", 8),
            *("--rollout", rollout, "--train", train, "--run-dir", folder / "run", *contract),
        )
        record = os.environ.get("RLK_PAIRS")
        if record and done.verdict:
            with Path(record).open("a") as file:
                said = {name: done.verdict[name] for name in ("edges", "coverage")}
                file.write(json.dumps({"pair": self.id, "first": done.first} | said) + "\n")
        return done

    def compared(self, cli: Cli, folder: Path) -> Outcome:
        """What `run` says of a few prompts, after what holds for every healthy pair."""
        done = self.run(cli, folder, write_few_prompts(folder / "few.jsonl"))
        assert done.code == 0, done.out + done.err
        verdict = done.verdict
        assert verdict is not None
        assert verdict["dtype"] == self.dtype
        assert verdict["precheck"]["mismatches"] == verdict["breaches"] == []
        assert verdict["controls"]["observer"] == "bitwise"
        assert verdict["controls"]["noise_floor"] == {"rollout": "bitwise", "train": "bitwise"}
        assert set(verdict["edges"]) == set(EDGES)
        assert all(edge["tokens"] == verdict["tokens"] > 40 for edge in verdict["edges"].values())
        samples = capture_of(folder / "run", "rollout").tokens.samples
        assert max(len(sample.ids) for sample in samples) > 3 * STRETCHED_FROM
        kernels = {"torch"} if self.kernels == "rlk" else set()
        for role in ("rollout", "train"):
            assert set(capture_of(folder / "run", role).record.kernels.values()) == kernels
        return done


def _specs(engines: dict[str, Layouts], model: Model) -> list[str]:
    return [
        f"{name}:{options}" if options else name
        for name, layouts in engines.items()
        if name not in model.without and (name != "sglang" or model.sglang)
        for options in layouts.of(model)
    ]


_FIRST = {f"{name}:{layouts.few[0]}".rstrip(":") for name, layouts in ENGINES.items()}


def _meets_sglang(rollout: str, train: str) -> bool:
    """SGLang meets the first layout of each engine, of its own too."""
    others = [spec for spec in (rollout, train) if not spec.startswith("sglang")]
    return len(others) == 2 or (others or [train])[0] in _FIRST


_EVERY = [
    Pair(name, dtype, kernels, rollout, train)
    for name, model in MODELS.items()
    for dtype in model.dtypes
    for kernels in model.kernels
    for rollout in _specs(ROLLOUTS, model)
    for train in _specs(ENGINES, model)
    if _meets_sglang(rollout, train)
    # Without the kernels, only one rank of vLLM samples.
    if kernels == "rlk" or not rollout.startswith("vllm:")
    if not (model.family in ONE_RANK and "tp=" in rollout)
    # With the kernels, HF refuses a cache that is cut to a window, and that of a gated delta net.
    if kernels == "off"
    or rollout != "hf"
    or {"sliding_window", "linear_key_head_dim"}.isdisjoint(model.settings)
    # Autocast is for bf16.
    if dtype == "bfloat16" or "autocast" not in train
    # HF samples for a few layouts.
    if rollout != "hf" or "," not in train
]
WHOLE = {pair.id: pair for pair in _EVERY}
_CACHED = "sglang:max_running_requests=2,radix_cache=1,page_size="
CACHED = {
    pair.id: pair
    for pair in (
        Pair(model, dtype, kernels, f"{_CACHED}{page}", train)
        for model in ("embedded", "untied")
        for dtype in MODELS[model].dtypes
        for kernels in MODELS[model].kernels
        for page in (1, 16)
        for train in ("hf", "fsdp:dp=2", "megatron", "vllm")
        if kernels == "rlk" or train == "hf"
    )
}
"""Pairs for prompts that begin alike, so that SGLang takes rows from its cache."""
DEFAULT = {pair.id for pair in covering(_EVERY, lambda pair: pair.goals)}


def cases(kernels: str) -> list[Any]:
    """The names of the pairs with the kernels (`rlk`) or without (`off`), for `parametrize`."""
    return [
        # pytest names a long value by its number, unless it has the id.
        pytest.param(name, id=name, marks=() if name in DEFAULT else pytest.mark.whole_matrix)
        for name, pair in WHOLE.items()
        if pair.kernels == kernels
    ]
