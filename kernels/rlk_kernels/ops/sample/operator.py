"""sample: one token per row of logits, and its log-probability.

    x[v]   = logits[t, v] in fp32           T = temperature[t], 1 where it is 0
    z[v]   = x[v] / T                       one rounding
    order  = the columns by x, largest first; equal x by column, lowest first; -0 equals +0
    kept   = columns with x > -inf, of which remain, in this order:
             min_p   those with x >= fp32(max x + T log(min_p)), in float64 up to the rounding
             top_k   the first top_k
             top_p   those before which less than ceil(top_p * mass) lies, with mass the sum over
                     the columns that min_p and top_k keep
    id     ~ exp(z[v]) / sum_kept exp(z[v])       temperature 0: the first column of the order
    logprob = log(exp(z[id]) / sum_kept exp(z[v]))   0 at temperature 0

A column's mass is an integer, floor(2**40 exp(z[v] - m)) with m next to max z, so that sums of
masses are exact: no order, split or shard changes the kept set. The log-prob has the bits of `logp`
on z with -inf in the columns that are not kept.

The draw walks down the log-sum-exp tree of `numerics/lse_tree` over the kept columns: at the node
over 2**(h+1) columns, with the sums l and r of its halves, it goes left if u_h (l + r) < l, in
float64. u_h = (w + 1/2) 2**-32, with w the word h mod 4 of Philox-4x32-10 (Salmon et al. 2011) with
key `keys[t]` and counter (low and high half of positions[t], h div 4, DRAWS). So an id depends
on the row's own logits, key and position: not on its batch, its place in it or padding.

A row with NaN or +inf, or without a logit above -inf, has no distribution. The torch backend raises
ValueError, which names the row; kernels on a GPU, which wait for nothing, give it the id -1 and a
NaN log-prob. So they do if the largest z is below -7e8.

T = rows   V = vocabulary
"""

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.sample import portable

MOST_COLUMNS = 1 << 22
"""The largest vocabulary."""
NO_GRADIENT = "a choice has no gradient; `logp` of the kept logits has"

_module = two_backends(portable, lazy_module("rlk_kernels.ops.sample.kernels"))


class Sampled(NamedTuple):
    """The tokens of T rows."""

    ids: Tensor
    """int64 [T]."""
    logprobs: Tensor
    """float32 [T] (float64 for float64 logits): of the id among the kept columns, at the
    temperature."""
    kept: Tensor
    """int32 [T], the number of kept columns; 1 at temperature 0."""
    mass: Tensor
    """Dtype of logprobs, [T]: the kept columns' share of the softmax at the temperature; 1 at
    temperature 0."""
    raw_logprobs: Tensor
    """Dtype of logprobs, [T]: of the id among all columns, at temperature 1; [0] if it is not
    requested."""


