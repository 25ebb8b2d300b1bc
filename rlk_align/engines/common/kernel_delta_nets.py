"""Gated delta nets that the kernels compute in a live model, in any engine.

T = rows of all sequences, F = features of q, k and v, H = heads of v, D and V = features of a head
of k and of v
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.site_hooks import SiteHooks


def on_kernels(hooks: SiteHooks, module: Any, layer: int) -> None:
    """Visits each value that the kernels compute inside a module of a layer, and that no module
    returns."""

    def show(operator: str, value: torch.Tensor) -> None:
        hooks.visit_inside(f"layers.{layer}.{operator}", value)

    hooks.replace(module, "rlk_show", show)


def kernel_attributes(net: Any) -> dict[str, Any]:
    """How the kernels compute a gated delta net."""
    return {"delta_eps": net.rlk_eps, "delta_chunk": net.rlk_chunk}


def change_rule_on_kernels(hooks: Hooks, net: Any, change: Callable[..., Any]) -> None:
    """Replaces the rule of a gated delta net: for each sequence by `change(length=, state=, decay=,
    compute=)`, which returns the output `[T, H, V]` and the state `[H, D, V]` after it. `state` is
    None where the sequence begins."""
    compute = net.rlk_rule

    def rule(
        of: Any, convolved: Any, g: Any, beta: Any, cu: torch.Tensor, kept: Any
    ) -> torch.Tensor:
        outputs = []
        for n, (start, stop) in enumerate(pairwise(cu.tolist())):
            rows = convolved[start:stop], g[start:stop], beta[start:stop]
            begins = kept is None or int(kept.context[n]) == 0
            before = None if begins else _whole_state(kept, n)

            def some(
                at: slice,
                state: torch.Tensor | None,
                other: torch.Tensor | None,
                rows: tuple[torch.Tensor, ...] = rows,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                mixed, decay, step = (x[at].contiguous() for x in rows)
                own = _Kept.of(of, mixed, decay, state, net.rlk_chunk)
                ends = torch.tensor([0, len(mixed)], device=mixed.device)
                out = compute(of, mixed, decay if other is None else other, step, ends, own)
                own.context += len(mixed)
                return out, _whole_state(own, 0)

            out, after = change(length=stop - start, state=before, decay=rows[1], compute=some)
            outputs.append(out)
            if kept is not None:
                # The open chunk continues with no row before: they are in the state.
                slot = int(kept.slots[n])
                for tensor in kept.chunks:
                    tensor[slot] = 0
                kept.chunks[0][slot] = after
        every = torch.cat(outputs)
        # Rows of padding follow.
        return torch.cat([every, every.new_zeros(len(convolved) - len(every), *every.shape[1:])])

    hooks.replace(net, "rlk_rule", rule)


def change_convolution_on_kernels(
    hooks: Hooks, net: Any, change: Callable[..., torch.Tensor]
) -> None:
    """Replaces the convolution of a gated delta net: for each sequence by
    `change(result=, inputs=)`, of `[T, F]` each, except in a step of decode."""
    compute = net.rlk_convolve

    def convolve(of: Any, mixed: torch.Tensor, cu: torch.Tensor, kept: Any) -> torch.Tensor:
        out = compute(of, mixed, cu, kept)
        for n, (start, stop) in enumerate(pairwise(cu.tolist())):
            if kept is None or int(kept.context[n]) == 0:
                at = slice(start, stop)
                out[at] = change(result=out[at].clone(), inputs=mixed[at])
        return out

    hooks.replace(net, "rlk_convolve", convolve)


class _Kept:
    """What one sequence keeps between calls, as the kernels' operators read it."""

    def __init__(self, chunks: tuple[torch.Tensor, ...], context: torch.Tensor) -> None:
        self.chunks, self.context = chunks, context
        self.slots = torch.zeros_like(context)

    @classmethod
    def of(
        cls, net: Any, mixed: torch.Tensor, decay: torch.Tensor, state: Any, chunk: int
    ) -> "_Kept":
        """That of a sequence whose chunk begins with this state; None where it begins itself."""
        heads, dim = net.value_heads, net.key_dim
        width = (mixed.shape[1] - 2 * net.key_heads * dim) // heads
        chunks = (
            decay.new_zeros(1, heads, dim, width),
            mixed.new_zeros(1, chunk, net.key_heads, dim),
            mixed.new_zeros(1, chunk, heads, width),
            decay.new_zeros(1, chunk, heads),
        )
        if state is not None:
            chunks[0][0] = state
        # After a whole chunk, the next one begins.
        context = 0 if state is None else chunk
        return cls(chunks, torch.tensor([context], dtype=torch.int32, device=mixed.device))


def _whole_state(kept: Any, n: int) -> torch.Tensor:
    """The state `[H, D, V]` after a sequence's rows, from that at the beginning of its open chunk
    and the rows of this chunk."""
    slot, chunk = int(kept.slots[n]), kept.chunks[1].shape[1]
    state, keys, updates, decays = (tensor[slot] for tensor in kept.chunks)
    rows = int(kept.context[n]) % chunk
    if rows == 0:
        return state.clone()
    keys, updates, decays = keys[:rows].float(), updates[:rows].float(), decays[:rows]
    keys = keys.repeat_interleave(updates.shape[1] // keys.shape[1], dim=1)
    last = decays[-1]
    updates = updates * (last - decays).exp()[..., None]
    return state * last.exp()[:, None, None] + torch.einsum("jhd,jhv->hdv", keys, updates)
