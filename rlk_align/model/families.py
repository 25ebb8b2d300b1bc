"""Model families as tables: each layer's operators, and the config's settings for them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.config_keys import PAGE, unknown_settings
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.operators import OPERATORS, Operator, Size
from rlk_align.model.sparse_config import (
    EXPERT_KEYS,
    UNKNOWN_ROUTING,
    ExpertSettings,
    read_experts,
)
from rlk_align.model.stored import Stacks, stored_dtype, stored_layers

LayerOperators = Callable[["ModelShape", int], tuple[str, ...]]
"""(shape, index of a layer) -> that layer's operators, in execution order."""


def dense(qk_norm: bool = False, wide: bool = False) -> LayerOperators:
    """Equal layers; `qk_norm`: with an RMSNorm on each head of q and k before they are rotated;
    `wide`: with one over all heads of q, and one over all heads of k."""
    norms = ("q_norm", "k_norm") if qk_norm else ("wide_q_norm", "wide_k_norm") if wide else ()
    operators = (
        *("attn_norm", "q_proj", "k_proj", "v_proj", *norms),
        *("q_rope", "k_rope", "attn", "o_proj", "attn_residual"),
        *("mlp_norm", "gate_proj", "up_proj", "act", "down_proj", "mlp_residual"),
    )
    return lambda _shape, _layer: operators


DENSE = dense()


_SHARED = ("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj")


def mixture(
    qk_norm: bool = False,
    wide: bool = False,
    routing: tuple[str, str, str] = ("router", "experts", "routing_weights"),
    shared: Literal["", "added", "gated"] = "",
) -> LayerOperators:
    """Dense layers, and sparse layers in which a router sends each token to a few experts.

    `qk_norm`, `wide`: as for `dense`; `routing`: the router, its choice, and the weights; `shared`:
    whether the row of shared experts is added, or multiplied by the sigmoid of a gate first."""
    dense_layer = dense(qk_norm, wide)
    out = {
        "": ("moe_out",),
        "added": (*_SHARED, "moe_out_with_shared"),
        "gated": (*_SHARED, "shared_gate", "moe_out_gated"),
    }[shared]

    def operators(shape: "ModelShape", layer: int) -> tuple[str, ...]:
        every = dense_layer(shape, layer)
        if layer not in shape.sparse_layers:
            return every
        return (
            *every[: every.index("gate_proj")],
            *(*routing, "expert_gate_proj", "expert_up_proj", "expert_act", "expert_down_proj"),
            *(*out, "mlp_residual"),
        )

    return operators


