"""The bounds of sequences in a batch, by transformers' own rule: without a mask and a cache,
positions that restart mark sequences packed into one row; otherwise a row is one sequence.

B = rows of the batch, T = queries, S = keys, H = heads, D = size.
"""

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported


def real_first(real: Tensor) -> Tensor:
    """int64 [B * T]: the real rows of bool real[B, T] in order, then those of padding."""
    return real.flatten().to(torch.int8).argsort(descending=True, stable=True)


def boundaries(q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where sequences begin among queries q[B, T, H, D], and among keys k[B, S, H, D]: where
    positions[B or 1, T] do not increase by one, or without positions at each row."""
    batch, length, keys = q.shape[0], q.shape[1], k.shape[1]
    if positions is not None and length == keys > 1:
        cu = packed_starts(positions, batch)
        return cu, cu
    cu_q, cu_k = (
        torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=q.device)
        for n in (length, keys)
    )
    return cu_q, cu_k


def packed_starts(positions: Tensor, batch: int) -> Tensor:
    """int32 [sequences + 1]: where sequences begin in B rows of T tokens, and where the last one
    ends. A sequence begins with a row, and where positions[B or 1, T] do not increase by one. Waits
    for a GPU, because the positions decide the size of the result."""
    length = positions.shape[1]
    first = positions.expand(batch, length).clone()
    first[:, 1:] -= positions[:, :-1] + 1
    first[:, 0] = -1
    starts = first.flatten().nonzero().squeeze(1)
    return torch.nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)


def check_starts(positions: Tensor | None, cu: Tensor, batch: int) -> None:
    """Raises NotSupported if positions[B or 1, T] of B rows and cu_seq_lens_q begin sequences at
    different rows. Rows after the last sequence are ignored."""
    if positions is None:
        return
    first = positions[:, 1:] != positions[:, :-1] + 1
    first = torch.nn.functional.pad(first, (1, 0), value=True).expand(batch, -1).flatten()
    begins = torch.zeros(len(first) + 1, dtype=torch.bool, device=first.device)
    begins = begins.scatter(0, cu.to(torch.int64), True)[:-1]
    behind = torch.arange(len(first), device=first.device) >= cu[-1]
    _require(
        ((first == begins) | behind).all(),
        "cu_seq_lens_q does not begin sequences where position_ids start again",
    )


def check_rows(
    positions: Tensor | None, real: Tensor | None, length: int, window: int | None
) -> None:
    """Raises NotSupported if a row of T queries has more than one sequence, if positions count the
    padding before a sequence, by bool real[B, S], or, with a window, if real keys have a gap, which
    transformers counts as keys."""
    if positions is not None and length > 1:
        anew = positions[:, 1:] <= positions[:, :-1]
        if real is not None:
            queries = real[:, real.shape[1] - length :]
            anew = anew & queries[:, 1:] & queries[:, :-1]
        _require(
            ~anew.any(),
            "positions start again inside a row: packed sequences are supported only without a "
            "mask and with use_cache=False",
        )
    if positions is not None and real is not None:
        index = torch.arange(real.shape[1], device=real.device)[-length:]
        counted = (positions == index) & real[:, -length:] & ~real[:, :1]
        _require(
            ~counted.any(),
            "positions that count the padding before a sequence are not supported, because they "
            "change its bits; pass position_ids=(mask.cumsum(-1) - 1).clamp(min=0)",
        )
    if window is not None and real is not None:
        begins = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
        _require(
            (begins <= 1).all(),
            "a gap in the attention mask is not supported with a sliding window",
        )


def _require(condition: Tensor, message: str) -> None:
    """Raises NotSupported unless the condition holds. Compiled code and CUDA graphs cannot raise
    it, and use torch's asynchronous assertion."""
    capturing = condition.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing:
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise NotSupported(message)
