"""What the tests of Liger, cut-cross-entropy and verl ask of this operator: their shapes, their
inputs' distributions and their tolerances, written afresh.

An implementation is `run(hidden, weight, target, bias, temperature, softcap)` -> (logp, entropy).
T = tokens   H = hidden size   V = vocabulary
"""

import torch
from torch import Tensor

LIGER = [
    # T, H, V, temperature, dtype, (atol, rtol) of outputs, (atol, rtol) of gradients
    (521, 7, 13, 0.7, torch.float32, (1e-5, 1.3e-6), (2e-5, 2e-5)),
    (17, 31, 257, 0.8, torch.float32, (6e-5, 6e-5), (6e-5, 6e-5)),
    (19, 33, 259, 1.2, torch.float32, (6e-5, 6e-5), (6e-5, 6e-5)),
]
LIGER_LARGE = [(1025, 64, 131072, 0.8, torch.bfloat16, (8e-2, 5e-2), (8e-2, 5e-2))]
CCE_SHAPES = [(256, 128, 512), (252, 128, 507), (252, 123, 507)]
CCE = [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]
VERL_SHAPES = [
    (1937, 3584, 152064), (2169, 896, 151936), (1530, 2048, 32256), (1388, 4096, 102400),
]  # fmt: skip


def _outputs(hidden, weight, target, bias, temperature, softcap) -> tuple[Tensor, Tensor]:
    """torch at the operands' dtype: logits in it, the rest in fp32 (or float64)."""
    x = hidden @ weight.T
    x = x if bias is None else x + bias
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    z = (x if x.dtype == torch.float64 else x.float()) / temperature
    logs = torch.log_softmax(z, -1)
    logp = logs.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return torch.where(target < 0, 0.0, logp), -(logs.exp() * logs).sum(-1)


def _close(a: Tensor, b: Tensor, limit: tuple[float, float]) -> bool:
    atol, rtol = limit
    return a.numel() > 0 and bool(((a - b).abs() <= atol + rtol * b.abs()).all())


def liger(run, spec, device: str) -> bool:
    """Negative log-likelihood and entropy of the tokens that count, and both gradients."""
    t, h, v, temperature, dtype, limit, gradient_limit = spec
    r = torch.Generator().manual_seed(42)
    target = torch.randint(v, (t,), generator=r).to(device)
    target[::11] = -100
    hidden, weight = (torch.randn(*s, generator=r).to(device, dtype) for s in ((t, h), (v, h)))
    on = target >= 0
    ups = [torch.randn(t, generator=r).to(device), torch.randn(t, generator=r).to(device) * on]
    results = []
    for f in (run, _outputs):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logp, entropy = f(*leaves, target, None, temperature, None)
        total = (logp * ups[0]).sum() + (entropy * ups[1]).sum()
        results.append(((logp, entropy * on), torch.autograd.grad(total, leaves)))
    (mine, grads), (theirs, theirs_grads) = results
    values = all(_close(a, b, limit) for a, b in zip(mine, theirs, strict=True))
    return values and all(
        _close(a, b, gradient_limit) for a, b in zip(grads, theirs_grads, strict=True)
    )


def cut_cross_entropy(run, shape, dtype, limit, softcap, bias: bool, device: str) -> bool:
    """Loss, then gradients of its mean: no element further from fp32 than torch's own + limit."""
    t, h, v = shape
    r = torch.Generator().manual_seed(0)
    hidden = (torch.randn(t, h, generator=r) / h**0.5).to(device, dtype)
    weight = torch.randn(v, h, generator=r).to(device, dtype)
    weight[: min(t, v) // 2] = hidden[: min(t, v) // 2]
    added = (torch.randn(v, generator=r) * 0.02).to(device, dtype) if bias else None
    target = torch.randint(0, v, (t,), generator=r).to(device)
    target[torch.randperm(t, generator=r)[: t // 5].to(device)] = -100
    results = []
    for f, kind in ((run, dtype), (_outputs, dtype), (_outputs, torch.float32)):
        leaves = [x.to(kind).clone().requires_grad_() for x in (hidden, weight)]
        extra = [] if added is None else [added.to(kind).clone().requires_grad_()]
        logp = f(*leaves, target, extra[0] if extra else None, 1.0, softcap)[0]
        grads = torch.autograd.grad(logp.mean(), [*leaves, *extra])
        results.append([logp.detach(), *(g.float() for g in grads)])
    mine, theirs_grads, exact = results
    checks = [
        bool(((a - e).abs() <= (b - e).abs() + limit).all())
        for a, b, e in zip(mine, theirs_grads, exact, strict=True)
    ]
    return all(checks if dtype != torch.float32 else checks[:1])


def verl(run, shape, device: str) -> bool:
    """bf16 operands against torch on their fp32 copies, temperature 1.5, entropy too."""
    t, h, v = shape
    r = torch.Generator(device=device).manual_seed(3)

    def uniform(*size):
        x = torch.rand(*size, generator=r, device=device) - 0.5
        return x.to(torch.bfloat16).requires_grad_()

    hidden, weight = uniform(t, h), uniform(v, h)
    target = torch.randint(0, v, (t,), generator=r, device=device)
    ups = [torch.rand(t, generator=r, device=device) * 2 - 1]
    ups.append(torch.rand(t, generator=r, device=device) - 0.5)
    results = []
    for f, wide in ((run, False), (_outputs, True)):
        operands = [x.float() if wide else x for x in (hidden, weight)]
        out = f(*operands, target, None, 1.5, None)
        total = sum((x * up).sum() for x, up in zip(out, ups, strict=True))
        grads = torch.autograd.grad(total, (hidden, weight))
        results.append([x.detach() for x in (*out, *grads)])
        del out, total, operands
    limits = [(1e-3, 2e-4), (5e-3, 5e-4), (2e-2, 4e-2), (2e-2, 4e-2)]
    return all(_close(a, b, limit) for a, b, limit in zip(*results, limits, strict=True))
