"""Replaces parts of a live gated delta net of vLLM's on a CPU.

vLLM computes the tokens of prefills by `chunk_gated_delta_rule_cpu`, and one token of each request
in a step of decode by `fused_sigmoid_gating_delta_rule_update_cpu`. Both read a state from a slot
of a pool and write the state after their tokens to it. The pool is `[slots, H, D, V]`.
"""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.vllm.delta_net import delta_nets


def change_rule(hooks: Hooks, model: Any, layer: int, change: Callable[..., Any]) -> None:
    """Replaces the rule of a layer: for each sequence by `change(length=, state=, decay=,
    compute=)`, which returns the output `[T, H, V]` and the state `[H, D, V]` after it. `state` is
    None where the sequence begins, and `decay` where vLLM computes it with the rule."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    ops, here = gdn_attention.ops, _only(hooks, model, layer)
    hooks.replace(
        ops,
        "chunk_gated_delta_rule_cpu",
        here(ops.chunk_gated_delta_rule_cpu, lambda rule, call: _prefilled(change, rule, call)),
    )
    name = "fused_sigmoid_gating_delta_rule_update_cpu"
    update = here(getattr(ops, name), lambda rule, call: _stepped(change, rule, call))
    hooks.replace(ops, name, update)


def change_convolution(
    hooks: Hooks, model: Any, layer: int, change: Callable[..., torch.Tensor]
) -> None:
    """Replaces the convolution of prefills: for each sequence by `change(result=, inputs=)`, of
    `[T, C]` each."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def convolved(compute: Any, call: dict[str, Any]) -> torch.Tensor:
        # `[C, T]`; the engine writes no input of its own.
        out, mixed = compute(**call), call["x"]
        ends = call["query_start_loc"].tolist()
        new = out.clone()
        for start, stop in pairwise(ends):
            at = slice(start, stop)
            new[:, at] = change(result=out[:, at].T, inputs=mixed[:, at].T).T
        return new

    here = _only(hooks, model, layer)
    for name in ("_causal_conv1d_fwd_cpu", "causal_conv1d_torch"):
        hooks.replace(gdn_attention, name, here(getattr(gdn_attention, name), convolved))


def _only(hooks: Hooks, model: Any, layer: int) -> Callable[[Any, Any], Any]:
    """Makes a function that replaces an original while one layer runs."""
    running: list[int] = []
    for i, net in delta_nets(model):
        hooks.before(net, lambda *_, i=i: running.__setitem__(slice(None), [i]), with_kwargs=True)

    def here(original: Any, computed: Any) -> Any:
        @functools.wraps(original)
        def replaced(**call: Any) -> Any:
            if running != [layer]:
                return original(**call)
            return computed(original, call)

        return replaced

    return here


def _prefilled(
    change: Callable[..., Any], rule: Any, call: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    pool, slots = call["initial_state"], call["initial_state_indices"]
    ends, outputs = call["cu_seqlens"].tolist(), []
    for slot, (start, stop) in zip(slots.tolist(), pairwise(ends), strict=True):

        def some(
            at: slice,
            state: torch.Tensor | None,
            other: torch.Tensor | None,
            first: int = start,
            slot: int = slot,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = slice(first + at.start, first + at.stop)
            own = pool[slot : slot + 1].clone().zero_()
            if state is not None:
                own[0] = state
            parts = {n: call[n][:, tokens].contiguous() for n in ("query", "key", "value")}
            parts |= {n: call[n][:, tokens].contiguous() for n in ("g", "beta")}
            if other is not None:
                parts["g"] = other[None].contiguous()
            ends = torch.tensor([0, at.stop - at.start], dtype=call["cu_seqlens"].dtype)
            out, _ = rule(
                **{
                    **call,
                    **parts,
                    "initial_state": own,
                    "cu_seqlens": ends,
                    "initial_state_indices": torch.zeros_like(slots[:1]),
                }
            )
            return out[0], own[0]

        state = pool[slot].clone()
        out, pool[slot] = change(
            length=stop - start,
            # vLLM writes zeros where a sequence begins.
            state=state if bool(state.any()) else None,
            decay=call["g"][0, start:stop].float(),
            compute=some,
        )
        outputs.append(out)
    return torch.cat(outputs)[None], None


def _stepped(change: Callable[..., Any], rule: Any, call: dict[str, Any]) -> torch.Tensor:
    """One token of each request; vLLM computes their decays with the rule."""
    pool, slots = call["initial_state_source"], call["initial_state_indices"]
    out = rule(**call)
    for n, slot in enumerate(slots.tolist()):

        def computed(
            _at: slice, _state: Any, _other: Any, n: int = n, slot: int = slot
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return out.reshape(len(slots), 1, *out.shape[-2:])[n], pool[slot].clone()

        _, pool[slot] = change(length=1, state=pool[slot], decay=None, compute=computed)
    return out
