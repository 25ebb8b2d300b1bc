"""Megatron-core's training on a CPU, in a process that does nothing else."""

from contextlib import ExitStack
from typing import Any

import torch

from rlk_align.engines.megatron.cpu import cpu_stand_ins, expert_stand_ins


def on_cpu() -> None:
    """Replaces the CUDA functions that its models and its schedules call."""
    _kept.enter_context(cpu_stand_ins())
    _kept.enter_context(expert_stand_ins(on_cpu=True))
    from megatron.core.tensor_parallel import random

    zeros: Any = torch.zeros

    def zeros_on_cpu(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
        return zeros(*size, device="cpu" if device == "cuda" else device, **more)

    torch.zeros = zeros_on_cpu
    torch.cuda.synchronize = lambda *_device: None
    # Recomputed layers read and write the states of a GPU's generator.
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda *_states: None


_kept = ExitStack()
