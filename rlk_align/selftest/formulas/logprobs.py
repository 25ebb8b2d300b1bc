"""Faulty log-probs: log softmax(logits / temperature)[target], in float32."""

import math

import torch

from rlk_align.selftest.planting.operands import Formula, Report, formula


def _chosen(logprobs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logprobs.float().gather(-1, targets[:, None]).squeeze(-1)


def _all(report: Report, temperature: float | None = None) -> torch.Tensor:
    """`[N, V]`."""
    divisor = report.temperature if temperature is None else temperature
    return (report.logits.float() / divisor).log_softmax(-1)


def temperature(strength: float) -> Formula:
    """At a temperature higher by a share."""
    return lambda r: _chosen(_all(r, r.temperature * (1.0 + strength)), r.targets)


def temperature_twice(_: float) -> Formula:
    """Divided by the temperature twice."""
    return lambda r: _chosen(_all(r, r.temperature**2), r.targets)


def _renormalised(report: Report, allowed: torch.Tensor) -> torch.Tensor:
    """Renormalises over the allowed tokens `[N, V]` and the target."""
    allowed = allowed.scatter(-1, report.targets[:, None], True)
    scaled = report.logits.float() / report.temperature
    return _chosen(scaled.masked_fill(~allowed, -torch.inf).log_softmax(-1), report.targets)


@formula
def top_p(r: Report, _: float) -> torch.Tensor:
    """Over the likeliest tokens whose probabilities reach 0.9."""
    p, order = _all(r).exp().sort(-1, descending=True)
    allowed = p.cumsum(-1) - p < 0.9
    return _renormalised(r, torch.zeros_like(allowed).scatter(-1, order, allowed))


@formula
def top_k(r: Report, _: float) -> torch.Tensor:
    """Over the 50 likeliest tokens."""
    order = r.logits.topk(min(50, r.logits.shape[-1]), -1).indices
    none = torch.zeros_like(r.logits, dtype=torch.bool)
    return _renormalised(r, none.scatter(-1, order, True))


def in_bf16(_: float) -> Formula:
    """The log-softmax of bf16 logits in bf16."""
    return lambda r: _chosen((r.logits / r.temperature).bfloat16().log_softmax(-1), r.targets)


def next_label(_: float) -> Formula:
    """The label of the next row; the last row has the label of the first."""
    return lambda r: _chosen(_all(r), r.targets.roll(-1))


def _edge(report: Report) -> torch.Tensor:
    """bool `[N]`: the last of every 4 rows."""
    return torch.arange(len(report.targets), device=report.targets.device) % 4 == 3


@formula
def another_at_the_edge(r: Report, _: float) -> torch.Tensor:
    """Scores rows at an edge against the likeliest token other than their target."""
    others = _all(r).scatter(-1, r.targets[:, None], -torch.inf)
    return torch.where(_edge(r), others.amax(-1), r.result)


def zero(_: float) -> Formula:
    """Reports 0 in rows at an edge."""
    return lambda r: torch.where(_edge(r), 0.0, r.result)


def base_2(_: float) -> Formula:
    """log2."""
    return lambda r: _chosen(_all(r), r.targets) / math.log(2.0)
