"""Replaces parts of a live state-space model of vLLM's on a CPU, in prefills."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.vllm.mamba import mambas


def change_scan(hooks: Hooks, model: Any, layer: int, change: Callable[..., Any]) -> None:
    """Replaces the scan of a layer: for each sequence by `change(length=, state=, decay=,
    compute=)`, which returns the output `[T, H, V]` and the state `[H, V, D]` after it. `state` is
    None where the sequence begins."""
    from vllm import _custom_ops

    running, name = _running(hooks, model), "mamba_chunk_scan_fwd_cpu"
    original = getattr(_custom_ops, name)

    @functools.wraps(original)
    def scan(
        out: Any, states: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, ends: Any
    ) -> None:
        if running != [layer]:
            original(out, states, x, dt, a, b, c, d, z, ends)
            return
        for n, (start, stop) in enumerate(pairwise(ends.tolist())):

            def some(
                at: slice, state: torch.Tensor | None, _: Any, first: int = start, n: int = n
            ) -> tuple[torch.Tensor, torch.Tensor]:
                tokens = slice(first + at.start, first + at.stop)
                own = torch.zeros_like(states[n : n + 1])
                if state is not None:
                    own[0] = state
                new = torch.empty_like(out[tokens])
                of = (y[tokens].contiguous() for y in (x, dt))
                keys = (y[tokens].contiguous() for y in (b, c))
                length = torch.tensor([0, at.stop - at.start], dtype=ends.dtype)
                original(new, own, *of, a, *keys, d, z, length)
                return new, own[0]

            state = states[n].clone()
            out[start:stop], states[n] = change(
                length=stop - start,
                # vLLM writes zeros where a sequence begins.
                state=state if bool(state.any()) else None,
                decay=dt[start:stop] * a,
                compute=some,
            )

    hooks.replace(_custom_ops, name, scan)


def change_convolution(
    hooks: Hooks, model: Any, layer: int, change: Callable[..., torch.Tensor]
) -> None:
    """Replaces the convolution: for each sequence by `change(result=, inputs=)`, of `[T, C]`
    each."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    running, name = _running(hooks, model), "causal_conv1d_fn"
    original = getattr(mamba_mixer2, name)

    @functools.wraps(original)
    def convolved(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # `[C, T]`.
        out: torch.Tensor = original(x, *args, **kwargs)
        if running != [layer]:
            return out
        new = out.clone()
        for start, stop in pairwise(kwargs["query_start_loc"].tolist()):
            at = slice(start, stop)
            new[:, at] = change(result=out[:, at].T, inputs=x[:, at].T).T
        return new

    hooks.replace(mamba_mixer2, name, convolved)


def _running(hooks: Hooks, model: Any) -> list[int]:
    """The layer whose state-space model runs or ran last, once hooks have filled it in."""
    running: list[int] = []
    for i, net in mambas(model):
        hooks.before(net, lambda *_, i=i: running.__setitem__(slice(None), [i]), with_kwargs=True)
    return running
