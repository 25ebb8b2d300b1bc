"""Faults of norms, projections, activations and residual adds."""

from rlk_align.selftest.faults.fault import Fault, Strength

_SHARES = (1e-4, 5e-4, 1e-3, 5e-3, 0.02)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections of a dense layer."""

NORMS = {
    "norm-eps": Fault(
        ("layers.0.attn_norm",),
        "epsilon is too large",
        "norms:larger_eps",
        Strength("added to epsilon", 1e-3, (1e-6, 1e-5, 1e-4, 1e-3)),
    ),
    "norm-cast-order": Fault(
        ("layers.1.mlp_norm",),
        "rounded before the weight instead of after it, or the other way round",
        "norms:other_cast_order",
        idle="dtype=float32",
        expected="rounding",
    ),
    "norm-statistics-bf16": Fault(
        ("layers.1.attn_norm",), "the mean square is computed in bf16", "norms:statistics_in_bf16"
    ),
    "norm-centred": Fault(
        ("layers.0.mlp_norm",), "the mean is subtracted: LayerNorm for RMSNorm", "norms:centred"
    ),
    "norm-weight-left-out": Fault(
        ("layers.3.q_norm",), "the weight is not applied", "norms:weight_left_out"
    ),
    "norm-weight-plus-one": Fault(
        ("layers.1.k_norm",), "the weight is taken for an offset from 1", "norms:weight_plus_one"
    ),
    "norm-over-all-heads": Fault(
        ("layers.2.q_norm",),
        "the statistics are taken over all heads together",
        "norms:over_all_heads",
    ),
    "norm-each-head": Fault(
        ("layers.2.q_norm",),
        "the statistics are taken over each head, not over all of them",
        "norms:over_each_head",
        needs="variant",
        operator="wide_q_norm",
    ),
    "norm-one-left-out": Fault(
        ("layers.1.mlp_post_norm",),
        "the weight w is applied as w - 1, as where 1 + w is taken for w",
        "norms:weight_minus_one",
        needs="variant",
    ),
    "post-norm-left-out": Fault(
        ("layers.0.attn_post_norm",),
        "the norm after attention is skipped",
        "norms:left_out",
        needs="variant",
    ),
    "value-norm-left-out": Fault(
        ("layers.1.v_norm",),
        "values are not normed",
        "norms:left_out",
        needs="variant",
        operator="v_norm",
    ),
    "value-norm-of-keys-left-out": Fault(
        ("layers.3.v_norm",),
        "values are the keys before their norm, as they are",
        "norms:left_out",
        needs="variant",
        operator="key_v_norm",
    ),
    "norm-mean-kept": Fault(
        ("layers.1.attn_norm",),
        "the mean is not subtracted: RMSNorm for LayerNorm",
        "norms:mean_kept",
        needs="variant",
        operator="attn_layer_norm",
    ),
    "norm-bias-dropped": Fault(
        ("layers.2.attn_norm",),
        "the bias of a LayerNorm is dropped",
        "norms:bias_left_out",
        needs="variant",
        operator="attn_layer_norm",
    ),
    "norm-before-rotation": Fault(
        ("layers.1.q_norm",),
        "q is normed before it is rotated, not after",
        "rope:normed_before",
        needs="variant",
        operator="rotated_q_norm",
    ),
    "norm-output-fp8": Fault(
        ("layers.2.mlp_norm",),
        "the output goes through fp8 (e4m3), a scale for each row",
        "elementwise:through_fp8",
    ),
    "norm-channel": Fault(
        ("layers.3.k_norm",),
        "one channel is too large",
        "elementwise:one_channel_scaled",
        Strength("share", 0.05, (1e-3, 5e-3, 0.02, 0.05)),
    ),
    "norm-gain": Fault(
        ("layers.2.attn_norm",),
        "the output is too large",
        "elementwise:scaled_up",
        Strength("share", 0.02, _SHARES),
    ),
    "final-norm-left-out": Fault(("final_norm",), "the last norm is skipped", "norms:left_out"),
}
PROJECTIONS = {
    "proj-gain": Fault(
        ("layers.1.o_proj",),
        "the output is too large",
        "elementwise:scaled_up",
        Strength("share", 0.02, _SHARES),
    ),
    "proj-channel-shift": Fault(
        ("layers.2.up_proj",),
        "a constant is added to one channel",
        "elementwise:one_channel_shifted",
        Strength("absolute", 0.05, (1e-3, 5e-3, 0.02, 0.05)),
    ),
    "proj-accumulation": Fault(
        ("layers.1.down_proj",),
        "the sum is kept in bf16 between blocks of the inner dimension",
        "linear:bf16_accumulation",
        Strength("1 / columns of a block", 1 / 32, (1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 8)),
    ),
    "proj-weight-element": Fault(
        ("layers.2.q_proj",),
        "one element of the weight is another in the computation",
        "linear:one_element",
        Strength("in standard deviations of the weight", 8.0, (0.1, 1.0, 8.0)),
    ),
    "proj-weight-int8": Fault(
        ("layers.3.gate_proj",),
        "the weight is rounded to int8 on the fly, a scale for each row",
        "linear:int8_weight",
    ),
    "proj-weight-fp8": Fault(
        ("layers.0.v_proj",),
        "the weight is rounded to fp8 (e4m3) on the fly, a scale for each row",
        "linear:fp8_weight",
    ),
    "proj-input-fp8": Fault(
        ("layers.3.down_proj",),
        "the input is rounded to fp8 (e4m3), a scale for each row",
        "linear:fp8_input",
    ),
    "proj-stale-layer": Fault(
        tuple(f"layers.2.{op}" for op in _PROJECTIONS),
        "all projections of a layer compute with weights of before the last update",
        "linear:stale",
        Strength("change of the update, as a share of the weights", 0.02, _SHARES),
    ),
    "proj-tf32": Fault(
        ("layers.1.up_proj",),
        "a float32 product is computed in TF32",
        "linear:tf32",
        both="dtype=float32",
    ),
    "proj-fp32-as-bf16": Fault(
        ("layers.2.o_proj",),
        "a float32 product is computed in bf16",
        "linear:bf16_product",
        both="dtype=float32",
    ),
    "proj-bias-dropped": Fault(
        ("layers.1.k_proj",), "the bias is dropped", "linear:bias_dropped", needs="bias"
    ),
    "shared-expert-weak": Fault(
        ("layers.2.shared_down_proj",),
        "the row of the experts that every token is sent to is too small",
        "elementwise:scaled_down",
        Strength("share", 0.02, _SHARES),
        needs="shared",
    ),
    "proj-heads-swapped": Fault(
        ("layers.0.k_proj",), "heads 0 and 1 of the output are swapped", "elementwise:heads_swapped"
    ),
    "proj-one-position": Fault(
        ("layers.2.o_proj",),
        "rows at position 7 are too large",
        "elementwise:one_position",
        Strength("share", 0.1, (1e-3, 1e-2, 0.1)),
    ),
    "proj-ulp": Fault(
        ("layers.1.v_proj",),
        "every element is moved away from zero by this many units in the last place",
        "elementwise:ulps",
        Strength("ulps", 1.0, (1.0, 2.0, 4.0, 8.0)),
        expected="rounding",
    ),
    "proj-noise": Fault(
        ("layers.0.gate_proj",),
        "seeded noise on every element",
        "elementwise:noise",
        Strength("share of the element", 0.02, (1e-3, 2e-3, 5e-3, 0.02)),
    ),
    "decode-gain": Fault(
        ("layers.1.o_proj",),
        "the output is too large in decode steps only",
        "elementwise:scaled_up_in_decode",
        Strength("share", 0.1, (*_SHARES, 0.1)),
        engines=("hf", "vllm"),
        decode=True,
    ),
}
ACTIVATIONS = {
    "act-gelu": Fault(("layers.1.act",), "tanh-GELU for SiLU", "elementwise:gelu_for_silu"),
    "act-exact-gelu": Fault(
        ("layers.2.act",),
        "exact GELU for its approximation by tanh",
        "elementwise:exact_gelu",
        needs="variant",
        both="dtype=float32",
        operator="plain_act",
    ),
    "act-swapped": Fault(
        ("layers.2.act",), "gate and up are swapped", "elementwise:gate_up_swapped"
    ),
    "act-clamped": Fault(
        ("layers.0.act",),
        "gate and up are clamped before they are multiplied",
        "elementwise:clamped",
        Strength("1 / largest magnitude let through", 1.0, (0.1, 0.25, 0.5, 1.0)),
    ),
    "act-beta": Fault(
        ("layers.3.act",),
        "the sigmoid's slope is off: swish with another beta",
        "elementwise:other_beta",
        Strength("share", 0.05, (1e-3, 5e-3, 0.02, 0.05)),
    ),
}
RESIDUALS = {
    "residual-twice": Fault(
        ("layers.2.attn_residual",),
        "the residual stream is added twice",
        "elementwise:stream_twice",
    ),
    "residual-left-out": Fault(
        ("layers.3.mlp_residual",),
        "the residual stream is not added",
        "elementwise:stream_left_out",
    ),
    "residual-branch": Fault(
        ("layers.1.mlp_residual",),
        "the branch is scaled before it is added",
        "elementwise:branch_scaled",
        Strength("share", 0.02, _SHARES),
    ),
    "residual-multiplier-left-out": Fault(
        ("layers.2.attn_residual",),
        "the config's multiplier of branches is left out",
        "elementwise:multiplier_left_out",
        needs="variant",
        operator="scaled_attn_residual",
    ),
    "residual-shared-left-out": Fault(
        ("layers.2.mlp_residual",),
        "the row of a shared expert beside the block of experts is not added",
        "elementwise:second_branch_left_out",
        needs="variant",
        operator="shared_mlp_residual",
    ),
    "residual-scale-left-out": Fault(
        ("layers.2.mlp_residual",),
        "the layer's own multiplier of the residual stream is left out",
        "elementwise:multiplier_left_out",
        needs="variant",
        operator="rescaled_mlp_residual",
    ),
    "residual-fp8": Fault(
        ("layers.0.attn_residual",),
        "the residual stream goes through fp8 (e4m3), a scale for each row",
        "elementwise:through_fp8",
    ),
}
