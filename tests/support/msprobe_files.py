"""Dumps as mindstudio-probe 26.2.0 writes them for a transformers model: level L0, task tensor.

msprobe needs packages that the tests do not have. The keys, the file names and the tensors were
compared with those that msprobe itself wrote of the embedded model: they are equal, without the
call of the whole decoder, which has nothing that its modules lack.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def write_dump(
    folder: Path, model: Any, batches: list[dict[str, Any]], parameters: bool = True
) -> Path:
    """Runs the model on these batches, and writes FOLDER/step0/rank0; returns the folder of the
    step. `parameters`: whether each call names its module's parameters, as msprobe's do."""
    rank = folder / "step0" / "rank0"
    tensors = rank / "dump_tensor_data"
    tensors.mkdir(parents=True)
    data: dict[str, Any] = {}
    counts: Counter[str] = Counter()

    def entry(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            torch.save(value.detach().clone(), tensors / f"{name}.pt")
            wide = value.detach().double()
            return {
                "type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape),
                "Max": wide.max().item(), "Min": wide.min().item(), "Mean": wide.mean().item(),
                "Norm": wide.norm().item(), "requires_grad": value.requires_grad,
                "data_name": f"{name}.pt",
            }  # fmt: skip
        if isinstance(value, tuple | list):
            return [entry(each, f"{name}.{i}") for i, each in enumerate(value)]
        return None

    def named(path: str, module: torch.nn.Module) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            call = f"Module.{path}.{type(module).__name__}.forward.{counts[path]}"
            counts[path] += 1
            outputs = output if isinstance(output, tuple) else (output,)
            own = dict(module.named_parameters(recurse=False)) if parameters else {}
            data[call] = {
                "input_args": [entry(a, f"{call}.input.{i}") for i, a in enumerate(args)],
                "input_kwargs": {k: entry(v, f"{call}.kwargs.{k}") for k, v in kwargs.items()},
                "output": [entry(o, f"{call}.output.{i}") for i, o in enumerate(outputs)],
                "parameters": {k: entry(p, f"{call}.parameters.{k}") for k, p in own.items()},
            }

        return hook

    hooks = [
        module.register_forward_hook(named(path, module), with_kwargs=True)
        for path, module in model.named_modules()
        if path and path != "model"
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                model(**batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    content = {
        "task": "tensor",
        "level": "L0",
        "framework": "pytorch",
        "dump_data_dir": str(tensors),
        "data": data,
    }
    (rank / "dump.json").write_text(json.dumps(content))
    return rank.parent
