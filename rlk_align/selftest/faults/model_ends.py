"""Faults of embeddings, logits and log-probs, and of the inputs that an engine is given."""

from rlk_align.selftest.faults.fault import Fault, Strength

_SCORERS = ("hf", "megatron")

EMBEDDINGS = {
    "embed-scaled": Fault(
        ("embed",),
        "embeddings are too large",
        "elementwise:scaled_up",
        Strength("share", 0.02, (1e-3, 5e-3, 0.02)),
    ),
    "embed-multiplier-left-out": Fault(
        ("embed",),
        "the config's multiplier of the embedding is left out",
        "elementwise:multiplier_left_out",
        needs="variant",
        operator="scaled_embed",
    ),
    "embed-one-token": Fault(
        ("embed",),
        "the embedding of one token id is too large",
        "elementwise:one_token",
        Strength("share", 0.1, (1e-2, 0.1)),
    ),
}
LOGITS = {
    "logits-bf16": Fault(
        ("logits",),
        "float32 logits are rounded to bf16",
        "elementwise:through_bf16",
        both="dtype=float32",
    ),
    "logits-fp8": Fault(
        ("logits",),
        "the head computes with fp8 (e4m3) weights, a scale for each row",
        "linear:fp8_weight",
    ),
    "logits-untied": Fault(
        ("logits",),
        "the head is another tensor than the embedding, from before the last update",
        "linear:stale",
        Strength("change of the update, as a share of the weights", 0.02, (1e-3, 5e-3, 0.02)),
    ),
    "logits-multiplier-left-out": Fault(
        ("logits",),
        "the config's divisor of logits is left out",
        "elementwise:multiplier_left_out",
        needs="variant",
        operator="divided_logits",
    ),
    "logits-scale-left-out": Fault(
        ("logits",),
        "the config's multiplier of logits is left out",
        "elementwise:multiplier_left_out",
        needs="variant",
        operator="scaled_logits",
    ),
    "logits-softcap": Fault(
        ("logits",),
        "logits are soft-capped: c tanh(x / c)",
        "elementwise:softcap",
        Strength("1 / c", 1 / 30, (1 / 300, 1 / 100, 1 / 30)),
    ),
}
LOGPROBS = {
    "logprob-temperature": Fault(
        ("logprob",),
        "scored at another temperature than the one that it says",
        "logprobs:temperature",
        Strength("share above 1", 0.1, (1e-4, 1e-3, 1e-2, 0.1)),
    ),
    "logprob-temperature-twice": Fault(
        ("logprob",),
        "the temperature is applied twice",
        "logprobs:temperature_twice",
        engines=("hf:temperature=0.7", "megatron:temperature=0.7"),
        both="temperature=0.7",
    ),
    "logprob-top-p": Fault(
        ("logprob",), "processed: renormalised over the nucleus of p = 0.9", "logprobs:top_p"
    ),
    "logprob-top-k": Fault(
        ("logprob",), "processed: renormalised over the 50 likeliest", "logprobs:top_k"
    ),
    "logprob-bf16": Fault(("logprob",), "the log-softmax is computed in bf16", "logprobs:in_bf16"),
    "logprob-label-shift": Fault(
        ("logprob",),
        "each row is scored against the label of the row after it",
        "logprobs:next_label",
    ),
    "logprob-chunk-edge": Fault(
        ("logprob",),
        "every fourth row, a chunk's edge, is scored against the token that was sampled there",
        "logprobs:another_at_the_edge",
    ),
    "logprob-zero": Fault(("logprob",), "every fourth row is missing, and is 0", "logprobs:zero"),
    "logprob-base-2": Fault(("logprob",), "logarithms to the base 2", "logprobs:base_2"),
}
WEIGHTS = {
    "weight-element": Fault(
        ("layers.2.q_proj",),
        "one element of the live weight is another",
        "linear:element_changed",
        Strength("in standard deviations of the weight", 8.0, (0.1, 1.0, 8.0)),
        engines=_SCORERS,
        kind="weights",
        expected="precheck",
        mismatch="layers.2.q_proj",
    ),
    "weight-stale-layer": Fault(
        ("layers.1.q_proj", "layers.1.k_proj", "layers.1.v_proj"),
        "the live weights of a layer's q, k and v are of before the last update",
        "linear:stale_weight",
        Strength("change of the update, as a share of the weights", 0.02, (1e-3, 0.02)),
        engines=_SCORERS,
        kind="weights",
        expected="precheck",
        mismatch="layers.1.q_proj",
    ),
    "weight-norm": Fault(
        ("layers.3.mlp_norm",),
        "the live weight of a norm was not updated: ones",
        "linear:ones",
        kind="weights",
        expected="precheck",
        mismatch="layers.3.mlp_norm",
    ),
    "copy-stale-head": Fault(
        ("logits",),
        "the head computes with a copy of its weight from before the last update",
        "linear:stale_weight",
        Strength("change of the update, as a share of the weights", 0.02, (1e-3, 0.02)),
        engines=("vllm",),
        kind="copies",
        expected="precheck",
        mismatch="lm_head",
    ),
    "copy-stale-linear": Fault(
        ("layers.1.o_proj",),
        "a projection computes with a packed copy of its weight from before the last update",
        "linear:stale_weight",
        Strength("change of the update, as a share of the weights", 0.02, (1e-3, 0.02)),
        engines=("vllm",),
        kind="copies",
        expected="precheck",
        mismatch="layers.1.o_proj",
    ),
}
INPUTS = {
    "padding-positions": Fault(
        ("layers.0.q_rope",),
        "left-padded, positions count the padding",
        "inputs:columns",
        engines=("hf:batch=4,padding=left", "megatron:batch=4,padding=left"),
        not_beside_kernels={"hf": "the kernels refuse positions that count the padding"},
        kind="positions",
        expected="precheck",
        mismatch="position",
    ),
    "packed-boundary": Fault(
        ("layers.0.attn",),
        "the first packed sequence ends one token late",
        "inputs:one_late",
        engines=("megatron:input=packed",),
        kind="boundaries",
        expected="precheck",
        mismatch="sequence_boundary",
    ),
}
