"""Faults of latent attention (MLA)."""

from rlk_align.selftest.faults.fault import Fault, Strength

_ENGINES = ("hf", "vllm", "megatron")
_ATTENTION = ("layers.1.latent_attn",)

LATENT = {
    "latent-mscale-missing": Fault(
        _ATTENTION,
        "the scale of the scores lacks yarn's mscale",
        "attention:mscale_missing",
        engines=_ENGINES,
        needs="variant",
    ),
    "latent-scale-of-latent": Fault(
        _ATTENTION,
        "scores are scaled by the width of the latent, not by that of a head",
        "attention:scaled_by_latent",
        engines=_ENGINES,
        needs="variant",
    ),
    "latent-fp8": Fault(
        _ATTENTION,
        "expanded keys and values are kept in fp8 (e4m3)",
        "attention:kv_in_fp8",
        engines=_ENGINES,
        needs="variant",
    ),
    "latent-mask-late": Fault(
        _ATTENTION,
        "the causal mask is off by one: a query does not see its own key",
        "attention:blind_to_itself",
        engines=_ENGINES,
        needs="variant",
    ),
    "latent-stale": Fault(
        _ATTENTION,
        "keys and values are expanded by a weight from before the last update",
        "linear:stale_weight",
        Strength("change of the update, as a share of the weights", 0.02, (1e-3, 0.02)),
        engines=_ENGINES,
        kind="weights",
        expected="precheck",
        mismatch="layers.1.latent_attn",
        needs="variant",
    ),
    "copy-stale-latent": Fault(
        _ATTENTION,
        "queries and outputs of a decode step are multiplied by copies of the weight that expands "
        "latents from before the last update",
        "linear:stale_weight",
        Strength("change of the update, as a share of the weights", 0.02, (1e-3, 0.02)),
        engines=("vllm",),
        not_beside_kernels={"vllm": "the kernels read the weight in each pass, and keep no copy"},
        kind="copies",
        expected="precheck",
        mismatch="layers.1.latent_attn",
        needs="variant",
    ),
    "latent-norm-eps": Fault(
        ("layers.2.kv_a_norm",),
        "a number is added to the epsilon of the latent's norm",
        "norms:larger_eps",
        Strength("number", 1e-2, (1e-4, 1e-3, 1e-2)),
        engines=_ENGINES,
        needs="variant",
    ),
    "latent-rope-pairs": Fault(
        ("layers.1.q_rope",),
        "features j and j + d/2 are a pair, not 2j and 2j + 1",
        "rope:interleaved",
        engines=_ENGINES,
        needs="variant",
        operator="latent_q_rope",
    ),
    "latent-rope-part": Fault(
        ("layers.2.k_rope",),
        "the first features of the latent are rotated, not those after it",
        "rope:other_part",
        engines=_ENGINES,
        needs="variant",
        operator="latent_k_rope",
    ),
}
