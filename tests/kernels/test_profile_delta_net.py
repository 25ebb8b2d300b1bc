"""PROFILE.md, line by line, for gated delta nets and the attention beside them: the roundings that
all engines share, against a computation in float64 that rounds where the page says so, and nowhere
else."""

from itertools import pairwise

import torch
from bf16_rows import BF16, once, rand
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.delta_nets import DeltaNetCore

HK, HV, D, E, LENGTH, CHUNK = 1, 2, 16, 8, 150, 64
NET = profile.DeltaNet
delta_net = DeltaNetCore().rlk_core


def net() -> profile.DeltaNet:
    features = 2 * HK * D + HV * E
    return NET(rand(features, 4, seed=1), rand(HV, seed=2), rand(HV, seed=3), HK, HV, D)


def rows(length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed, a, b."""
    features = 2 * HK * D + HV * E
    return rand(length, features, seed=4), rand(length, HV, seed=5), rand(length, HV, seed=6)


def test_a_gate_of_attention_rounds_once() -> None:
    x, gate = rand(40, 96), rand(40, 96, seed=1, scale=3)
    share = gate.double().sigmoid()
    assert torch.equal(profile.gate(x, gate), once(x.double() * share))
    assert not torch.equal(profile.gate(x, gate), once(x.double() * once(share).double()))


def test_a_gated_norm_rounds_once() -> None:
    x, z, weight = rand(40, 24), rand(40, 24, seed=1, scale=2), rand(24, seed=2)
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gate = torch.nn.functional.silu(z.double())
    actual = profile.gated_norm(x, z, weight, 1e-6)
    assert torch.equal(actual, once(normed * weight.double() * gate))
    assert not torch.equal(actual, once(once(normed).double() * weight.double() * gate))


def convolved(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """In float64, before any rounding."""
    padded = torch.nn.functional.pad(x.double(), (0, 0, 3, 0))
    return (padded.unfold(0, 4, 1) * taps.double()).sum(-1)


def test_a_convolution_rounds_once() -> None:
    import rlk_kernels

    x, taps = rand(30, 20), rand(20, 4, seed=1)
    actual = rlk_kernels.causal_conv1d(x, taps, torch.tensor([0, 30]))
    exact = convolved(x, taps)
    assert torch.equal(actual, once(torch.nn.functional.silu(exact)))
    # Rounded before silu, as torch's own convolution is.
    assert not torch.equal(actual, once(torch.nn.functional.silu(once(exact).double())))


def gates(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = a.double() + net().dt_bias.double()
    decay = -net().a_log.double().exp() * torch.logaddexp(x, x.new_zeros(()))
    return decay.float(), once(b.double().sigmoid())


def test_a_decay_is_fp32() -> None:
    import rlk_kernels

    _, a, b = rows()
    g, _ = rlk_kernels.delta_gates(a, b, net().a_log, net().dt_bias)
    assert g.dtype == torch.float32
    assert torch.equal(g, gates(a, b)[0])
    assert not torch.equal(g, g.to(BF16).float())
    # Parameters that an engine keeps in fp32 are rounded to the dtype of the rows.
    mixed, *rest = rows(20)
    wide = net()._replace(a_log=net().a_log.float() * 1.001, dt_bias=net().dt_bias.float() * 1.001)
    narrow = wide._replace(a_log=wide.a_log.to(BF16), dt_bias=wide.dt_bias.to(BF16))
    cu = torch.tensor([0, 20])
    one, other = (delta_net(each, mixed, *rest, cu) for each in (wide, narrow))
    assert torch.equal(one, other)


def test_beta_is_rounded() -> None:
    import rlk_kernels

    _, a, b = rows()
    _, beta = rlk_kernels.delta_gates(a, b, net().a_log, net().dt_bias)
    assert torch.equal(beta, gates(a, b)[1])


def by_the_page(keep_u: bool = False) -> torch.Tensor:
    """[T, Hv, E]; keep_u: u is not rounded, which the page does not say."""
    mixed, a, b = rows()
    conv = once(torch.nn.functional.silu(convolved(mixed, net().conv))).double()
    g, beta = gates(a, b)
    q, k, v = conv.split([HK * D, HK * D, HV * E], -1)
    v = v.view(LENGTH, HV, E)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = once(q * D**-0.5).double(), once(k).double()
    out = torch.zeros(LENGTH, HV, E, dtype=BF16)
    for h in range(HV):
        state = torch.zeros(D, E)
        for first in range(0, LENGTH, CHUNK):
            read, sums, u = once(state).double(), [], []
            total = torch.zeros(())
            for t in range(first, min(first + CHUNK, LENGTH)):
                total = total + g[t, h]
                sums.append(total.double())
                decay = (sums[-1] - torch.stack(sums)).exp()
                here, step = sums[-1].exp(), beta[t, h].double()
                new = step * (v[t, h] - here * (k[t] @ read))
                for j, old in enumerate(u):
                    new = new - step * decay[j] * (k[t] @ k[first + j]) * old
                u.append(new if keep_u else once(new).double())
                row = here * (q[t] @ read)
                for j, old in enumerate(u):
                    row = row + once(decay[j] * (q[t] @ k[first + j])).double() * old
                out[t, h] = once(row)
            if len(u) == CHUNK:
                moved = sums[-1].exp() * state.double()
                for j, old in enumerate(u):
                    late = once((sums[-1] - sums[j]).exp() * old).double()
                    moved = moved + k[first + j][:, None] * late
                state = moved.float()
    return out


def test_a_delta_rule_rounds_where_the_page_says() -> None:
    actual = delta_net(net(), *rows(), torch.tensor([0, LENGTH]))
    assert torch.equal(actual, by_the_page())
    assert not torch.equal(actual, by_the_page(keep_u=True))


def test_a_delta_net_is_one_in_every_pass() -> None:
    x = rows()
    whole = delta_net(net(), *x, torch.tensor([0, LENGTH]))
    for cuts in (range(1, LENGTH), [64, 128], [37, 90]):
        chunks = (
            torch.full((3, HV, D, E), float("nan")), torch.full((3, CHUNK, HK, D), 7.0).to(BF16),
            torch.full((3, CHUNK, HV, E), 7.0).to(BF16), torch.full((3, CHUNK, HV), 7.0),
        )  # fmt: skip
        conv, parts = torch.full((3, 3, x[0].shape[1]), 7.0).to(BF16), []
        for begin, end in pairwise([0, *cuts, LENGTH]):
            kept = profile.Kept(conv, chunks, torch.tensor([2]), torch.tensor([begin]))
            part = [each[begin:end] for each in x]
            parts.append(delta_net(net(), *part, torch.tensor([0, end - begin]), kept))
        assert torch.equal(torch.cat(parts), whole)
    restarted = delta_net(net(), *x, torch.tensor([0, 64, LENGTH]))
    assert not torch.equal(restarted[64:], whole[64:])
