"""The transformations by which an engine may compute a log-prob from logits: the stated one, and
those that are one mistake away from it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

AS_STATED = "as stated"
TOP_P = (0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.5)
FITTED_ELEMENTS = 1 << 21
"""The largest number of logits that a temperature is fitted to, by some 200 log-softmaxes."""
TOP_K = (1, 5, 10, 20, 40, 50, 64, 100, 200)
"""The values of top-k that are tried; TOP_P has those of top-p."""


@dataclass(frozen=True, slots=True)
class TokenContext:
    """The ids around each row; int64 `[N]`, -1 outside of the sequence."""

    targets: torch.Tensor
    """The token that is scored: the one after the row's own."""
    before: torch.Tensor
    """The row's own token."""
    after: torch.Tensor
    """The token after the target."""

    def __getitem__(self, part: slice) -> "TokenContext":
        return TokenContext(self.targets[part], self.before[part], self.after[part])


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """How a side says that it computes its log-probs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for all."""

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "Stated":
        """Reads the attributes of a trace. Raw log-probs have no temperature and no truncation."""
        if attributes.get("logprobs", "raw") == "raw":
            return cls()
        return cls(
            temperature=float(attributes.get("temperature", 1.0)),
            top_p=float(attributes.get("top_p", 1.0)),
            top_k=int(attributes.get("top_k", 0)),
        )


class Logits:
    """A block of logits, float64 `[N, V]`, which is sorted once for all truncations."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._ordered: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}

    def ordered(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids by descending probability, and the cumulative probabilities, `[N, V]` each."""
        if temperature not in self._ordered:
            scaled, order = (self.values / temperature).sort(-1, descending=True)
            self._ordered[temperature] = (order, scaled.softmax(-1).cumsum(-1))
        return self._ordered[temperature]


@dataclass(frozen=True, slots=True)
class Transformation:
    """logits, rows -> log-probs `[N]`; NaN if a row has no such label."""

    name: str
    words: str
    compute: Callable[[Logits, TokenContext], torch.Tensor]
    bf16: bool = False
    """Whether its result is rounded to bf16."""

    def __call__(self, logits: Logits, rows: TokenContext) -> torch.Tensor:
        return self.compute(logits, rows)


def resolution(logits: torch.Tensor) -> torch.Tensor:
    """`[N]`: the largest difference of two float32 log-softmaxes of one row. Each logit is rounded
    once, and the sum of V exponentials about log2 V times."""
    steps = 2 + math.log2(max(2, logits.shape[-1]))
    largest = logits.double().abs().amax(-1).clamp_min(1.0)
    return steps * torch.finfo(torch.float32).eps * largest


def transformations(
    logits: torch.Tensor, reported: torch.Tensor, rows: TokenContext, stated: Stated
) -> list[Transformation]:
    """Returns the stated transformation, then the others, without duplicates. Parameters are fitted
    to these rows."""
    t = stated.temperature
    candidates = [_scored(AS_STATED, "what the side states", stated)]
    if stated != Stated():
        candidates.append(
            _scored("raw", "raw: neither temperature nor truncation applied", Stated())
        )
    if t != 1.0:
        once = f"temperature {t:g}"
        twice = Stated(temperature=t * t, top_p=stated.top_p, top_k=stated.top_k)
        candidates.append(_scored("temperature twice", f"of {once} applied twice", twice))
        unscaled = Stated(top_p=stated.top_p, top_k=stated.top_k)
        if stated != Stated(temperature=t):
            candidates.append(_scored("no temperature", f"of {once} not applied", unscaled))
            candidates.append(_scored("no truncation", "not truncated", Stated(temperature=t)))
    candidates += _truncated(stated, logits.shape[-1])
    if logits.dtype != torch.bfloat16:
        candidates.append(
            Transformation(
                "bf16 logits",
                "of logits rounded to bf16",
                lambda x, r: _log_softmax(Logits(x.values.bfloat16().double()), r.targets, stated),
            )
        )
    candidates += [
        Transformation(
            "bf16 log-softmax",
            "of a log-softmax that is rounded to bf16",
            lambda x, r: _chosen((x.values / t).bfloat16().log_softmax(-1).double(), r.targets),
            bf16=True,
        ),
        Transformation(
            "next label",
            "scored against the label of the row after",
            lambda x, r: _log_softmax(x, r.after, stated),
        ),
        Transformation(
            "previous label",
            "scored against the row's own token, the label of the row before",
            lambda x, r: _log_softmax(x, r.before, stated),
        ),
        *(_in_base(base, stated) for base in (2, 10)),
    ]
    fitted = _fitted_temperature(logits, reported, rows)
    if all(abs(fitted - known) > 1e-5 * known for known in (t, t * t, 1.0)):
        other = Stated(temperature=fitted, top_p=stated.top_p, top_k=stated.top_k)
        candidates.append(_scored("another temperature", f"of temperature {fitted:.6g}", other))
    return candidates


