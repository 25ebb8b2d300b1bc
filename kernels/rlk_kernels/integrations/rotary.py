"""The frequencies of a rotary embedding, by config.json's `rope_parameters`, for all engines.

Each engine has formulas of its own. These follow transformers' order of operations, in fp32 on the
CPU, and a test checks that they have its bits. R = rotated pairs
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import DELTA_NETS, LATENTS

SUPPORTED = ("default", "linear", "llama3", "yarn", "proportional")
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
PARTIAL = ("phi3", "glm", "glm4", "glm4_moe", "minimax_m2", "gemma4_text", *DELTA_NETS)
"""Families in which all engines rotate a part of each head."""
INTERLEAVED = ("ernie4_5", "ernie4_5_moe", "glm", "glm4", "cohere2", *LATENTS)
"""Families in which features 2j and 2j + 1 of a head are a pair, and not j and j + half of it."""
NOT_FIXED = {
    "dynamic": "its frequencies follow the longest sequence of a batch",
    "longrope": "its frequencies and its scale follow the longest sequence of a batch",
}
"""Kinds that are not batch-invariant, and why."""


def has_alpha(rope: Mapping[str, Any]) -> bool:
    """Whether theta is multiplied once by alpha^(d / (d - 2)), in a kind of Hunyuan's that is named
    `dynamic`."""
    return rope.get("rope_type") == "dynamic" and bool(rope.get("alpha"))


def check(rope: Mapping[str, Any]) -> None:
    """Raises NotSupported for a rotation that the kernels do not compute."""
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED and not has_alpha(rope):
        why = f": {NOT_FIXED[kind]}" if kind in NOT_FIXED else ""
        raise NotSupported(f"rope_type={kind} is not supported{why}; {', '.join(SUPPORTED)} are")
    for name in NEEDED.get(kind, ()):
        if rope.get(name) is None:
            raise NotSupported(f"rope_type={kind} without a {name} is not supported")
    partial = rope.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and kind not in ("default", "proportional"):
        raise NotSupported(
            f"rope_type={kind} with partial_rotary_factor={partial} is not supported"
        )


def by_kind(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """config.json's `rope_parameters` of each kind of layer, or of all layers."""
    return [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]


def check_whole(family: str, rope: Mapping[str, Any]) -> None:
    """Raises NotSupported if a part of each head is to be rotated in a family for which engines
    rotate different parts."""
    partial = rope.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and family not in PARTIAL:
        raise NotSupported(
            f"partial_rotary_factor={partial} is not supported: in {family}, transformers rotates "
            "whole heads, and vLLM a part"
        )


def rotation(rope: Mapping[str, Any], rotary_dim: int) -> tuple[Tensor, Tensor | None]:
    """(inv_freq[R], scaling[1] of cos and sin, or None where it is 1), in fp32 whatever the default
    dtype is, because vLLM changes it while it builds a model. They are computed on the CPU, because
    GPUs round powers differently. Raises NotSupported as `check` does.
    """
    check(rope)
    kind, theta = rope.get("rope_type", "default"), rope["rope_theta"]
    if has_alpha(rope):
        theta = theta * rope["alpha"] ** (rotary_dim / (rotary_dim - 2))
    with torch.device("cpu"):
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        powers = theta**exponent
        if kind == "yarn":
            factor = attention_factor(rope)
            scaling = torch.tensor([factor], dtype=torch.float32)
            return _yarn(powers, rope), None if factor == 1.0 else scaling
        inv_freq = 1.0 / powers
        if kind == "proportional":
            # The frequencies of a whole head, of which only the first turn.
            inv_freq[int((rope.get("partial_rotary_factor") or 1.0) * rotary_dim // 2) :] = 0.0
            inv_freq = inv_freq / rope.get("factor", 1.0)
        if kind == "linear":
            inv_freq = inv_freq / rope["factor"]
        elif kind == "llama3":
            inv_freq = _llama3(inv_freq, rope)
    return inv_freq, None


def _llama3(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Divides the frequencies of long wavelengths by the factor, keeps those of short ones, and
    interpolates in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    wavelength = 2 * math.pi / inv_freq
    ramp = (context / wavelength - low) / (high - low)
    between = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    long = torch.where(wavelength > context / low, inv_freq / factor, between)
    return torch.where(wavelength < context / high, inv_freq, long)


def _yarn(powers: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Keeps the frequencies of pairs that turn often in the original context, divides those of
    pairs that turn seldom by the factor, and interpolates in between (Peng et al. 2023, section
    3.2)."""
    pairs, context = len(powers), rope["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        wavelength = context / (turns * 2 * math.pi)
        return (2 * pairs * math.log(wavelength)) / (2 * math.log(rope["rope_theta"]))

    first, last = pair_with(rope.get("beta_fast") or 32), pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    # A ramp of zero width is a step.
    width = (last if last != first else last + 0.001) - first
    ramp = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    # As transformers computes it: 1 - (1 - ramp) differs from the ramp in the last bits.
    unscaled = 1 - ramp
    return 1.0 / (rope["factor"] * powers) * (1 - unscaled) + 1.0 / powers * unscaled


def latent_scale(rope: Mapping[str, Any], width: int) -> float:
    """The scale of a latent attention's scores, for heads of `width` features, with and without a
    rotation."""
    of_all, scale = rope.get("mscale_all_dim"), width**-0.5
    if rope.get("rope_type", "default") == "default" or not of_all:
        return scale
    grown = 0.1 * of_all * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0
    return scale * grown * grown


def attention_factor(rope: Mapping[str, Any]) -> float:
    """The factor by which yarn multiplies cos and sin: `attention_factor`, or a value that follows
    from `factor`."""
    stated, factor = rope.get("attention_factor"), rope["factor"]
    if stated is not None:
        return float(stated)

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    by, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    # Like transformers, ignore one of the two without the other.
    return grown(by) / grown(of_all) if by and of_all else grown(1)
