"""The catalogue of operators: one record for each. No property of an operator is inferred from its
name.

Operators are connected by named values: an operator reads each of its `inputs` from the last
operator before it with that `output`. A family (`model.families`) thus only lists operators, and
the graph of a model (`model.sites`) follows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

OpClass = Literal[
    "elementwise", "reduction", "matmul", "attention", "recurrence", "routing", "logprob"
]
"""The classes of operators for which contracts have limits."""
Formula = Literal[
    "embedding",
    "rms_norm",
    "layer_norm",
    "linear",
    "rotary",
    "attention",
    "latent_attention",
    "residual",
    "activation",
    "log_softmax",
    "router",
    "top_k",
    "routing_weights",
    "expert_linear",
    "expert_activation",
    "combine",
    "short_conv",
    "decay",
    "sigmoid",
    "delta_rule",
    "gated_norm",
    "output_gate",
    "time_step",
    "step_decay",
    "state_space",
    "gated_then_normed",
    "silu_gate",
]
"""The formula of an operator; `probe.referee.reference` computes each in float64."""
Size = Literal[
    "one",
    "hidden",
    "head_dim",
    "heads",
    "query_heads",
    "kv_heads",
    "intermediate",
    "vocab",
    "experts",
    "top_k",
    "expert_intermediate",
    "shared_intermediate",
    "expert_slots",
    "hidden_slots",
    "gated_query_heads",
    "query_latent",
    "latent",
    "latent_and_key",
    "latent_query_heads",
    "rotated_query_heads",
    "rotated_key",
    "expanded_heads",
    "latent_values",
    "conv_taps",
    "delta_heads",
    "delta_inputs",
    "delta_width",
    "delta_values",
]
"""A dimension; `heads` counts the heads of q, and the others of heads the features of all of them.
A token has a slot for each of its experts: `expert_slots` and `hidden_slots` count the features of
all slots. `gated_query_heads` counts the features of the heads of q and of the gates beside them.
Of a latent attention, `latent` counts the features from which keys and values are computed,
`rotated_key` those of the one key that is rotated, `latent_and_key` both, `query_latent` those from
which queries are computed, `latent_query_heads` the features of all heads of q,
`rotated_query_heads` those of them that are rotated, `expanded_heads` the other features of keys
and the features of values of all heads, and `latent_values` those of values.
Of a gated delta net, `delta_heads` counts the heads of v, `delta_width` the features of one of
them, `delta_values` those of all of them, and `delta_inputs` those of q, k and v; of a state-space
model, these count the heads of x, and the features of x, B and C."""


class Sharding(NamedTuple):
    """How tensor-parallel ranks share an operator."""

    axis: Literal["none", "column", "row", "head", "vocabulary"]
    """The axis along which its weight or its output is cut; `row` is the axis of its inputs."""
    join: Literal["replicate", "concatenate", "sum"]
    """How the ranks' outputs are combined."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One canonical operator."""

    name: str
    op_class: OpClass
    formula: Formula
    part: Literal["attn", "mlp"] | None
    """The part of a layer that it belongs to; None if a model has it once."""
    inputs: tuple[str, ...]
    """The values whose row p it reads for its own row p."""
    output: str
    """The value that it computes: `query` is that of q_proj, then of q_norm, then of q_rope."""
    features: Size
    sharding: Sharding
    _: KW_ONLY
    prefix_inputs: tuple[str, ...] = ()
    """The values of which it reads every row up to and including p."""
    weight: tuple[Size, ...] = ()
    """The dimensions of its weight; empty if it has none."""
    module: str = ""
    """The module with its parameters in an HF checkpoint; for a layer's operator, in its layer."""
    tensor: str = "weight"
    """The name of its weight in that module."""
    weight_dtype: str = ""
    """The dtype in which engines keep its weight; empty for the model's."""
    bias: str = ""
    """The setting of config.json that gives it a bias."""
    bias_tensor: str = "bias"
    """The name of its bias in that module."""
    parameter: str = ""
    """The canonical name of its weight, if it differs from the site's."""
    tied_to: str = ""
    """The parameter that replaces its weight under `tie_word_embeddings`."""
    row: Literal["token", "sampled token"] = "token"
    """Whether it has a row for each token, or only for tokens whose next token was sampled."""
    rounded_to: str = ""
    """The dtype of its outputs, in whose roundings errors are counted; empty for the model's."""
    site_name: str = ""
    """The name of its site, if it shares that with an operator of other layers or models."""
    multiplier: str = ""
    """The config's key for a number that multiplies its output, or the branch of a residual add."""
    divides: bool = False
    """Whether it is divided by that number instead."""
    slots_of: str = ""
    """The value with the expert of each slot of a row, ascending; empty without slots."""

    @property
    def site(self) -> str:
        """The name of its site within a layer."""
        return self.site_name or self.name

    @property
    def of_expert(self) -> bool:
        """Whether each expert has its own weight for it."""
        return bool(self.slots_of and self.weight)


