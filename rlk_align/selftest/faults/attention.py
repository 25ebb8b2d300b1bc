"""Faults of rotary embeddings, attention and its cache."""

from rlk_align.selftest.faults.fault import Fault, Strength


def _both(layer: int) -> tuple[str, str]:
    return f"layers.{layer}.q_rope", f"layers.{layer}.k_rope"


ROPE = {
    "rope-base": Fault(
        _both(1),
        "the base of the rotary embedding is too large, by a factor",
        "rope:other_base",
        Strength("factor on the base, less 1", 1.0, (1e-4, 1e-3, 1e-2, 0.1, 1.0)),
    ),
    "rope-table-bf16": Fault(
        _both(2),
        "cos and sin are rounded to bf16, as some engines keep them",
        "rope:table_in_bf16",
        engines=("hf", "megatron"),
        not_beside_kernels=dict.fromkeys(
            ("hf", "megatron"), "the kernels round the table to the model's dtype themselves"
        ),
        expected="rounding",
    ),
    "rope-angles-bf16": Fault(
        _both(1), "position times frequency is rounded to bf16", "rope:angles_in_bf16"
    ),
    "rope-interleaved": Fault(
        _both(3),
        "features 2j and 2j + 1 are a pair, not j and j + d/2, or the other way round",
        "rope:interleaved",
    ),
    "rope-key-position": Fault(
        ("layers.2.k_rope",),
        "keys are rotated by a later position than their own",
        "rope:later_position",
        Strength("positions", 1.0, (1e-4, 1e-3, 1e-2, 0.1, 1.0)),
    ),
    "rope-positions-from-1": Fault(
        _both(0),
        "positions are counted from 1",
        "rope:later_position",
        Strength("positions", 1.0, (1.0,)),
        expected="precheck",
        mismatch="position",
    ),
    "rope-key-left-out": Fault(("layers.3.k_rope",), "keys are not rotated", "rope:left_out"),
    "rope-partial": Fault(
        ("layers.1.k_rope",),
        "only the faster half of the pairs is rotated",
        "rope:half_of_the_pairs",
    ),
    "rope-not-proportional": Fault(
        _both(3),
        "the pairs that turn are those of the first features, as in a partial rope, and not of the "
        "two halves of a head",
        "rope:first_features",
        needs="variant",
        # In these layers the rope is proportional.
        operator="key_v_norm",
    ),
    "rope-key-multiplier-left-out": Fault(
        ("layers.1.k_rope",),
        "the config's number does not multiply keys before they are rotated",
        "elementwise:input_not_multiplied",
        engines=("hf", "vllm"),
        needs="variant",
        operator="two_branch_residual",
    ),
    "rope-query-channel": Fault(
        ("layers.3.q_rope",),
        "one channel of the rotated query is too large",
        "elementwise:one_channel_scaled",
        Strength("share", 0.05, (1e-3, 1e-2, 0.05)),
    ),
    "decode-position": Fault(
        _both(2),
        "decode steps rotate by a later position than their own",
        "rope:later_position_in_decode",
        Strength("positions", 1.0, (1e-3, 1e-2, 0.1, 1.0)),
        engines=("hf", "vllm"),
        decode=True,
    ),
}
ATTENTION = {
    "attn-scale-missing": Fault(
        ("layers.1.attn",), "1/sqrt(d) is missing", "attention:scale_missing"
    ),
    "attn-scale-twice": Fault(
        ("layers.2.attn",), "1/sqrt(d) is applied twice", "attention:scale_twice"
    ),
    "attn-scale": Fault(
        ("layers.3.attn",),
        "the scale of the scores is a little too large",
        "attention:scale_off",
        Strength("share", 0.02, (1e-4, 1e-3, 1e-2, 0.1)),
    ),
    "attn-mask-late": Fault(
        ("layers.3.attn",),
        "the causal mask is off by one: a query does not see its own key",
        "attention:blind_to_itself",
    ),
    "attn-mask-early": Fault(
        ("layers.1.attn",),
        "the causal mask is off by one: a query sees the next key",
        "attention:sees_the_next",
    ),
    "attn-window": Fault(
        ("layers.2.attn",),
        "a sliding window, which the model does not have",
        "attention:window",
        Strength("1 / keys that a query sees", 1 / 16, (1 / 64, 1 / 32, 1 / 16, 1 / 4)),
    ),
    "attn-window-wide": Fault(
        ("layers.2.attn",),
        "the sliding window is a key too wide",
        "attention:window_wider",
        needs="variant",
        operator="sink_attn",
    ),
    "attn-sinks-left-out": Fault(
        ("layers.1.attn",),
        "the sinks are left out of the softmax",
        "attention:sinks_left_out",
        needs="variant",
        operator="sink_attn",
    ),
    "attn-rotated": Fault(
        ("layers.3.attn",),
        "q and k are rotated in a layer that does not rotate them",
        "attention:rotated",
        needs="variant",
        without="layers.3.q_rope",
    ),
    "attn-first-key-hidden": Fault(
        ("layers.2.attn",), "the first key of each sequence is masked", "attention:first_key_hidden"
    ),
    "attn-key-heads-swapped": Fault(
        ("layers.3.attn",),
        "key heads 0 and 1 are swapped, their values are not",
        "attention:key_heads_swapped",
    ),
    "attn-gqa-map": Fault(
        ("layers.1.attn",),
        "query head h reads key-value head h mod n, not h / group",
        "attention:groups_interleaved",
    ),
    "attn-softmax-bf16": Fault(
        ("layers.2.attn",), "the softmax is kept in bf16, its sum too", "attention:bf16_softmax"
    ),
    "attn-gain": Fault(
        ("layers.1.attn",),
        "the attention's output is too small",
        "elementwise:scaled_down",
        Strength("share", 0.015, (1e-4, 5e-4, 1e-3, 5e-3, 0.015)),
    ),
    "attn-one-head": Fault(
        ("layers.0.attn",),
        "one head's output is too large",
        "elementwise:one_head_scaled",
        Strength("share", 0.05, (1e-3, 5e-3, 1e-2, 0.05)),
    ),
    "attn-denominator": Fault(
        ("layers.3.attn",),
        "the softmax has one more exp(0) below the line, as of a padded key",
        "attention:one_more_below",
    ),
}
CACHE = {
    "kv-int8": Fault(
        ("layers.2.attn",),
        "keys and values are kept in int8, a scale for each token and head",
        "attention:kv_in_int8",
    ),
    "kv-fp8": Fault(
        ("layers.3.attn",), "keys and values are kept in fp8 (e4m3)", "attention:kv_in_fp8"
    ),
    "kv-stale": Fault(
        ("layers.1.attn",),
        "a decode step reads the cache as it was before its own token was written",
        "attention:stale_by_one",
        engines=("hf", "vllm"),
        decode=True,
    ),
}
