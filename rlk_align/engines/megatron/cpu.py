"""Stand-ins for what megatron-core asks of CUDA, so that it computes on a CPU.

They are process-wide, and therefore made inside the worker's process only.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_stand_ins() -> Iterator[list[str]]:
    """While entered, megatron-core allocates on the CPU and needs no CUDA generator.

    Gives what it replaced, in words. Also right where a GPU is present but not wanted.
    """
    from megatron.core.tensor_parallel import random as tp_random

    current_device = torch.cuda.current_device
    tracker = (tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED)
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    # Megatron's own tracker for inference forks nothing. Nothing is drawn from it: dropout is 0.
    tp_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        yield [
            "torch.cuda.current_device() answers cpu",
            "the CUDA RNG tracker is megatron-core's inference tracker, which forks nothing",
        ]
    finally:
        torch.cuda.current_device = current_device
        tp_random._CUDA_RNG_STATE_TRACKER, tp_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = tracker