def sample_ref(
    row: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The probabilities [V] of one row's tokens in float64, for tests. Masses are not rounded."""
    x = row.double() + 0.0
    if temperature == 0:
        return torch.nn.functional.one_hot((x == x.max()).int().argmax(), len(x)).double()
    p = torch.softmax(x / temperature, -1)
    order = torch.sort(x, descending=True, stable=True).indices
    order = order[x[order] > -math.inf]
    if min_p > 0:
        order = order[x[order] >= x.max() + temperature * math.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        before = p[order].cumsum(0) - p[order]
        order = order[(before < top_p * p[order].sum()) | (torch.arange(len(order)) == 0)]
    kept = torch.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


def _fake_kept(logits, *rest):
    return logits.new_empty(logits.shape, dtype=torch.bool)


@custom_op("kept_tokens", _fake_kept, no_gradient=("kept_tokens", NO_GRADIENT))
def _kept_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: Tensor | None, backend: str,
) -> Tensor:  # fmt: skip
    return _module("kept_tokens", backend).kept_tokens(logits, temperature, top_k, top_p, min_p)


def _fake(logits, keys, positions, temperature, top_k, top_p, min_p, raw, backend):
    t, wide = logits.shape[0], torch.promote_types(logits.dtype, torch.float32)
    numbers = [logits.new_empty(n, dtype=wide) for n in (t, t, t if raw else 0)]
    kept = logits.new_empty(t, dtype=torch.int32)
    return logits.new_empty(t, dtype=torch.int64), numbers[0], kept, *numbers[1:]


@custom_op("sample", _fake, no_gradient=("sample", NO_GRADIENT))
def _sample(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor | None,
    top_p: Tensor | None, min_p: Tensor | None, raw: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    run = _module("sample", backend).sample
    return run(logits, keys, positions, temperature, top_k, top_p, min_p, raw)


Number: TypeAlias = Tensor | float | None
FLOATS, INTEGERS = (torch.float32,), (torch.int32, torch.int64)


def _of_rows(op: str, name: str, value: Number, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`value` as a tensor with a number for each of `rows`, or None if it is the number at which it
    changes nothing."""
    if not isinstance(value, Tensor):
        if value is None or value == _NOTHING[name]:
            return None
        low, high = _RANGES[name]
        if not low <= value <= high:
            raise ValueError(f"{op}: {name} must be from {low} to {high}, not {value}")
        return torch.full((rows.shape[0],), value, dtype=dtype, device=rows.device)
    if value.shape != (rows.shape[0],):
        raise UnsupportedShape(f"{op}: {name}[{rows.shape[0]}] is needed, not {tuple(value.shape)}")
    if value.dtype not in (INTEGERS if name == "top_k" else FLOATS):
        raise UnsupportedDtype(f"{op}: {name} is {value.dtype}; {dtype} is needed")
    return value.to(dtype).contiguous()


def temperatures(op: str, value: Number, rows: Tensor) -> Tensor:
    """The temperature of each of `rows`, float32 [T]."""
    heat = _of_rows(op, "temperature", value, rows, torch.float32)
    if heat is None:
        heat = torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device)
    return heat


def check_requests(op: str, keys: Tensor, positions: Tensor, rows: Tensor) -> None:
    """Raise UnsupportedShape or UnsupportedDtype if there is not one key and one position for each
    of `rows`."""
    for name, value, dtypes in (("keys", keys, INTEGERS[1:]), ("positions", positions, INTEGERS)):
        if value.shape != (rows.shape[0],):
            raise UnsupportedShape(
                f"{op}: {name}[{rows.shape[0]}] is needed, not {tuple(value.shape)}"
            )
        if value.dtype not in dtypes:
            raise UnsupportedDtype(f"{op}: {name} is {value.dtype}; {dtypes[-1]} is needed")


_NOTHING = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_RANGES = {
    "temperature": (0.0, math.inf), "top_k": (0, MOST_COLUMNS), "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}  # fmt: skip


def _arguments(
    op: str, logits: Tensor, temperature: Number, top_k: Number, top_p: Number, min_p: Number
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The arguments that `kept_tokens` and `sample` share, checked."""
    if logits.dim() != 2 or not 0 < logits.shape[1] <= MOST_COLUMNS:
        raise UnsupportedShape(
            f"{op}: logits[T, V] with 1 <= V <= {MOST_COLUMNS} are needed, not "
            f"{tuple(logits.shape)}"
        )
    if not logits.is_floating_point():
        raise UnsupportedDtype(f"{op}: logits are {logits.dtype}; floating-point ones are needed")
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    heat = temperatures(op, temperature, logits)
    return (
        rows, heat, _of_rows(op, "top_k", top_k, logits, torch.int32),
        _of_rows(op, "top_p", top_p, logits, torch.float32),
        _of_rows(op, "min_p", min_p, logits, torch.float32),
    )  # fmt: skip


def kept_tokens(
    logits: Tensor,
    *,
    temperature: Number = None,
    top_k: Number = None,
    top_p: Number = None,
    min_p: Number = None,
    backend: str | None = None,
) -> Tensor:
    """bool [T, V]: the columns among which `sample` draws at these settings. At temperature 0 that
    is the first of the largest logits. All columns are False in a row without a distribution.

    Arguments and errors are those of `sample`. The result has no gradient.
    """
    arguments = _arguments("kept_tokens", logits, temperature, top_k, top_p, min_p)
    chosen = choose("kept_tokens", backend, *arguments)
    return call(_kept_tokens, *arguments, chosen)


def sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    temperature: Number = None,
    top_k: Number = None,
    top_p: Number = None,
    min_p: Number = None,
    raw_logprobs: bool = False,
    backend: str | None = None,
) -> Sampled:
    """One token of each row of logits[T, V], its log-prob, and the size and mass of the kept set.

    logits: bfloat16, float16, float32 (float64 on the torch backend), after penalties, biases and
    masks of the request; a row may be part of a wider one (padding). keys[T]: int64, the seed of a
    row's request, any 64 bits; positions[T]: int32 or int64, the index of the token in its
    request. Rows with the same logits, key and position have the same token.

    temperature, top_k, top_p and min_p: a number, or a tensor [T] with a number for each row
    (float32; top_k int32 or int64). They change nothing at 1, 0, 1 and 0; in a tensor, a top_k
    below 1 and a top_p of 1 or more change nothing either. Temperature 0 takes the largest logit.
    raw_logprobs: also returns the log-prob of the token in the softmax of the logits themselves.

    Nothing is copied to the host and nothing waits, so a call can be captured in a CUDA graph
    (temperature and the others as tensors, whose contents may change between replays). Raises
    UnsupportedShape, UnsupportedDtype, ValueError, and what `backend.choose` raises.
    """
    arguments = _arguments("sample", logits, temperature, top_k, top_p, min_p)
    check_requests("sample", keys, positions, logits)
    chosen = choose("sample", backend, *arguments, keys, positions)
    rows, *rest = arguments
    where = keys.contiguous(), positions.long().contiguous()
    return Sampled(*call(_sample, rows, *where, *rest, raw_logprobs, chosen))
