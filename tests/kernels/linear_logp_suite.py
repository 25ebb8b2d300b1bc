"""What linear_logp and linear_grpo_loss must do, for any backend, device and dtype.

T = tokens   H = hidden size   V = vocabulary
"""

from dataclasses import dataclass

import rlk_kernels as rk
import torch
from kernel_suite import LIMIT, rand
from rlk_kernels.ops.linear_logp.operator import linear_logp_ref
from torch import Tensor

KINDS = ("well_scaled", "peaked", "confident", "negative", "offset")


@dataclass(frozen=True)
class Case:
    """Inputs of the operator; `options` go to it as they are."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    options: dict


def case(
    t: int, h: int, v: int, dtype: torch.dtype, device: str, kind: str = "well_scaled",
    bias: bool = False, seed: int = 0, **options,
) -> Case:  # fmt: skip
    """Hidden states and a weight whose logits are of `kind`."""

    def r(*shape, seed, scale=1.0):
        return rand(*shape, dtype=dtype, device=device, seed=10 * seed + seed % 7, scale=scale)

    hidden, weight = r(t, h, seed=seed + 1), r(v, h, seed=seed + 2, scale=2 * h**-0.5)
    generator = torch.Generator().manual_seed(seed + 3)
    target = torch.randint(0, v, (t,), generator=generator).to(device)
    added = r(v, seed=seed + 4) if bias else None
    if kind == "peaked":
        weight = r(v, h, seed=seed + 2, scale=12 * h**-0.5)
    elif kind == "confident":  # the target's probability is about 0.999
        weight = r(v, h, seed=seed + 2)
        rows = weight[target].double()
        length = rows.norm(dim=-1, keepdim=True)
        reach = torch.log(torch.tensor(999.0 * v, dtype=torch.float64, device=device))
        for _ in range(8):  # the others add exp(reach**2 / (2 length**2)) each
            reach = torch.log(torch.tensor(999.0 * v, device=device).double()) + (
                (reach / length) ** 2 / 2
            )
        hidden = (rows * reach / length**2).to(dtype)
    elif kind == "negative":
        hidden, weight = hidden.abs() + 0.5, -(weight.abs() + 0.25)
    elif kind == "offset":
        added = torch.full((v,), 1e4, device=device, dtype=torch.float32)
    return Case(hidden, weight, target, added, options)


def outputs(c: Case, backend: str, rows=slice(None), **more) -> tuple[Tensor, ...]:
    """(logp, lse, entropy) of some rows."""
    return rk.linear_logp(
        c.hidden[rows], c.weight, c.target[rows], bias=c.bias, return_lse=True,
        return_entropy=True, backend=backend, **c.options, **more,
    )  # fmt: skip


def truth(c: Case, leaves=None) -> tuple[Tensor, ...]:
    hidden, weight, bias = leaves or (c.hidden, c.weight, c.bias)
    allowed = ("temperature", "softcap", "logit_scale")
    options = {name: c.options[name] for name in allowed if name in c.options}
    return linear_logp_ref(hidden, weight, c.target, bias, **options)


def torch_outputs(c: Case, leaves=None) -> tuple[Tensor, ...]:
    """torch at the operands' dtype: logits in it, the rest in fp32."""
    hidden, weight, bias = leaves or (c.hidden, c.weight, c.bias)
    x = hidden @ weight.mT
    x = (x if bias is None else x + bias).float()
    if "softcap" in c.options:
        x = c.options["softcap"] * torch.tanh(x / c.options["softcap"])
    z = x * c.options.get("logit_scale", 1.0) / c.options.get("temperature", 1.0)
    logs = torch.log_softmax(z, -1)
    logp = logs.gather(-1, c.target.clamp(min=0)[:, None]).squeeze(-1)
    logp = torch.where(c.target < 0, 0.0, logp)
    return logp, torch.logsumexp(z, -1), -(logs.exp() * logs).sum(-1)


