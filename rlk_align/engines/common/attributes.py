"""The settings of a live model, by the names that `compare.parity` compares."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rlk_align.engines.common.places import Place
from rlk_align.model.operators import OPERATORS


def per_layer(name: str, values: list[Any], layers: Sequence[int] | None = None) -> dict[str, Any]:
    """`{name: value}` with the commonest value, and each layer's exception. `layers`: those with
    these values; None for all."""
    if not values:
        return {}
    common = Counter(map(repr, values)).most_common(1)[0][0]
    shared = next(v for v in values if repr(v) == common)
    numbered = zip(range(len(values)) if layers is None else layers, values, strict=True)
    exceptions = {f"layers.{i}.{name}": v for i, v in numbered if repr(v) != common}
    return {name: shared, **exceptions}


def corrected_routing(
    groups: list[int], top_groups: list[int], scale: list[float]
) -> dict[str, Any]:
    """The attributes of sparse layers whose scores are corrected, from the values of each layer:
    the number of groups of experts, the number of groups that it chooses from, and the factor of
    its weights. Empty for a model without such layers."""
    return {
        **per_layer("expert_groups", groups),
        **per_layer("expert_groups_chosen", top_groups),
        **per_layer("expert_weight_scale", [float(f"{s:.6g}") for s in scale]),
    }


def activation_name(activation: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> str:
    """The name of a live activation, from its values and not from its class."""
    x = torch.linspace(-4.0, 4.0, 32)  # kernels of GPUs take multiples of 8
    known = {
        "silu": torch.nn.functional.silu(x),
        "gelu": torch.nn.functional.gelu(x),
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu(x),
        "relu2": torch.relu(x).square(),
        "swigluoai": x * torch.sigmoid(1.702 * x),
        "identity": x,
    }
    y = activation(x.to(dtype)).float()
    # tanh-GELU and GELU differ by 4.7e-4 at most, so the nearest is chosen; bf16 rounds to 2^-7.
    name, distance = min(
        ((n, (y - v).abs().mean().item()) for n, v in known.items()), key=lambda item: item[1]
    )
    return name if distance < 1e-2 else "unknown"


def plain_activation_name(mlp: Any, dtype: torch.dtype) -> str:
    """The name of the activation of an MLP, whose attribute for it has one of several names."""
    device = next(mlp.parameters()).device
    names = ("act_fn", "activation_fn", "act", "activation")
    act = next((getattr(mlp, name) for name in names if hasattr(mlp, name)), None)
    if act is None:
        # Experts that clamp multiply the activated gate by up + 1; here up is 0.
        def act(x: torch.Tensor) -> torch.Tensor:
            return mlp._apply_gate(torch.stack([x, torch.zeros_like(x)], dim=-1).flatten(-2))

    return activation_name(lambda x: act(x.to(device)).cpu(), dtype)


def gated_activation_name(mlp: Any, dtype: torch.dtype) -> str:
    """The name of the activation of an MLP whose `act_fn` multiplies the activated first half of
    its input by the second half, which is 1 here."""
    device = next(mlp.parameters()).device

    def act(x: torch.Tensor) -> torch.Tensor:
        x = x.to(device)
        # [1, F]: kernels need a token dimension.
        return mlp.act_fn(torch.cat([x, torch.ones_like(x)])[None])[0].cpu()

    return activation_name(act, dtype)


def norm_epsilon(norm: Any) -> float | None:
    """A norm's epsilon: `variance_epsilon` in transformers and vLLM, `eps` in torch."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


_NORMS = ("rms_norm", "gated_norm", "gated_then_normed")


def norm_epsilons(model: Any, places: Iterable[Place]) -> dict[str, float | None]:
    """Site -> epsilon, for each norm of a model."""
    return {
        p.sites[0]: norm_epsilon(model.get_submodule(p.module))
        for p in places
        if OPERATORS[p.sites[0].rpartition(".")[2]].formula in _NORMS
    }


def norm_attributes(epsilons: Mapping[str, float | None]) -> dict[str, Any]:
    """One epsilon for the norms of a layer, or one for each norm if they differ."""
    layers: dict[str, dict[str, Any]] = {}
    for site, epsilon in epsilons.items():
        layer, _, op = site.rpartition(".")
        layers.setdefault(layer, {})[op] = epsilon
    final = layers.pop("")
    each = [next(iter(e.values())) if len(set(e.values())) == 1 else e for e in layers.values()]
    return {**per_layer("norm_eps", each), "final_norm_eps": final["final_norm"]}


def rope_theta(inv_freq: torch.Tensor) -> float:
    """The base of an unscaled rotary embedding, from inv_freq_j = theta^(-2j/d)."""
    pairs = inv_freq.numel()
    if pairs < 2:
        return math.nan
    theta = float(inv_freq[-1].double()) ** (-pairs / (pairs - 1))
    return float(f"{theta:.5g}")


def rope_attributes(ropes: Sequence[tuple[Mapping[str, Any], torch.Tensor]]) -> dict[str, Any]:
    """The attributes of each layer's rotary embedding: its `rope_parameters`, and its live
    frequencies in radians for each position, `[pairs]`; none where no layer rotates."""
    if not ropes:
        return {}
    theta = [
        rope_theta(f) if p["rope_type"] == "default" else float(p["rope_theta"]) for p, f in ropes
    ]
    return {
        **per_layer("rope_type", [p["rope_type"] for p, _ in ropes]),
        **per_layer("rope_theta", theta),
        **per_layer("rope_dim", [2 * f.numel() for _, f in ropes]),
    }


FLOAT32_FREQUENCIES = 2.0**-18
"""By how much, as a share of it, an inverse frequency in float32 may be off: engines compute powers
differently."""


def rounded_frequencies(
    inv_freq: torch.Tensor, exact: Sequence[float], theta: float
) -> dict[str, Any]:
    """`rope_frequencies`: the dtype that a live rotary embedding's frequencies were rounded to,
    with the theta that they were computed by; empty where they are those of the checkpoint in
    float32, or others altogether."""
    if inv_freq.numel() != len(exact):
        return {}
    live, wanted = inv_freq.double(), torch.tensor(exact, dtype=torch.float64)
    off = float((live.cpu() / wanted - 1).abs().max())
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        held = bool((live.to(dtype).double() == live).all())
        if held and FLOAT32_FREQUENCIES < off <= unit:
            name = str(dtype).removeprefix("torch.")
            return {"rope_frequencies": f"rounded to {name}", "rope_theta": theta}
    return {}


def active_dropout(model: torch.nn.Module) -> dict[str, str]:
    """`dropout`: which modules of a model in training mode drop values, and with which probability;
    empty if none does."""
    active = {name: p for name, m in model.named_modules() if m.training and (p := _dropout(m))}
    if not active:
        return {}
    first, *more = active
    others = f" and {len(more)} more modules" if more else ""
    return {"dropout": f"{max(active.values()):g} in {first or 'the model'}{others}"}


def _dropout(module: torch.nn.Module) -> float:
    """The largest probability with which a module drops values in training mode: that of torch's
    dropout, or a float of an attention or a layer with `dropout` in its name."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p
    named = (v for n, v in vars(module).items() if "dropout" in n and isinstance(v, float))
    return max(named, default=0.0)


def processing(temperature: float, limits: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Which distribution the reported log-probs belong to: the raw one, or a processed one, of a
    temperature and of the tokens that the limits keep."""
    raw = temperature == 1.0 and not limits
    return {
        "temperature": temperature,
        "top_p": 1.0,
        "logprobs": "raw" if raw else "processed",
        **(limits or {}),
    }
