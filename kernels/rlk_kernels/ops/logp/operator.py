"""logp: the log-probability of one token per row of logits.

    z[v]  = (softcap tanh(logits[t, v] / softcap)) logit_scale / temperature    fp32, each step
                                                  rounded; without a softcap logits[t, v] itself
    logp  = log(exp(z[target]) / sum_v exp(z[v]))

Reduction order: the binary tree of `numerics/lse_tree` over the columns, with leaves of 16. A
program writes the node of a block of columns, which is a whole subtree, and the same tree merges
the blocks. With (n, s) of the row, logp = (y - log2 s) log(2), y = z[target] log2(e) - n. The torch
backend has the same tree in fp64, in natural units. `linear_logp` has the same bits.

Gradient: dlogits[v] = round( g logit_scale / temperature ([v == target] - p[v]) ), p in fp32, and
with a softcap times 1 - tanh(logits[v] / softcap)^2, from z.
`token_ids` get the log-probabilities that they would have as targets, in the same launch. `top_k`
returns the largest logits; ties go to the lowest id. Neither has a gradient. A negative target (an
ignored token) gives logp 0 and no gradient. A row whose upstream gradient is 0 has a gradient of 0,
even if its logits are NaN.

T = rows   V = vocabulary   J = token_ids of a row   K = top_k
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.linear_logp.options import check_options, check_token_ids, options_of
from rlk_kernels.ops.logp import portable


def logp_ref(
    logits: Tensor, target: Tensor, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The formula in float64, for tests."""
    z = logits.double()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = z * logit_scale / temperature
    return torch.log_softmax(z, -1).gather(-1, target[:, None].long()).squeeze(-1)


MAX_TOP = 128


_module = two_backends(portable, lazy_module("rlk_kernels.ops.logp.kernels"))


def _fake_backward(logits, *rest):
    return logits.new_empty(logits.shape)


@custom_op("logp_backward", _fake_backward, no_gradient=("logp", SECOND))
def _logp_backward(
    logits: Tensor, target: Tensor, root: Tensor, g: Tensor, softcap: float, scale: float,
    temperature: float, backend: str,
) -> Tensor:  # fmt: skip
    spec = options_of(torch.float32, softcap, scale, temperature)
    return _module("logp_backward", backend).backward(logits, target, root, g, spec)


def logp_grad(logits: Tensor, target: Tensor, root: Tensor, g: Tensor, backend: str) -> Tensor:
    """dlogits[T, V] of g[T], without temperature and softcap; logits and target are as in `logp`,
    except that a target of V or more is a column of another shard."""
    return _logp_backward(logits, target, root, g.contiguous(), 0.0, 1.0, 1.0, backend)


def _setup(ctx, inputs, output):
    logits, target, *_, softcap, scale, temperature, backend = inputs
    ctx.options = softcap, scale, temperature, backend
    ctx.inputs = len(inputs)
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, g, *_):
    none = (None,) * ctx.inputs
    if g is None:
        return none
    return _logp_backward(*ctx.saved_tensors, g.contiguous(), *ctx.options), *none[1:]


def _run(logits, target, token_ids, top_k, options, backend):
    spec = options_of(torch.float32, *options)
    return _module("logp", backend).forward(logits, target, token_ids, top_k, spec)


def _fake(logits, target, softcap, scale, temperature, backend):
    wide = wide_dtype(logits.dtype)
    inner = torch.float64 if backend == "torch" else torch.float32
    t = logits.shape[0]
    return logits.new_empty(t, dtype=wide), logits.new_empty(t, 2, dtype=inner)


@custom_op("logp", _fake, setup=_setup, backward=_backward)
def _logp(
    logits: Tensor, target: Tensor, softcap: float, scale: float, temperature: float, backend: str
) -> tuple[Tensor, Tensor]:
    """logp[T], and two numbers of each row for the gradient."""
    return _run(logits, target, None, 0, (softcap, scale, temperature), backend)[:2]


def _fake_more(logits, target, token_ids, top_k, *options):
    row = _fake(logits, target, *options)
    wide, t = row[0].dtype, logits.shape[0]
    id_logp = logits.new_empty(t, 0 if token_ids is None else token_ids.shape[1], dtype=wide)
    top = logits.new_empty(t, top_k, dtype=wide)
    return *row, id_logp, top, logits.new_empty(t, top_k, dtype=torch.int64)


@custom_op("logp_and_more", _fake_more, setup=_setup, backward=_backward)
def _logp_and_more(
    logits: Tensor, target: Tensor, token_ids: Tensor | None, top_k: int, softcap: float,
    scale: float, temperature: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_logp`, then logp of token_ids[T, J], logp of the top_k, and their ids; empty if they are
    not requested."""
    *row, id_logp, top, ids = _run(
        logits, target, token_ids, top_k, (softcap, scale, temperature), backend
    )
    t, wide = logits.shape[0], row[0].dtype
    id_logp = torch.empty(t, 0, dtype=wide, device=logits.device) if id_logp is None else id_logp
    if top is None:
        top = torch.empty(t, 0, dtype=wide, device=logits.device)
        ids = torch.empty(t, 0, dtype=torch.int64, device=logits.device)
    return *row, id_logp, top, ids


def logp(
    logits: Tensor,
    target: Tensor,
    *,
    token_ids: Tensor | None = None,
    top_k: int = 0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """log softmax(z)[t, target[t]] -> [T] float32 (float64 for float64), with z as above.

    logits[T, V]: bfloat16, float16, float32 (float64 on the torch backend), V >= 1; target[T]
    int32 or int64 below V, negative to ignore; temperature, softcap, logit_scale > 0. A target or
    an id of V or more raises IndexError on the torch backend and gives NaN on a GPU.

    With token_ids[T, J] or top_k = K (at most V and 128; logits must not be NaN) the result is a
    tuple of logp[T] and the requested ones of: log-probabilities [T, J] of token_ids, those [T, K]
    of the K largest logits, and their ids [T, K] in int64. Only logp[T] has a gradient (in
    `linear_logp` token_ids have one too). Raises UnsupportedShape, UnsupportedDtype, ValueError.
    """
    shape = logits.shape
    if len(shape) != 2 or target.shape != (shape[0],) or shape[1] == 0:
        raise UnsupportedShape(
            f"logp: logits[T, V] and target[T] are needed, not {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    if target.dtype not in (torch.int32, torch.int64) or not logits.is_floating_point():
        raise UnsupportedDtype(
            f"logp: logits are {logits.dtype} and target is {target.dtype}; floating logits and an "
            "int32 or int64 target are needed"
        )
    spec = check_options("logp", temperature, softcap, logit_scale, torch.float32)
    if token_ids is not None:
        check_token_ids("logp", token_ids, shape[0])
        token_ids = token_ids.contiguous()
    if not 0 <= top_k <= min(MAX_TOP, shape[1]):
        raise ValueError(f"logp: top_k must be from 0 to {min(MAX_TOP, shape[1])}, not {top_k}")
    chosen = choose("logp", backend, logits, target, token_ids)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    target = target.contiguous()
    options = spec.softcap, spec.scale, spec.temperature
    if token_ids is None and not top_k:
        return call(_logp, rows, target, *options, chosen)[0]
    row, _, of_ids, top, ids = call(
        _logp_and_more, rows, target, token_ids, top_k, *options, chosen
    )
    return (row, *((of_ids,) if token_ids is not None else ()), *((top, ids) if top_k else ()))