def error(value: Tensor, exact: Tensor) -> float:
    """max |value - exact|; NaN and empty give infinity."""
    if value.numel() == 0 or value.shape != exact.shape:
        return float("inf")
    worst = (value.double() - exact.double()).abs().max()
    return float(worst) if bool(worst.isfinite()) else float("inf")


def equals_logp_of_linear(c: Case, backend: str, logit_dtype: torch.dtype, temperature: float):
    """Whether the fused number has the bits of the two operators one after the other."""
    fused = rk.linear_logp(
        c.hidden, c.weight, c.target, bias=c.bias, temperature=temperature,
        logit_dtype=logit_dtype, backend=backend,
    )  # fmt: skip
    logits = rk.linear(c.hidden, c.weight, c.bias, out_dtype=logit_dtype, backend=backend)
    whole = rk.logp(logits, c.target, temperature=temperature, backend=backend)
    return fused.numel() > 0 and bool(fused.isfinite().all()) and torch.equal(fused, whole)


def gradients(c: Case, run, ups, dtype=None) -> tuple[Tensor, ...]:
    """Gradients of sum(up x output) in hidden, weight (and bias) by `run(leaves)`."""
    leaves = [x for x in (c.hidden, c.weight, c.bias) if x is not None]
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
    arguments = leaves if len(leaves) == 3 else [*leaves, None]
    values = run(arguments)
    total = sum((x * up.to(x.dtype)).sum() for x, up in zip(values, ups, strict=True))
    return torch.autograd.grad(total, leaves)


def run_ours(c: Case, backend: str):
    """`run` of `gradients` for the operator."""

    def run(leaves):
        hidden, weight, bias = leaves
        return outputs(Case(hidden, weight, c.target, bias, c.options), backend)

    return run


def upstreams(c: Case, seed: int = 5) -> list[Tensor]:
    t = c.hidden.shape[0]
    device = str(c.hidden.device)
    return [rand(t, dtype=torch.float32, device=device, seed=seed + i) for i in range(3)]


def one_sequence_loss(c: Case, leaves, backend: str = "triton", advantage=None):
    """(loss, metrics) of linear_grpo_loss, the case's tokens as one sequence, all of them counting;
    leaves: hidden, weight and, where there is one, the bias."""
    hidden, weight, *bias = leaves
    advantage = torch.ones(1) if advantage is None else advantage
    return rk.linear_grpo_loss(
        hidden[None], weight, c.target[None], None, advantage,
        torch.ones(1, len(c.target)), bias=bias[0] if bias else None, backend=backend,
    )  # fmt: skip


def gradients_within_budget(c: Case, backend: str, logp_only: bool = False) -> list[float]:
    """For each gradient: error over what the budget rule allows (1 or less is within)."""
    ups = upstreams(c)
    if logp_only:
        ups = [ups[0], torch.zeros_like(ups[0]), torch.zeros_like(ups[0])]
    exact = gradients(c, lambda leaves: truth(c, leaves), ups, torch.float64)
    torchs = gradients(c, lambda leaves: torch_outputs(c, leaves), ups)
    mine = gradients(c, run_ours(c, backend), ups)
    errors = []
    for value, expected, other in zip(mine, exact, torchs, strict=True):
        scale = float(expected.abs().max()) + 1e-6
        allowed = error(other, expected) + LIMIT[c.hidden.dtype] * scale
        errors.append(error(value, expected) / allowed)
    return errors


def rows_that_differ(c: Case, backend: str, parts) -> int:
    """How many selections of rows have other outputs or hidden gradients than in the whole."""
    whole = outputs(c, backend)
    ups = upstreams(c)
    grad = gradients(c, run_ours(c, backend), ups)[0]
    count = 0
    for part in parts:
        some = Case(c.hidden[part], c.weight, c.target[part], c.bias, c.options)
        mine = outputs(some, backend)
        same = all(torch.equal(a, b[part]) for a, b in zip(mine, whole, strict=True))
        lone = gradients(some, run_ours(some, backend), [up[part] for up in ups])[0]
        count += not (same and torch.equal(lone, grad[part]))
    return count