WHOLE, ROWS = Sharding("none", "replicate"), Sharding("row", "sum")
HEADS, COLUMNS = Sharding("head", "concatenate"), Sharding("column", "concatenate")
VOCABULARY = Sharding("vocabulary", "concatenate")
# fmt: off
_RECORDS = (
    Operator("embed", "elementwise", "embedding", None, (), "stream", "hidden",
        Sharding("vocabulary", "sum"), weight=("vocab", "hidden"), module="model.embed_tokens"),
    Operator("scaled_embed", "elementwise", "embedding", None, (), "stream", "hidden",
        Sharding("vocabulary", "sum"), weight=("vocab", "hidden"), module="model.embed_tokens",
        site_name="embed", multiplier="embedding_multiplier"),
    Operator("attn_norm", "reduction", "rms_norm", "attn", ("stream",), "normed", "hidden", WHOLE,
        weight=("hidden",), module="input_layernorm"),
    Operator("attn_layer_norm", "reduction", "layer_norm", "attn", ("stream",), "normed", "hidden",
        WHOLE, weight=("hidden",), module="input_layernorm", site_name="attn_norm"),
    Operator("q_proj", "matmul", "linear", "attn", ("normed",), "query", "query_heads", HEADS,
        weight=("query_heads", "hidden"), module="self_attn.q_proj", bias="attention_bias"),
    Operator("k_proj", "matmul", "linear", "attn", ("normed",), "key", "kv_heads", HEADS,
        weight=("kv_heads", "hidden"), module="self_attn.k_proj", bias="attention_bias"),
    Operator("v_proj", "matmul", "linear", "attn", ("normed",), "value", "kv_heads", HEADS,
        weight=("kv_heads", "hidden"), module="self_attn.v_proj", bias="attention_bias"),
    Operator("q_norm", "reduction", "rms_norm", "attn", ("query",), "query", "query_heads", HEADS,
        weight=("head_dim",), module="self_attn.q_norm"),
    Operator("k_norm", "reduction", "rms_norm", "attn", ("key",), "key", "kv_heads", HEADS,
        weight=("head_dim",), module="self_attn.k_norm"),
    Operator("wide_q_norm", "reduction", "rms_norm", "attn", ("query",), "query", "query_heads",
        HEADS, weight=("query_heads",), module="self_attn.q_norm", site_name="q_norm"),
    Operator("wide_k_norm", "reduction", "rms_norm", "attn", ("key",), "key", "kv_heads", HEADS,
        weight=("kv_heads",), module="self_attn.k_norm", site_name="k_norm"),
    Operator("v_norm", "reduction", "rms_norm", "attn", ("value",), "value", "kv_heads", HEADS,
        module="self_attn.v_norm"),
    Operator("key_v_norm", "reduction", "rms_norm", "attn", ("key",), "value", "kv_heads", HEADS,
        module="self_attn.v_norm", site_name="v_norm"),
    Operator("q_rope", "elementwise", "rotary", "attn", ("query",), "query", "query_heads", HEADS),
    Operator("k_rope", "elementwise", "rotary", "attn", ("key",), "key", "kv_heads", HEADS),
    Operator("rotated_q_norm", "reduction", "rms_norm", "attn", ("query",), "query", "query_heads",
        HEADS, weight=("head_dim",), module="self_attn.query_layernorm", site_name="q_norm"),
    Operator("rotated_k_norm", "reduction", "rms_norm", "attn", ("key",), "key", "kv_heads", HEADS,
        weight=("head_dim",), module="self_attn.key_layernorm", site_name="k_norm"),
    Operator("attn", "attention", "attention", "attn", ("query",), "attended", "query_heads", HEADS,
        prefix_inputs=("key", "value")),
    Operator("sink_attn", "attention", "attention", "attn", ("query",), "attended", "query_heads",
        HEADS, prefix_inputs=("key", "value"), weight=("heads",), module="self_attn",
        tensor="sinks", site_name="attn"),
    Operator("o_proj", "matmul", "linear", "attn", ("attended",), "branch", "hidden", ROWS,
        weight=("hidden", "query_heads"), module="self_attn.o_proj", bias="attention_bias"),
    Operator("q_a", "matmul", "linear", "attn", ("normed",), "query_latent", "query_latent", WHOLE,
        weight=("query_latent", "hidden"), module="self_attn.q_a_proj", bias="attention_bias"),
    Operator("q_a_norm", "reduction", "rms_norm", "attn", ("query_latent",), "query_latent",
        "query_latent", WHOLE, weight=("query_latent",), module="self_attn.q_a_layernorm"),
    Operator("q_b", "matmul", "linear", "attn", ("query_latent",), "query", "latent_query_heads",
        HEADS, weight=("latent_query_heads", "query_latent"), module="self_attn.q_b_proj"),
    Operator("latent_q_proj", "matmul", "linear", "attn", ("normed",), "query",
        "latent_query_heads", HEADS, weight=("latent_query_heads", "hidden"),
        module="self_attn.q_proj", site_name="q_proj"),
    Operator("kv_a", "matmul", "linear", "attn", ("normed",), "latent_and_key", "latent_and_key",
        WHOLE, weight=("latent_and_key", "hidden"), module="self_attn.kv_a_proj_with_mqa",
        bias="attention_bias"),
    Operator("kv_a_norm", "reduction", "rms_norm", "attn", ("latent_and_key",), "latent", "latent",
        WHOLE, weight=("latent",), module="self_attn.kv_a_layernorm"),
    Operator("latent_q_rope", "elementwise", "rotary", "attn", ("query",), "rotated_query",
        "rotated_query_heads", HEADS, site_name="q_rope"),
    Operator("latent_k_rope", "elementwise", "rotary", "attn", ("latent_and_key",), "key",
        "rotated_key", WHOLE, site_name="k_rope"),
    Operator("latent_attn", "attention", "latent_attention", "attn", ("query", "rotated_query"),
        "attended", "latent_values", HEADS, prefix_inputs=("latent", "key"),
        weight=("expanded_heads", "latent"), module="self_attn.kv_b_proj"),
    Operator("latent_o_proj", "matmul", "linear", "attn", ("attended",), "branch", "hidden", ROWS,
        weight=("hidden", "latent_values"), module="self_attn.o_proj", bias="attention_bias",
        site_name="o_proj"),
    Operator("gated_q_proj", "matmul", "linear", "attn", ("normed",), "gated_query",
        "gated_query_heads", HEADS, weight=("gated_query_heads", "hidden"),
        module="self_attn.q_proj", bias="attention_bias", site_name="q_proj"),
    Operator("gated_q_norm", "reduction", "rms_norm", "attn", ("gated_query",), "query",
        "query_heads", HEADS, weight=("head_dim",), module="self_attn.q_norm",
        site_name="q_norm"),
    Operator("attn_gate", "elementwise", "output_gate", "attn", ("attended", "gated_query"),
        "attended", "query_heads", HEADS),
    Operator("qkv_in", "matmul", "linear", "attn", ("normed",), "mixed", "delta_inputs", HEADS,
        weight=("delta_inputs", "hidden"), module="linear_attn.in_proj_qkv"),
    Operator("z", "matmul", "linear", "attn", ("normed",), "delta_gate", "delta_values", HEADS,
        weight=("delta_values", "hidden"), module="linear_attn.in_proj_z"),
    Operator("b", "matmul", "linear", "attn", ("normed",), "delta_b", "delta_heads", HEADS,
        weight=("delta_heads", "hidden"), module="linear_attn.in_proj_b"),
    Operator("a", "matmul", "linear", "attn", ("normed",), "delta_a", "delta_heads", HEADS,
        weight=("delta_heads", "hidden"), module="linear_attn.in_proj_a"),
    Operator("conv", "elementwise", "short_conv", "attn", (), "convolved", "delta_inputs", HEADS,
        prefix_inputs=("mixed",), weight=("delta_inputs", "one", "conv_taps"),
        module="linear_attn.conv1d"),
    Operator("decay", "elementwise", "decay", "attn", ("delta_a",), "log_decay", "delta_heads",
        HEADS, weight=("delta_heads",), module="linear_attn", tensor="A_log",
        bias_tensor="dt_bias", rounded_to="float32"),
    Operator("beta", "elementwise", "sigmoid", "attn", ("delta_b",), "delta_beta", "delta_heads",
        HEADS),
    Operator("delta", "recurrence", "delta_rule", "attn", (), "attended", "delta_values", HEADS,
        prefix_inputs=("convolved", "delta_b", "delta_a")),
    Operator("gated_norm", "reduction", "gated_norm", "attn", ("attended", "delta_gate"),
        "attended", "delta_values", HEADS, weight=("delta_width",), module="linear_attn.norm"),
    Operator("out_proj", "matmul", "linear", "attn", ("attended",), "branch", "hidden", ROWS,
        weight=("hidden", "delta_values"), module="linear_attn.out_proj"),
    Operator("xbc_in", "matmul", "linear", "attn", ("normed",), "mixed", "delta_inputs", HEADS,
        weight=("delta_inputs", "hidden"), module="mamba.in_proj_xbc"),
    Operator("dt_in", "matmul", "linear", "attn", ("normed",), "step_in", "delta_heads", HEADS,
        weight=("delta_heads", "hidden"), module="mamba.in_proj_dt"),
    Operator("dt", "elementwise", "time_step", "attn", ("step_in",), "step", "delta_heads", HEADS,
        weight=("delta_heads",), module="mamba", tensor="dt_bias"),
    Operator("dt_a", "elementwise", "step_decay", "attn", ("step",), "log_decay", "delta_heads",
        HEADS, weight=("delta_heads",), module="mamba", tensor="A_log", rounded_to="float32"),
    Operator("scan", "recurrence", "state_space", "attn", (), "attended", "delta_values", HEADS,
        prefix_inputs=("convolved", "step_in"), weight=("delta_heads",), module="mamba",
        tensor="D"),
    Operator("mamba_norm", "reduction", "gated_then_normed", "attn", ("attended", "delta_gate"),
        "attended", "delta_values", HEADS, weight=("delta_values",), module="mamba.norm"),
    Operator("mamba_gate", "elementwise", "silu_gate", "attn", ("attended", "delta_gate"),
        "attended", "delta_values", HEADS),
    Operator("parallel_out_proj", "matmul", "linear", "attn", ("attended",), "state_branch",
        "hidden", ROWS, weight=("hidden", "delta_values"), module="mamba.out_proj",
        site_name="out_proj"),
    Operator("attn_post_norm", "reduction", "rms_norm", "attn", ("branch",), "branch", "hidden",
        WHOLE, weight=("hidden",), module="post_attention_layernorm"),
    Operator("attn_residual", "elementwise", "residual", "attn", ("stream", "branch"), "stream",
        "hidden", WHOLE),
    Operator("scaled_attn_residual", "elementwise", "residual", "attn", ("stream", "branch"),
        "stream", "hidden", WHOLE, site_name="attn_residual", multiplier="residual_multiplier"),
    Operator("two_branch_residual", "elementwise", "residual", "attn",
        ("stream", "branch", "state_branch"), "stream", "hidden", WHOLE,
        site_name="attn_residual"),
    Operator("mlp_norm", "reduction", "rms_norm", "mlp", ("stream",), "normed", "hidden", WHOLE,
        weight=("hidden",), module="post_attention_layernorm"),
    Operator("mlp_layer_norm", "reduction", "layer_norm", "mlp", ("stream",), "normed", "hidden",
        WHOLE, weight=("hidden",), module="post_attention_layernorm", site_name="mlp_norm"),
    Operator("gate_proj", "matmul", "linear", "mlp", ("normed",), "gate", "intermediate", COLUMNS,
        weight=("intermediate", "hidden"), module="mlp.gate_proj", bias="mlp_bias"),
    Operator("up_proj", "matmul", "linear", "mlp", ("normed",), "up", "intermediate", COLUMNS,
        weight=("intermediate", "hidden"), module="mlp.up_proj", bias="mlp_bias"),
    Operator("act", "elementwise", "activation", "mlp", ("gate", "up"), "activated", "intermediate",
        COLUMNS),
    Operator("plain_act", "elementwise", "activation", "mlp", ("up",), "activated", "intermediate",
        COLUMNS, site_name="act"),
    Operator("down_proj", "matmul", "linear", "mlp", ("activated",), "branch", "hidden", ROWS,
        weight=("hidden", "intermediate"), module="mlp.down_proj", bias="mlp_bias"),
    Operator("parallel_down_proj", "matmul", "linear", "mlp", ("activated",), "mlp_branch",
        "hidden", ROWS, weight=("hidden", "intermediate"), module="mlp.down_proj", bias="mlp_bias",
        site_name="down_proj"),
    Operator("router", "matmul", "router", "mlp", ("normed",), "router_logits", "experts", WHOLE,
        weight=("experts", "hidden"), module="mlp.gate"),
    Operator("fp32_router", "matmul", "router", "mlp", ("normed",), "router_logits", "experts",
        WHOLE, weight=("experts", "hidden"), module="mlp.gate", site_name="router",
        rounded_to="float32"),
    Operator("fp32_stored_router", "matmul", "router", "mlp", ("normed",), "router_logits",
        "experts", WHOLE, weight=("experts", "hidden"), module="mlp.gate", weight_dtype="float32",
        site_name="router", rounded_to="float32"),
    Operator("biased_router", "matmul", "router", "mlp", ("normed",), "router_logits", "experts",
        WHOLE, weight=("experts", "hidden"), module="mlp.router", site_name="router"),
    Operator("experts", "routing", "top_k", "mlp", ("router_logits",), "chosen", "top_k", WHOLE),
    Operator("corrected_experts", "routing", "top_k", "mlp", ("router_logits",), "chosen", "top_k",
        WHOLE, weight=("experts",), module="mlp.gate", tensor="e_score_correction_bias",
        weight_dtype="float32", site_name="experts", rounded_to="float32"),
    Operator("statics_corrected_experts", "routing", "top_k", "mlp", ("router_logits",), "chosen",
        "top_k", WHOLE, weight=("one", "experts"), module="mlp.moe_statics",
        tensor="e_score_correction_bias", weight_dtype="float32", site_name="experts",
        rounded_to="float32"),
    Operator("routing_weights", "reduction", "routing_weights", "mlp", ("router_logits", "chosen"),
        "shares", "top_k", WHOLE),
    Operator("fp32_routing_weights", "reduction", "routing_weights", "mlp",
        ("router_logits", "chosen"), "shares", "top_k", WHOLE, site_name="routing_weights",
        rounded_to="float32"),
    Operator("expert_gate_proj", "matmul", "expert_linear", "mlp", ("normed",), "gate",
        "expert_slots", WHOLE, site_name="gate_proj", slots_of="chosen",
        weight=("expert_intermediate", "hidden"), module="mlp.experts.{}.gate_proj"),
    Operator("expert_up_proj", "matmul", "expert_linear", "mlp", ("normed",), "up",
        "expert_slots", WHOLE, site_name="up_proj", slots_of="chosen",
        weight=("expert_intermediate", "hidden"), module="mlp.experts.{}.up_proj"),
    Operator("expert_act", "elementwise", "expert_activation", "mlp", ("gate", "up"), "activated",
        "expert_slots", WHOLE, site_name="act", slots_of="chosen"),
    Operator("clamped_expert_act", "elementwise", "expert_activation", "mlp", ("gate", "up"),
        "activated", "expert_slots", WHOLE, site_name="act", slots_of="chosen"),
    Operator("expert_down_proj", "matmul", "expert_linear", "mlp", ("activated",), "rows",
        "hidden_slots", WHOLE, site_name="down_proj", slots_of="chosen",
        weight=("hidden", "expert_intermediate"), module="mlp.experts.{}.down_proj"),
    Operator("shared_gate_proj", "matmul", "linear", "mlp", ("normed",), "gate",
        "shared_intermediate", COLUMNS, weight=("shared_intermediate", "hidden"),
        module="mlp.shared_experts.gate_proj"),
    Operator("shared_up_proj", "matmul", "linear", "mlp", ("normed",), "up", "shared_intermediate",
        COLUMNS, weight=("shared_intermediate", "hidden"), module="mlp.shared_experts.up_proj"),
    Operator("shared_act", "elementwise", "activation", "mlp", ("gate", "up"), "activated",
        "shared_intermediate", COLUMNS),
    Operator("shared_down_proj", "matmul", "linear", "mlp", ("activated",), "shared", "hidden",
        ROWS, weight=("hidden", "shared_intermediate"), module="mlp.shared_experts.down_proj"),
    Operator("shared_gate", "matmul", "linear", "mlp", ("normed",), "shared_gate", "one", WHOLE,
        weight=("one", "hidden"), module="mlp.shared_expert_gate"),
    Operator("moe_out", "reduction", "combine", "mlp", ("rows", "shares", "chosen"), "branch",
        "hidden", WHOLE),
    Operator("moe_out_with_shared", "reduction", "combine", "mlp",
        ("rows", "shares", "chosen", "shared"), "branch", "hidden", WHOLE, site_name="moe_out"),
    Operator("moe_out_gated", "reduction", "combine", "mlp",
        ("rows", "shares", "chosen", "shared", "shared_gate"), "branch", "hidden", WHOLE,
        site_name="moe_out"),
    Operator("mlp_post_norm", "reduction", "rms_norm", "mlp", ("branch",), "branch", "hidden",
        WHOLE, weight=("hidden",), module="post_feedforward_layernorm"),
    Operator("mlp_residual", "elementwise", "residual", "mlp", ("stream", "branch"), "stream",
        "hidden", WHOLE),
    Operator("scaled_mlp_residual", "elementwise", "residual", "mlp", ("stream", "branch"),
        "stream", "hidden", WHOLE, site_name="mlp_residual", multiplier="residual_multiplier"),
    Operator("shared_mlp_residual", "elementwise", "residual", "mlp",
        ("stream", "branch", "shared"), "stream", "hidden", WHOLE, site_name="mlp_residual",
        multiplier="residual_multiplier"),
    Operator("rescaled_mlp_residual", "elementwise", "residual", "mlp", ("stream", "branch"),
        "stream", "hidden", WHOLE, weight=("one",), tensor="layer_scalar",
        site_name="mlp_residual"),
    Operator("parallel_residual", "elementwise", "residual", "mlp",
        ("stream", "branch", "mlp_branch"), "stream", "hidden", WHOLE, site_name="mlp_residual"),
    Operator("final_norm", "reduction", "rms_norm", None, ("stream",), "normed", "hidden", WHOLE,
        weight=("hidden",), module="model.norm"),
    Operator("final_layer_norm", "reduction", "layer_norm", None, ("stream",), "normed", "hidden",
        WHOLE, weight=("hidden",), module="model.norm", site_name="final_norm"),
    Operator("logits", "matmul", "linear", None, ("normed",), "logits", "vocab", VOCABULARY,
        weight=("vocab", "hidden"), module="lm_head", parameter="lm_head", tied_to="embed",
        row="sampled token"),
    Operator("divided_logits", "matmul", "linear", None, ("normed",), "logits", "vocab",
        VOCABULARY, weight=("vocab", "hidden"), module="lm_head", parameter="lm_head",
        tied_to="embed", row="sampled token", site_name="logits", multiplier="logits_scaling",
        divides=True),
    Operator("scaled_logits", "matmul", "linear", None, ("normed",), "logits", "vocab", VOCABULARY,
        weight=("vocab", "hidden"), module="lm_head", parameter="lm_head", tied_to="embed",
        row="sampled token", site_name="logits", multiplier="logit_scale"),
    Operator("head_scaled_logits", "matmul", "linear", None, ("normed",), "logits", "vocab",
        VOCABULARY, weight=("vocab", "hidden"), module="lm_head", parameter="lm_head",
        tied_to="embed", row="sampled token", site_name="logits",
        multiplier="lm_head_multiplier"),
    Operator("logprob", "logprob", "log_softmax", None, ("logits",), "logprob", "one", WHOLE,
        row="sampled token", rounded_to="float32"),
)
# fmt: on
OPERATORS = {operator.name: operator for operator in _RECORDS}
"""Operators by name, in the order of a layer's computation. A new operator is a record above."""


def layer_modules(
    operators: Iterable[str] = OPERATORS, modules: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Site -> its module in a decoder layer of an HF checkpoint, if it has one of its own.

    `operators`: those of the layer, by default all; `modules`: the family's `Family.modules`."""
    return {
        o.site: modules.get(o.name, o.module)
        for o in map(OPERATORS.__getitem__, operators)
        if o.part and o.module and o.tensor == "weight" and not o.of_expert
    }
