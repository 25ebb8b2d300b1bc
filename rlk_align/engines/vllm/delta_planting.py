"""Replaces parts of a live gated delta net of vLLM's on a CPU, for a planted fault.

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
from rlk_align.selftest.planting.operands import Convolution, Formula, Recurrence, in_place_of


def plant_rule(hooks: Hooks, model: Any, layer: int, formula: Formula) -> None:
    """Replaces the rule of a layer by a formula of each sequence."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    ops, here = gdn_attention.ops, _only(hooks, model, layer)
    hooks.replace(
        ops,
        "chunk_gated_delta_rule_cpu",
        here(ops.chunk_gated_delta_rule_cpu, lambda rule, call: _prefilled(formula, rule, call)),
    )
    name = "fused_sigmoid_gating_delta_rule_update_cpu"
    update = here(getattr(ops, name), lambda rule, call: _stepped(formula, rule, call))
    hooks.replace(ops, name, update)


def plant_convolution(
    hooks: Hooks, model: Any, layer: int, formula: Formula, weight: torch.Tensor
) -> None:
    """Replaces the convolution of prefills by a formula of each sequence."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def convolved(compute: Any, call: dict[str, Any]) -> torch.Tensor:
        # `[C, T]`; the engine writes no input of its own.
        out, mixed = compute(**call), call["x"]
        ends = call["query_start_loc"].tolist()
        new = out.clone()
        for start, stop in pairwise(ends):
            at = slice(start, stop)
            unit = Convolution(result=out[:, at].T, inputs=mixed[:, at].T, weight=weight)
            new[:, at] = in_place_of(formula, unit).T
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


def _prefilled(formula: Formula, rule: Any, call: dict[str, Any]) -> tuple[torch.Tensor, Any]:
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
        unit = Recurrence(
            length=stop - start,
            # vLLM writes zeros where a sequence begins.
            state=state if bool(state.any()) else None,
            decay=call["g"][0, start:stop].float(),
            compute=some,
        )
        out, pool[slot] = formula(unit)
        outputs.append(out)
    return torch.cat(outputs)[None], None


def _stepped(formula: Formula, rule: Any, call: dict[str, Any]) -> torch.Tensor:
    """One token of each request; vLLM computes their decays with the rule."""
    pool, slots = call["initial_state_source"], call["initial_state_indices"]
    out = rule(**call)
    for n, slot in enumerate(slots.tolist()):

        def computed(
            _at: slice, _state: Any, _other: Any, n: int = n, slot: int = slot
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return out.reshape(len(slots), 1, *out.shape[-2:])[n], pool[slot].clone()

        unit = Recurrence(length=1, state=pool[slot], decay=None, compute=computed)
        _, pool[slot] = formula(unit)
    return out
