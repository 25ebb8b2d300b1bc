"""What a masked token holds reaches no gradient: not even NaN, of which 0 times is NaN.

T = tokens   H = hidden size   V = vocabulary
"""

import pytest
import rlk_kernels as rk
import torch
from linear_logp_suite import case
from rlk_kernels.losses.linear_grpo import launch as loss_launch
from rlk_kernels.ops.linear_logp import launch

T, H, V = 140, 32, 210
BACKENDS = ["torch", "triton"]
NOISE = [float("nan"), float("inf"), float("-inf")]
MASKED = torch.arange(T) % 7 == 3


def noisy(x):
    """x, and a copy in which masked rows hold what is no number."""
    copy = x.clone()
    for i, row in enumerate(MASKED.nonzero().flatten().tolist()):
        copy[row] = NOISE[i % 3]
    return copy


def of_linear_logp(c, hidden, backend, masked_by):
    """Gradients of hidden, weight, bias where a token is masked by its target or by where()."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, c.weight, c.bias)]
    target = torch.where(MASKED, -100, c.target) if masked_by == "target" else c.target
    logp, entropy = rk.linear_logp(
        leaves[0], leaves[1], target, bias=leaves[2], return_entropy=True, backend=backend,
        **c.options,
    )  # fmt: skip
    factor = torch.linspace(-1, 1, T)
    total = torch.where(MASKED, 0.0, logp * factor + 0.1 * entropy).sum()
    return torch.autograd.grad(total, leaves)


def of_loss(c, hidden, backend, masked_by, extra=None):
    """The same of linear_grpo_loss; `extra`: what old_logp, ref_logp and advantages hold there."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, c.weight, c.bias)]
    target = torch.where(MASKED, -100, c.target) if masked_by == "target" else c.target
    per_token = [torch.linspace(a, b, T) for a, b in ((-6, -3), (-2, 2), (-5, -4))]
    if extra is not None:
        per_token = [torch.where(MASKED, extra, x) for x in per_token]
    old, advantages, ref = per_token
    loss, metrics = rk.linear_grpo_loss(
        leaves[0], leaves[1], target, old, advantages, (~MASKED).long(), bias=leaves[2],
        ref_logp=ref, beta=0.1, clip=(0.9, 9.0), cu_seqlens=torch.tensor([0, 60, T]),
        backend=backend, **c.options,
    )  # fmt: skip
    grads = torch.autograd.grad(T * loss, leaves)
    scalars = [x.detach() for name, x in metrics.items() if name != "logp"]
    return [*grads, loss.detach(), torch.stack(scalars)]


def of_logp(c, hidden, backend, masked_by):
    """The same of logp, whose logits are the rows."""
    logits = (c.hidden @ c.weight.T).detach()
    logits = torch.where(hidden == c.hidden, 0.0, hidden)[:, :1] + logits
    logits.requires_grad_()
    target = torch.where(MASKED, -1, c.target) if masked_by == "target" else c.target
    total = torch.where(MASKED, 0.0, rk.logp(logits, target, backend=backend)).sum()
    return torch.autograd.grad(total, [logits])


OPERATORS = {"linear_logp": of_linear_logp, "linear_grpo_loss": of_loss, "logp": of_logp}


def contained(operator, backend, dtype, masked_by, softcap=None, **more):
    """Whether all gradients are numbers, and have the bits that they have without the noise."""
    c = case(T, H, V, dtype, "cpu", bias=True, softcap=softcap)
    run = OPERATORS[operator]
    clean = run(c, c.hidden, backend, masked_by)
    outputs = run(c, noisy(c.hidden), backend, masked_by, **more)
    pairs = zip(outputs, clean, strict=True)
    return all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs)


@pytest.mark.parametrize("masked_by", ["target", "where"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_masked_tokens_hidden_state_reaches_no_gradient(backend, operator, masked_by):
    assert contained(operator, backend, torch.float32, masked_by)


@pytest.mark.parametrize("operator", ["linear_logp", "linear_grpo_loss"])
@pytest.mark.parametrize(("backend", "dtype"), [("torch", torch.bfloat16), ("triton", torch.half)])
def test_in_sixteen_bits_with_a_softcap(backend, dtype, operator):
    assert contained(operator, backend, dtype, "where", softcap=9.0)


@pytest.mark.parametrize("extra", NOISE)
def test_neither_do_a_masked_tokens_other_numbers(backend, extra):
    assert contained("linear_grpo_loss", backend, torch.float32, "where", extra=extra)


def test_a_token_that_counts_is_not_silenced():
    """A gradient that should be NaN is: nothing is swept under the mask."""
    c = case(T, H, V, torch.float32, "cpu", bias=True)
    hidden = c.hidden.clone()
    hidden[0] = float("nan")
    for operator in ("linear_logp", "linear_grpo_loss"):
        for backend in BACKENDS:
            assert OPERATORS[operator](c, hidden, backend, "where")[1].isnan().any()


@pytest.mark.parametrize("operator", ["linear_logp", "linear_grpo_loss"])
def test_hidden_states_that_are_multiplied_as_they_are_are_noticed(operator, monkeypatch):
    """The planted fault: rows times 0 instead of rows of zeros."""

    def as_they_are(into, h, ids, rows, g, a, b, part):
        b = None if b is None else b[part]
        return launch._Part(h[part], ids[part], rows, g[part], a[part], b)

    monkeypatch.setattr(launch, "_copy_live_rows", as_they_are)
    monkeypatch.setattr(loss_launch, "clear_dead_rows", lambda *_: None)
    assert not contained(operator, "triton", torch.float32, "where")


def test_rows_scaled_by_zero_as_they_are_are_noticed(monkeypatch):
    def scaled(x, c, out):
        return out.copy_(x * c[:, None])

    assert contained("linear_grpo_loss", "triton", torch.float32, "where")
    monkeypatch.setattr(loss_launch, "scale_rows", scaled)
    assert not contained("linear_grpo_loss", "triton", torch.float32, "where")