def corrected_mixture(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Dense layers, and sparse layers with shared experts, whose router computes in float32 and
    corrects its scores for the choice of experts only."""
    routing = ("fp32_router", "corrected_experts", "fp32_routing_weights")
    return mixture(shape.qk_norm, routing=routing, shared="added")(shape, layer)


def normed_after(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Layers whose branches read the residual stream itself and are normed before they are added
    to it, with an RMSNorm over all heads of q and of k."""
    return (
        *("q_proj", "k_proj", "v_proj", "wide_q_norm", "wide_k_norm", "q_rope", "k_rope", "attn"),
        *("o_proj", "attn_post_norm", "attn_residual"),
        *("gate_proj", "up_proj", "act", "down_proj", "mlp_post_norm", "mlp_residual"),
    )


def plain_sandwich(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Layers that norm each branch before and after its operators."""
    return _sandwiched(DENSE(shape, layer))


def sandwich(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Layers that norm each branch before and after its operators, and each head of q and k."""
    return _sandwiched(dense(qk_norm=True)(shape, layer))


def _sandwiched(every: tuple[str, ...]) -> tuple[str, ...]:
    at, end = every.index("attn_residual"), every.index("mlp_residual")
    return (*every[:at], "attn_post_norm", *every[at:end], "mlp_post_norm", *every[end:])


def scaled_residuals(layers: LayerOperators = DENSE) -> LayerOperators:
    """Layers that multiply each branch before it is added to the residual stream."""
    return lambda shape, layer: tuple(
        f"scaled_{op}" if op.endswith("residual") else op for op in layers(shape, layer)
    )


def normed_after_by_head(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Layers whose branches are normed before they are added, with an RMSNorm on each head of q and
    k, and of which some do not rotate q and k."""
    absent = {"attn_norm", "mlp_norm"}
    absent |= {"q_rope", "k_rope"} if layer in shape.unrotated_layers else set()
    return tuple(op for op in sandwich(shape, layer) if op not in absent)


def plain_mlp(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Layers with LayerNorms, and with an MLP that has no gate."""
    replaced = {"attn_norm": "attn_layer_norm", "mlp_norm": "mlp_layer_norm", "act": "plain_act"}
    return tuple(replaced.get(op, op) for op in DENSE(shape, layer) if op != "gate_proj")


def parallel(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Layers whose attention and MLP read one LayerNorm and are added together; some do not rotate
    q and k."""
    replaced = {
        **{"attn_norm": "attn_layer_norm", "down_proj": "parallel_down_proj"},
        "mlp_residual": "parallel_residual",
    }
    absent = ("mlp_norm", "attn_residual")
    every = partly_rotated(shape, layer)
    return tuple(replaced.get(op, op) for op in every if op not in absent)


def normed_after_rotation(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Dense layers with an RMSNorm on each head of q and k after they are rotated."""
    every = DENSE(shape, layer)
    at = every.index("attn")
    return (*every[:at], "rotated_q_norm", "rotated_k_norm", *every[at:])


def partly_rotated(shape: "ModelShape", layer: int) -> tuple[str, ...]:
    """Dense layers, in some of which q and k are not rotated (NoPE)."""
    rotations = ("q_rope", "k_rope") if layer in shape.unrotated_layers else ()
    return tuple(op for op in DENSE(shape, layer) if op not in rotations)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The properties of one decoder family."""

    layer: LayerOperators = DENSE
    before: tuple[str, ...] = ("embed",)
    after: tuple[str, ...] = ("final_norm", "logits", "logprob")
    """The operators before and after the layers."""
    biases: Mapping[str, bool | str] = field(default_factory=dict)
    """Operator -> whether it has a bias, or the config's key for it, if that is not the
    catalogue's."""
    window: Mapping[str, int | bool | None] = field(default_factory=dict)
    """Defaults of the config's keys for a sliding window; empty for a family without windows."""
    period: int = 0
    """In a config without `layer_types`, every layer whose number is a multiple of this, counted
    from 1, sees all keys, and the others have the window; 0 if all layers are of one kind."""
    period_keys: tuple[str, ...] = ()
    """The config's keys for another period; the first that it has counts."""
    local_theta: tuple[str, float] = ("rope_theta", 10000.0)
    """With `rope_by_kind`, the config's key for the theta of layers with a window, in the older
    form, and its default."""
    theta: float = 10000.0
    """The theta of a config that states none."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The config's key for the activation, and its default."""
    norm_eps: str = "rms_norm_eps"
    """The config's key for the epsilon of norms."""
    one_plus_weight: bool = False
    """Whether norms multiply by 1 + weight."""
    embedding_scale: str = ""
    """What multiplies the embedding: `sqrt_hidden`, the root of the hidden size, rounded to the
    model's dtype; empty for nothing."""
    score_cap: str = ""
    """The config's key for the cap c of attention's scores s: c tanh(s / c); empty for none."""
    logit_cap: str = ""
    """The config's key for the same cap of the logits; empty for none."""
    heads_first: bool = False
    """Whether transformers norms q and k as `[B, heads, T, head_dim]`."""
    one_activation: bool = False
    """Whether all layers of vLLM's model share one module for the activation."""
    interleaved: bool = False
    """Whether features 2j and 2j + 1 of a head turn together, and not j and j + half the width."""
    rope_by_kind: bool = False
    """Whether layers with a window have a rotary embedding of their own: `rope_parameters` has one
    for each kind of layer, or `rope_scaling` is for the layers that see all keys only."""
    experts: ExpertSettings | None = None
    """How its config describes experts; None for a family without experts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other settings that the config may leave out."""
    qk_norm: str = ""
    """The config's key for norms of q and k; empty if the family decides this itself."""
    predictors: str = ""
    """The config's key for the number of layers after the decoder's, which predict further tokens;
    empty if the family has none."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Operator -> the module of its parameters, where it is not the catalogue's."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module of a layer in the checkpoint -> the operators whose weights are its rows, in order."""
    stacks: Stacks = field(default_factory=Stacks)
    """The tensors of a checkpoint that have all experts of a layer."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Value -> the value that a layer's operators read in its place."""
    unrotated: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    """config.json -> the layers without a rotation; None if every layer rotates q and k."""
    settings: tuple[str, ...] = ()
    """Further keys of config.json that this description covers."""
    attention_scale: tuple[str, float] = ("", 0.0)
    """The config's key for the number that scales attention's scores, and the power of it; empty if
    1 / √(size of a head) scales them."""
    temperature: bool = False
    """Whether the scale depends on the query's position, by `llama_4_scaling_beta` of its rope."""
    backend: bool = False
    """Whether vLLM runs the code of transformers for it, because it has no class of its own."""
    adds_outside_norms: bool = False
    """Whether vLLM's class for it adds residuals as transformers does, and not inside norms."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Engine, or `kernels` -> why it does not compute the family."""

    @property
    def sigmoid(self) -> bool:
        """Whether its routers score experts by a sigmoid."""
        return self.experts is not None and self.experts.sigmoid

    @property
    def corrected(self) -> bool:
        """Whether its routers correct the scores for the choice of experts."""
        return self.experts is not None and (self.experts.sigmoid or self.experts.corrected)

    def check(self, engine: str, kind: str) -> None:
        """Raises ModelError if the engine, or the kernels, do not compute this family, whose
        `model_type` is `kind`."""
        if engine in self.refused:
            raise ModelError(
                f"{engine} does not support model_type {kind!r}: {self.refused[engine]}",
                {
                    "kernels": "compare with kernels=off",
                    "vllm": "compare with --rollout hf",
                }.get(engine, "compare with --train hf"),
            )

    def multiplies(self, site: str) -> bool:
        """Whether a number of the config multiplies the output of this site outside the layers."""
        ends = (OPERATORS[name] for name in (*self.before, *self.after))
        return any(op.site == site and op.multiplier for op in ends)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of config.json that this description covers, beside those of every family."""
        windows = {*self.window, "layer_types"} if self.window else set()
        windows |= {"rope_parameters.KIND"} if self.rope_by_kind else set()
        experts: set[str] = set()
        if self.experts:
            experts = {*EXPERT_KEYS, self.experts.intermediate, *self.experts.names.values()}
        named = {*self.defaults, *self.settings, self.qk_norm, self.predictors}
        named |= {self.attention_scale[0], self.activation[0], *self.period_keys}
        named |= {self.score_cap, self.logit_cap, self.norm_eps}
        named |= {key for key in self.biases.values() if isinstance(key, str)}
        named |= {self.local_theta[0]} if self.rope_by_kind else set()
        named |= {"rope_parameters.llama_4_scaling_beta"} if self.temperature else set()
        return frozenset({*windows, *experts, *named} - {""})


_SCALED: dict[str, Any] = {
    "before": ("scaled_embed",),
    "after": ("final_norm", "divided_logits", "logprob"),
    "attention_scale": ("attention_multiplier", 1.0),
    "adds_outside_norms": True,
    "defaults": {
        **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0},
        **{"attention_multiplier": 1.0, "logits_scaling": 1.0},
    },
    "refused": {
        "kernels": "they multiply neither the embedding nor branches nor logits",
        "megatron": "it multiplies neither the embedding nor branches nor logits",
    },
}
"""What Granite's multipliers add to a family."""
_NOT_MEASURED = "no test has compared it there"
_NORMED_AFTER = {
    "kernels": "its norms after attention and MLP have no kernel",
    "megatron": "it has no norms after attention and MLP, and norms each head of q alone",
}
_INTERLEAVED = "their rotation turns features j and j + half of the width"
_UNROTATED = {
    "kernels": "their rotation is for every layer, and this family leaves some out",
    "megatron": _NOT_MEASURED,
}
_ALWAYS = {"sliding_window": 4096, "use_sliding_window": True}
"""Windows that no key of the config turns off."""
_QWEN_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=_ALWAYS),
    "ministral3": Family(
        window={"sliding_window": None, "use_sliding_window": True},
        temperature=True,
        refused={
            "kernels": "their attention has one scale for all positions",
            "megatron": "its attention has one scale for all positions",
        },
    ),
    "seed_oss": Family(
        backend=True,
        biases={"o_proj": "attention_out_bias"},
        defaults={"attention_bias": True, "attention_out_bias": False},
        refused={"kernels": _NOT_MEASURED, "megatron": _NOT_MEASURED},
    ),
    "smollm3": Family(
        backend=True,
        layer=partly_rotated,
        defaults={"no_rope_layer_interval": 4, "tie_word_embeddings": True},
        settings=("no_rope_layers",),
        unrotated=_no_rope_layers,
        refused=_UNROTATED,
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
    "qwen3": Family(layer=dense(qk_norm=True), window=_QWEN_WINDOW),
    "qwen3_moe": Family(
        layer=mixture(qk_norm=True),
        window={"sliding_window": 4096, "use_sliding_window": False},
        experts=ExpertSettings("moe_intermediate_size"),
    ),
    "qwen2_moe": Family(
        layer=mixture(shared="gated"),
        biases={"q_proj": "qkv_bias", "k_proj": "qkv_bias", "v_proj": "qkv_bias", "o_proj": False},
        experts=ExpertSettings(
            "moe_intermediate_size",
            shared="shared_expert_intermediate_size",
            known={"shared_expert_intermediate_size": None},
        ),
        defaults={"qkv_bias": True},
        modules={
            op: f"mlp.shared_expert.{op.removeprefix('shared_')}"
            for op in ("shared_gate_proj", "shared_up_proj", "shared_down_proj")
        },
        refused={
            "kernels": "the gate of its shared expert has no kernel",
            "megatron": _NOT_MEASURED,
        },
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
        refused={
            "kernels": "its norms, its scaled embedding and its caps have no kernel there",
            "megatron": "it has neither norms after attention and MLP nor caps",
        },
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
        defaults={"tie_word_embeddings": True, "query_pre_attn_scalar": 256},
        modules={"mlp_norm": "pre_feedforward_layernorm"},
        refused={
            "kernels": "its norms, its scaled embedding and its activation have no kernel",
            "megatron": "it has neither norms after attention and MLP nor two rotary embeddings",
        },
    ),
    "granite": Family(layer=scaled_residuals(), **_SCALED),
    "granitemoe": Family(
        layer=scaled_residuals(mixture()),
        experts=ExpertSettings("intermediate_size", norm_topk=True),
        modules={"router": "block_sparse_moe.router.layer"},
        stacks=Stacks(
            gate_up="block_sparse_moe.input_linear.weight",
            down="block_sparse_moe.output_linear.weight",
        ),
        **_SCALED,
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
        refused={
            "kernels": "its norms after attention and MLP and its pairs have no kernel there",
            "megatron": "it has no norms after attention and MLP",
        },
    ),
    "ernie4_5": Family(
        interleaved=True,
        theta=5e5,
        defaults={"tie_word_embeddings": True},
        refused={"kernels": _INTERLEAVED, "megatron": _NOT_MEASURED},
    ),
    "phi3": Family(
        biases=dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), False),
        window={"sliding_window": None, "use_sliding_window": True},
        defaults={"partial_rotary_factor": 1.0},
        settings=("original_max_position_embeddings",),
        fused={
            "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "mlp.gate_up_proj": ("gate_proj", "up_proj"),
        },
        refused={"kernels": _NOT_MEASURED, "megatron": _NOT_MEASURED},
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
        refused={
            "kernels": "its norms after attention and MLP have no kernel",
            "megatron": "it has no norms after attention and MLP alone",
        },
    ),
    "starcoder2": Family(
        backend=True,
        layer=plain_mlp,
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
        settings=(
            *("embedding_dropout", "activation_function", "layer_norm_epsilon", "norm_type"),
            *("mlp_type", "scale_attention_softmax_in_fp32", "scale_attn_weights"),
        ),
        modules={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
        refused={
            "kernels": "their norms are RMSNorms, and their MLP has a gate",
            "megatron": _NOT_MEASURED,
        },
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
        settings=(
            *("layer_switch", "order_of_interleaved_layers", "position_embedding_type"),
            *("rotary_pct", "use_embedding_sharing", "use_gated_activation"),
            *("use_parallel_block", "use_parallel_embedding"),
        ),
        refused={
            "kernels": "their norms are RMSNorms, and their rotation is for every layer",
            "megatron": "its layers add attention before the MLP reads the stream",
        },
    ),
    "hunyuan_v1_dense": Family(
        backend=True,
        layer=normed_after_rotation,
        heads_first=True,
        # The names of tensors follow from the first operator with that site.
        modules={"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        refused={
            "kernels": "they norm q and k before they rotate them",
            "megatron": "it norms q and k before it rotates them",
        },
    ),
    "gemma": Family(
        # Both engines take the tanh form, also where an early config says hidden_act=gelu.
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        one_plus_weight=True,
        embedding_scale="sqrt_hidden",
        one_activation=True,
        defaults={"tie_word_embeddings": True},
        refused={
            "kernels": "its norms, its scaled embedding and its activation have no kernel",
            "megatron": _NOT_MEASURED,
        },
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
        refused={
            "kernels": "its norms over all heads of q and of k have no kernel",
            "megatron": "it norms each head of q and of k alone",
        },
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
        # The last key of the weights' sum is a guard against division by 0; transformers and vLLM
        # read none of the others.
        settings=("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free"),
        predictors="num_nextn_predict_layers",
        refused={"kernels": _INTERLEAVED, "megatron": _NOT_MEASURED},
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
        settings=("rotary_dim", "use_routing_bias", "use_qk_norm", "qk_norm_type"),
        refused={
            "kernels": "its norms over all heads of q and of k have no kernel",
            "megatron": "it norms each head of q and of k alone",
            "vllm": "vLLM's router on a CPU asserts a softmax, and its norms of q and k are no "
            "modules",
        },
    ),
    "glm4_moe": Family(
        layer=corrected_mixture,
        biases={"o_proj": False},
        experts=ExpertSettings(
            "moe_intermediate_size",
            sigmoid=True,
            grouped=True,
            known={
                **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), None),
                **{"routed_scaling_factor": None, "scoring_func": ("sigmoid",)},
                "topk_method": ("noaux_tc",),
            },
        ),
        defaults={
            **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
            "routed_scaling_factor": 1.0,
        },
        qk_norm="use_qk_norm",
        predictors="num_nextn_predict_layers",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that determine a model's sites."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    """The length of the longest sequence, in tokens; that of a longrope's short factors."""
    dtype: str
    """The checkpoint's own dtype, e.g. `bfloat16`."""
    sparse_layers: tuple[int, ...] = ()
    """The layers that send each token to a few experts."""
    experts: int = 0
    """The number of experts of each sparse layer."""
    top_k: int = 0
    """The number of experts to which a token is sent."""
    expert_intermediate: int = 0
    norm_topk: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    groups: int = 1
    """The number of equal groups of experts."""
    top_groups: int = 1
    """The number of groups to choose experts from: those whose two best scores add up highest."""
    weight_scale: float = 1.0
    """The factor by which the weights of a token's experts are multiplied in the end."""
    shared_intermediate: int = 0
    """The inner size of the shared experts, which are computed as one."""
    unrotated_layers: tuple[int, ...] = ()
    """The layers that do not rotate q and k."""
    qk_norm: bool = False
    """Whether the config enables norms of q and k, in a family that leaves them to the config."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def operators(self) -> Iterator[tuple[int | None, Operator]]:
        """(layer, operator) in execution order; layer is None for operators outside the layers."""
        for name in self.family.before:
            yield None, OPERATORS[name]
        for layer in range(self.layers):
            for name in self.family.layer(self, layer):
                yield layer, OPERATORS[name]
        for name in self.family.after:
            yield None, OPERATORS[name]

    @property
    def fused_rows(self) -> dict[str, dict[str, int]]:
        """Module of a layer in the checkpoint -> its operators, with the rows of each."""
        fused = self.family.fused.items()
        return {m: {op: self.size(OPERATORS[op].features) for op in ops} for m, ops in fused}

    def has(self, op: str) -> bool:
        """Whether any layer has that operator."""
        return any(op in self.family.layer(self, layer) for layer in range(self.layers))

    def correction(self, layer: int) -> tuple[int, ...]:
        """The dimensions of the correction of a layer's scores; empty without one."""
        choices = (OPERATORS[n] for n in self.family.layer(self, layer))
        return tuple(self.size(d) for o in choices if o.formula == "top_k" for d in o.weight)

    def heads_of(self, size: Size) -> int:
        """The number of heads that a dimension consists of; 1 if it does not count heads."""
        return {"query_heads": self.heads, "kv_heads": self.kv_heads}.get(size, 1)

    def size(self, size: Size) -> int:
        """The number of features of a dimension in this model."""
        if size == "one":
            return 1
        if size in ("query_heads", "kv_heads"):
            return self.heads_of(size) * self.head_dim
        if size in ("expert_slots", "hidden_slots"):
            return self.top_k * (
                self.hidden if size == "hidden_slots" else self.expert_intermediate
            )
        return getattr(self, size)


def original_context(config: Mapping[str, Any]) -> int | None:
    """The length up to which a longrope has its short factors; None for another rope. The engines
    differ beyond it: transformers chooses the factors by the longest position of each forward, and
    vLLM by the longest that it serves."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return None
    key = "original_max_position_embeddings"
    length = rope.get(key) or config.get(key)
    return length if type(length) is int and length > 0 else None


_MAX_SIZE = 1 << 28
"""The largest supported size of a model's dimension."""


def layer_kind(config: Mapping[str, Any], layer: int) -> str:
    """`full_attention`, or `sliding_attention` for a layer with a window, by config.json or, if
    that has no `layer_types`, by the period of its family; empty if neither says it."""
    family, kinds = FAMILIES.get(str(config.get("model_type"))), config.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer])
    if family is None or not family.period:
        return ""
    period = next(
        (p for k in family.period_keys if type(p := config.get(k)) is int and p), family.period
    )
    return "sliding_attention" if (layer + 1) % int(period) else "full_attention"


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head has the embedding's weight, by config.json or by the family's default."""
    family = FAMILIES.get(str(config.get("model_type")))
    defaults = family.defaults if family else {}
    return bool({**defaults, **config}.get("tie_word_embeddings"))


def cap_of(config: Mapping[str, Any], key: str) -> float | None:
    """The cap that a key of the config states, or the family's default; None for no cap."""
    family = FAMILIES.get(str(config.get("model_type")))
    stated = {**(family.defaults if family else {}), **config}.get(key) if key else None
    return None if stated is None else float(stated)