def _truncated(stated: Stated, vocabulary: int) -> list[Transformation]:
    """Log-probs that are renormalised over a truncation that the side does not state."""
    t = stated.temperature
    candidates = [
        _scored(f"top-p {p:g}", f"renormalised over top-p {p:g}", Stated(temperature=t, top_p=p))
        for p in TOP_P
        if p != stated.top_p
    ]
    return candidates + [
        _scored(f"top-k {k}", f"renormalised over top-k {k}", Stated(temperature=t, top_k=k))
        for k in TOP_K
        if k != stated.top_k and k < vocabulary
    ]


def _in_base(base: int, stated: Stated) -> Transformation:
    return Transformation(
        f"log{base}",
        f"logarithms to the base {base}",
        lambda x, r: _log_softmax(x, r.targets, stated) / math.log(base),
    )


def _scored(name: str, words: str, stated: Stated) -> Transformation:
    return Transformation(name, words, lambda x, r: _log_softmax(x, r.targets, stated))


def _chosen(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-probs of these ids; NaN if an id is -1."""
    value = logprobs.gather(-1, ids.clamp_min(0)[:, None]).squeeze(-1)
    return torch.where(ids >= 0, value, torch.nan)


def _log_softmax(logits: Logits, ids: torch.Tensor, stated: Stated) -> torch.Tensor:
    """log softmax(logits / temperature)[id] over the tokens that top-p and top-k keep, and over the
    id itself."""
    whole = _chosen((logits.values / stated.temperature).log_softmax(-1), ids)
    if stated.top_p >= 1.0 and not stated.top_k:
        return whole
    order, up_to = logits.ordered(stated.temperature)
    # A token is kept if the likelier ones have less than top-p together.
    count = 1 + (up_to[:, :-1] < stated.top_p).sum(-1)
    if stated.top_k:
        count = count.clamp(max=stated.top_k)
    rank = (order == ids[:, None]).byte().argmax(-1)
    mass = up_to.gather(-1, count[:, None] - 1)[:, 0]
    return whole - torch.where(rank < count, mass, mass + whole.exp()).log()


def _fitted_temperature(logits: torch.Tensor, reported: torch.Tensor, rows: TokenContext) -> float:
    """The temperature with the least median residual of the reported log-probs, over at most 256
    rows, or fewer if the vocabulary is large."""
    few = slice(0, max(16, min(256, FITTED_ELEMENTS // logits.shape[-1])))
    x, y, ids = logits[few].double(), reported[few].double(), rows.targets[few]

    def off(temperature: float) -> float:
        residual = ((x / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0] - y).abs()
        return float(residual.nan_to_num(torch.inf).median())

    grid = [1.05**n for n in range(-48, 49)]
    best = min(grid, key=off)
    low, high = best / 1.05, best * 1.05
    # 60 steps of golden-section search are more than float64 resolves.
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if off(a) < off(b) else (a, high)
    return (low + high) / 2
