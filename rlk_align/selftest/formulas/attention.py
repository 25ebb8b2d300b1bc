"""Faulty attention cores: softmax(scale q kᵀ, where visible) v in float32, for one sequence."""

import dataclasses

import torch

from rlk_align.selftest.formulas.rounding import through_fp8, through_int8
from rlk_align.selftest.planting.operands import Attention, Formula, formula


def _scores(a: Attention, group: torch.Tensor | None = None) -> torch.Tensor:
    """float32 `[H, T, S]`, -inf where not visible; `group`: the key head of each query head."""
    key = a.key.float()[:, _group(a) if group is None else group]
    scores = torch.einsum("thd,shd->hts", a.query.float(), key) * a.scale
    return scores.masked_fill(~a.visible, -torch.inf)


def _group(a: Attention) -> torch.Tensor:
    heads, shared = a.query.shape[1], a.key.shape[1]
    return torch.arange(heads, device=a.query.device) // (heads // shared)


def _mixed(
    a: Attention, probabilities: torch.Tensor, group: torch.Tensor | None = None
) -> torch.Tensor:
    """`[T, H, D]`."""
    value = a.value.float()[:, _group(a) if group is None else group]
    return torch.einsum("hts,shd->thd", probabilities.float(), value)


def _probabilities(a: Attention, scores: torch.Tensor) -> torch.Tensor:
    """The softmax over the keys, beside the sink of each head."""
    if a.sinks is None:
        return scores.softmax(-1)
    sinks = a.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def _attend(a: Attention) -> torch.Tensor:
    return _mixed(a, _probabilities(a, _scores(a)))


def sinks_left_out(_: float) -> Formula:
    """The probabilities of the keys add up to 1."""
    return lambda a: _attend(dataclasses.replace(a, sinks=None))


def _rescaled(a: Attention, factor: float) -> torch.Tensor:
    return _attend(dataclasses.replace(a, scale=a.scale * factor))


def scale_missing(_: float) -> Formula:
    """Scores are q kᵀ."""
    return lambda a: _rescaled(a, 1.0 / a.scale)


def scale_twice(_: float) -> Formula:
    """Scores are q kᵀ / d."""
    return lambda a: _rescaled(a, a.scale)


def scale_off(strength: float) -> Formula:
    """Scores are larger by a share."""
    return lambda a: _rescaled(a, 1.0 + strength)


def mscale_missing(_: float) -> Formula:
    """Scores are q kᵀ / √d."""
    return lambda a: _rescaled(a, a.query.shape[-1] ** -0.5 / a.scale)


def scaled_by_latent(_: float) -> Formula:
    """Scores are q kᵀ / √(the width of the latent and of the rotated key)."""
    return lambda a: _rescaled(a, a.latent**-0.5 / a.scale)


def _masked(a: Attention, visible: torch.Tensor) -> torch.Tensor:
    """Attention with this mask; a query that would see no key keeps its own mask."""
    visible = torch.where(visible.any(-1, keepdim=True), visible, a.visible)
    return _attend(dataclasses.replace(a, visible=visible))


def _own_key(a: Attention) -> torch.Tensor:
    """bool `[T, S]`: the last key that each query sees."""
    keys = torch.arange(a.visible.shape[1], device=a.visible.device)
    last = torch.where(a.visible, keys, -1).amax(-1, keepdim=True)
    return keys == last


def blind_to_itself(_: float) -> Formula:
    """Query p sees the keys up to p - 1."""
    return lambda a: _masked(a, a.visible & ~_own_key(a))


def sees_the_next(_: float) -> Formula:
    """Query p sees the keys up to p + 1, where the forward has them."""
    return lambda a: _masked(
        a,
        a.visible
        | _own_key(a).roll(1, -1).index_fill(-1, torch.tensor([0], device=a.visible.device), False),
    )


@formula
def window(a: Attention, strength: float) -> torch.Tensor:
    """Query p sees the last 1 / `strength` keys."""
    keys = torch.arange(a.visible.shape[1], device=a.visible.device)
    last = torch.where(a.visible, keys, -1).amax(-1, keepdim=True)
    return _masked(a, a.visible & (keys > last - round(1 / strength)))


@formula
def window_wider(a: Attention, _: float) -> torch.Tensor:
    """Query p also sees the key before the first one that it sees."""
    earlier = a.visible.roll(-1, -1)
    earlier[:, -1] = False
    return _attend(dataclasses.replace(a, visible=a.visible | earlier))


def _turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates `[N, H, D]` by angles of the base 10,000, in the half-split form."""
    pairs = x.shape[-1] // 2
    speed = 1e4 ** (-torch.arange(pairs, device=x.device).double() / pairs)
    angles = (positions[:, None, None].double() * speed).float()
    a, b = x.float().split(pairs, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@formula
def rotated(a: Attention, _: float) -> torch.Tensor:
    """Queries and keys are rotated by their positions first."""
    keys = torch.arange(len(a.key), device=a.key.device)
    query = _turned(a.query, keys[len(keys) - len(a.query) :])
    return _attend(dataclasses.replace(a, query=query, key=_turned(a.key, keys)))


@formula
def first_key_hidden(a: Attention, _: float) -> torch.Tensor:
    """The first visible key is masked."""
    first = a.visible & (a.visible.cumsum(-1) == 1)
    return _masked(a, a.visible & ~first)


@formula
def key_heads_swapped(a: Attention, _: float) -> torch.Tensor:
    """Key heads 0 and 1 are swapped."""
    order = torch.arange(a.key.shape[1], device=a.key.device)
    order[:2] = order[:2].flip(0)
    return _attend(dataclasses.replace(a, key=a.key[:, order]))


@formula
def groups_interleaved(a: Attention, _: float) -> torch.Tensor:
    """Query head h reads key and value head h mod n."""
    group = torch.arange(a.query.shape[1], device=a.query.device) % a.key.shape[1]
    return _mixed(a, _probabilities(a, _scores(a, group)), group)


@formula
def bf16_softmax(a: Attention, _: float) -> torch.Tensor:
    """Scores, exponentials, the quotient, and their sum after every key are rounded to bf16."""
    scores = _scores(a).bfloat16()
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(e[..., :1])
    for key in e.split(1, -1):
        total += key
    return _mixed(a, e / total)


@formula
def one_more_below(a: Attention, _: float) -> torch.Tensor:
    """softmax with exp(0) added to the sum."""
    scores = _scores(a)
    largest = scores.amax(-1, keepdim=True)
    e = (scores - largest).exp()
    return _mixed(a, e / (e.sum(-1, keepdim=True) + (-largest).exp()))


def kv_in_int8(_: float) -> Formula:
    """Keys and values through int8."""
    return lambda a: _attend(
        dataclasses.replace(a, key=through_int8(a.key), value=through_int8(a.value))
    )


def kv_in_fp8(_: float) -> Formula:
    """Keys and values through fp8."""
    return lambda a: _attend(
        dataclasses.replace(a, key=through_fp8(a.key), value=through_fp8(a.value))
    )


@formula
def stale_by_one(a: Attention, _: float) -> torch.Tensor:
    """In a decode step the newest key and value are those of the token before."""
    if not a.decoding:
        return a.result
    key, value = (torch.cat([t[:-1], t[-2:-1]]) for t in (a.key, a.value))
    return _attend(dataclasses.replace(a, key=key, value=value))