def multiplier_of(config: Mapping[str, Any], operator: Operator) -> float:
    """The number that multiplies the operator's output or, of a residual add, its branch."""
    if not operator.multiplier:
        return 1.0
    family = FAMILIES.get(str(config.get("model_type")))
    stated = {**(family.defaults if family else {}), **config}.get(operator.multiplier)
    factor = 1.0 if stated is None else float(stated)
    return 1 / factor if operator.divides else factor


def activation_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """The config's key for the activation, and the activation by config.json or by the family."""
    family = FAMILIES.get(str(config.get("model_type")))
    key, default = family.activation if family else ("hidden_act", "silu")
    return key, str(config.get(key) or default)


def predictor_layers(config: Mapping[str, Any]) -> int:
    """The number of layers after the decoder's, which predict further tokens."""
    family = FAMILIES.get(str(config.get("model_type")))
    count = config.get(family.predictors) if family else None
    return count if type(count) is int and count > 0 else 0


def _check_layers(model: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if the checkpoint has tensors of more or fewer layers than its config."""
    stored, wanted = stored_layers(model), config.get("num_hidden_layers")
    if type(wanted) is not int or wanted <= 0:
        return
    if stored not in (0, wanted, wanted + predictor_layers(config)):
        raise ModelError(
            f"{model}/config.json states num_hidden_layers={wanted}, and the checkpoint has "
            f"tensors of {stored} layers",
            "it is incomplete, or its config.json belongs to another model",
        )


_MAX_NAMED = 6
"""The largest number of settings that an error lists."""


def _of_no_family(config: Mapping[str, Any]) -> str:
    """The settings of a config.json that no known family has, for an error; empty if none."""
    every = frozenset().union(*(family.keys for family in FAMILIES.values()))
    names = sorted(unknown_settings(config, every))
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"; no known family has its {', '.join(names[:_MAX_NAMED])}{more}"


def _unrotated(model: Path, config: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """The layers that do not rotate q and k. Raises ModelError if the first layer is one."""
    layers = family.unrotated(config) if family.unrotated else ()
    if 0 in layers:
        raise ModelError(
            f"{model}/config.json: the first layer does not rotate q and k, and positions are "
            "checked by its rotation",
            WITHOUT_FAMILY,
        )
    return layers


def read_shape(model: Path) -> ModelShape:
    """The shape of the checkpoint in folder `model`, from its config.json. If that has no dtype, it
    is the dtype of the stored weights.

    Raises ModelError if the folder or its config is missing or unreadable, or if the family is
    unknown.
    """
    config = read_config(model)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in UNKNOWN_ROUTING:
        raise ModelError(
            f"{model}: model_type {kind!r} is not supported: {UNKNOWN_ROUTING[kind]}",
            WITHOUT_FAMILY,
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"{model}: model_type {kind!r} in config.json is not a known decoder family, so the "
            f"operators of its layers are unknown{_of_no_family(config)}",
            WITHOUT_FAMILY,
        )

    def size(name: str, default: int | None = None, largest: int = _MAX_SIZE) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise ModelError(
                f"{model}/config.json: {name} is {value!r}; it must be a positive whole number"
            )
        if value > largest:
            raise ModelError(
                f"{model}/config.json: {name} is {value}; at most {largest} is supported"
            )
        return value

    _check_layers(model, config)
    dtype = config.get("dtype") or config.get("torch_dtype") or stored_dtype(model) or "float32"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ModelError(f"{model}/config.json: dtype {dtype!r} is unknown", f"known: {known}")
    family = FAMILIES[kind]
    config = {**family.defaults, **config}
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    longest = size("max_position_embeddings")
    return ModelShape(
        model_type=kind,
        layers=size("num_hidden_layers", largest=10_000),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, hidden // heads)),
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        context=min(longest, original_context(config) or longest),
        dtype=dtype,
        qk_norm=bool(family.qk_norm and config.get(family.qk_norm)),
        unrotated_layers=_unrotated(model, config, family),
        **(read_experts(model, config, family.experts, size) if family.experts else {}),
    )
