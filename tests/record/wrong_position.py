"""A plugin of vLLM that plants a fault: a request that was preempted is computed again with the
positions of its tokens one too high."""

import functools
from typing import Any


def plugin() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._prepare_inputs

    @functools.wraps(original)
    def _prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, scheduler_output, *args, **kwargs)
        for name in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            row = self.input_batch.req_id_to_index[name]
            start, stop = self.query_start_loc.np[row : row + 2]
            self.positions[start:stop] += 1
        return prepared

    GPUModelRunner._prepare_inputs = _prepare_inputs
