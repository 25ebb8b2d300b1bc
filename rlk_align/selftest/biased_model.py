"""Makes a model with biases from one without, for the fault that drops a bias."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlk_align.model.checkpoint import weight_files

SIZE = 0.1
"""Standard deviation of a bias."""


def biased_model(model: Path, folder: Path) -> Path:
    """Returns a copy of the checkpoint as a Llama without norms of heads, with seeded biases on q,
    k, v and o. Every engine supports all four of them for this family."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and "index" not in path.name:
            shutil.copyfile(path, folder / path.name)
    tensors = {name: t for file in weight_files(model) for name, t in load_file(file).items()}
    tensors = {name: t for name, t in tensors.items() if not name.endswith("_norm.weight")}
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if "self_attn" in n and n.endswith("_proj.weight")]:
        weight = tensors[name]
        bias = SIZE * torch.randn(len(weight), generator=generator)
        tensors[name.replace(".weight", ".bias")] = bias.to(weight.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    changes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": False,
    }
    # config.json is written last: a folder that has it is complete.
    text = json.dumps(config | changes, indent=1)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return folder
