"""Which rows of a batch are sequences, by transformers' own rule: without a mask and a cache,
positions that restart mark sequences packed into one row; otherwise a row is one sequence.

B = rows of the batch, T = queries, S = keys, H = heads, D = size.
"""

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotServed


def real_first(real: Tensor) -> Tensor:
    """int64 [B * T]: the real rows of bool real[B, T] in order, then those of padding."""
    return real.flatten().to(torch.int8).argsort(descending=True, stable=True)


def boundaries(q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where sequences begin, among queries q[B, T, H, D] and among keys k[B, S, H, D]: where
    positions[B or 1, T] do not go on by one, or with each row."""
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
    """int32 [sequences + 1]: where they begin in B rows of T tokens, and where the last ends:
    positions[B or 1, T] do not go on by one, or a row begins. A GPU is waited for: their number is
    in the positions."""
    length = positions.shape[1]
    first = positions.expand(batch, length).clone()
    first[:, 1:] -= positions[:, :-1] + 1
    first[:, 0] = -1
    starts = first.flatten().nonzero().squeeze(1)
    return torch.nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)


def check_starts(positions: Tensor | None, cu: Tensor, batch: int) -> None:
    """Raises NotServed where positions[B or 1, T] of B rows and cu_seq_lens_q begin sequences at
    other rows; those behind the last are of none."""
    if positions is None:
        return
    first = positions[:, 1:] != positions[:, :-1] + 1
    first = torch.nn.functional.pad(first, (1, 0), value=True).expand(batch, -1).flatten()
    begins = torch.zeros(len(first) + 1, dtype=torch.bool, device=first.device)
    begins = begins.scatter(0, cu.to(torch.int64), True)[:-1]
    behind = torch.arange(len(first), device=first.device) >= cu[-1]
    _require(
        ((first == begins) | behind).all(),
        "cu_seq_lens_q begins sequences elsewhere than position_ids, which start again with each",
    )


def check_rows(
    positions: Tensor | None, real: Tensor | None, length: int, window: int | None
) -> None:
    """Raises NotServed where rows of T queries do not hold one sequence each, where positions count
    padding in front, by bool real[B, S], or, with a window, where the keys that are real have a
    gap: transformers counts over it."""
    if positions is not None and length > 1:
        anew = positions[:, 1:] <= positions[:, :-1]
        if real is not None:
            queries = real[:, real.shape[1] - length :]
            anew = anew & queries[:, 1:] & queries[:, :-1]
        _require(
            ~anew.any(),
            "positions start again inside a row: sequences packed into one row are served without "
            "a mask and with use_cache=False",
        )
    if positions is not None and real is not None:
        index = torch.arange(real.shape[1], device=real.device)[-length:]
        counted = (positions == index) & real[:, -length:] & ~real[:, :1]
        _require(
            ~counted.any(),
            "positions that count the padding in front of a sequence are not served: it has other "
            "bits alone, and in a rollout; give position_ids=(mask.cumsum(-1) - 1).clamp(min=0)",
        )
    if window is not None and real is not None:
        begins = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
        _require(
            (begins <= 1).all(), "a gap in the attention mask is not served beside a sliding window"
        )


def _require(so: Tensor, otherwise: str) -> None:
    """NotServed with `otherwise`; compiled or in a CUDA graph, where nothing can be raised, what
    torch raises."""
    if torch.compiler.is_compiling() or (so.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(so, otherwise)
    elif not bool(so):
        raise NotServed(otherwise)
