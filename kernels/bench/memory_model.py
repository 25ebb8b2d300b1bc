"""Measures memory and time of a whole model's policy step, for each implementation of its last
part.

    PYTHONPATH=.:kernels python kernels/bench/memory_model.py --shape CONFIG.json [--group 256]
                                                              [--out memory_model.json]

A step is forward, log-probs, loss and backward of one group in one pass. The model has the shape of
config.json and random weights, in bf16; an answer has 512 tokens, and the backward recomputes each
layer. The kernels take one packed row, and the others a batch of answers with torch's attention.
`memory_grpo.py` has the last parts. MiB are the peak beyond the weights and their gradients; there
is no optimiser. A group of eight answers runs first, so that nothing compiles in the timed step.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_linear_logp import attempt
from memory_grpo import DEVICE, LENGTH, MIB, OURS, STEPS, Batch, Step, version
from transformers import AutoConfig, AutoModelForCausalLM

FIRST = 8


def make_model(shape: dict[str, Any], kernels: bool) -> Any:
    kind = {k: v for k, v in shape.items() if k != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **kind)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if kernels:
        from rlk_kernels.integrations import hf

        hf.use_kernels(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class ModelBatch(Batch):
    """A group's answers, whose hidden states come from a model; the backward goes through the
    model."""

    def __init__(self, group: int, model: Any, packed: bool) -> None:
        super().__init__(group, model.lm_head.weight)
        ids = torch.randint(0, model.config.vocab_size, (group, LENGTH), device=DEVICE)
        self.model, self.ids, self.how = model, ids, {}
        if packed:
            bounds = self.bounds.int()
            self.ids = ids.view(1, -1)
            self.how = {
                "position_ids": torch.arange(LENGTH, device=DEVICE).repeat(1, group),
                "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
            }  # fmt: skip

    def run(self, last_part: Step) -> None:
        found = self.model.model(input_ids=self.ids, use_cache=False, **self.how)
        self.hidden = found.last_hidden_state.flatten(0, 1)
        last_part(self)

    def differentiate(self, loss: torch.Tensor) -> None:
        del self.hidden
        loss.backward()


def measure(batch: ModelBatch, last_part: Step) -> dict[str, float]:
    parameters = list(batch.model.parameters())
    for parameter in parameters:
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    batch.run(last_part)
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated()
    both = sum(p.nbytes + p.grad.nbytes for p in parameters if p.grad is not None)
    if not all(p.grad is not None and p.grad.isfinite().all() for p in parameters):
        raise ValueError("a gradient is missing or not finite")
    return {"MiB": (peak - both) / MIB, "peak_bytes": peak, "s": seconds}


def step_of(model: Any, packed: bool, last_part: Step) -> Callable[[int], dict[str, float]]:
    return lambda group: measure(ModelBatch(group, model, packed), last_part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--group", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("memory_model.json"))
    options = parser.parse_args()
    shape = json.loads(options.shape.read_text("utf-8"))
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton", "trl", "liger-kernel")},
        "shape": shape, "length": LENGTH, "group": options.group, "steps": {},
    }  # fmt: skip
    for kernels in (True, False):
        model = make_model(shape, kernels)
        for name, last_part in STEPS.items():
            if (name in OURS) != kernels:
                continue
            step = step_of(model, kernels, last_part)
            found = attempt(step, FIRST)
            if not isinstance(found, str):
                found = attempt(step, options.group)
            record["steps"][name] = {"failed": found} if isinstance(found, str) else found
            print(json.dumps({"step": name} | record["steps"][name]), flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        del model, step


if __name__ == "__main__":
    main()
