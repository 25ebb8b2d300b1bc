"""A plugin of vLLM that plants a fault: the second tensor-parallel rank has stale rows of up_proj
in layer 1."""

import functools
from typing import Any


def plugin() -> None:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading

    @functools.wraps(original)
    def process_weights_after_loading(model: Any, *args: Any, **kwargs: Any) -> None:
        # Before vLLM packs weights; the rows of up_proj follow those of gate_proj.
        if get_tensor_model_parallel_rank() == 1:
            model.model.layers[1].mlp.gate_up_proj.weight.data.chunk(2)[1].mul_(1.03125)
        original(model, *args, **kwargs)

    base_loader.process_weights_after_loading = process_weights_after_loading
