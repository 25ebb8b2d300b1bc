"""Random LoRA adapters for `serving.py`, in PEFT's layout, and the settings of vLLM for them."""

import json
from pathlib import Path
from typing import Any

RANK = 16


def projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name in a layer -> (outputs, inputs), of a dense decoder's config.json."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        **{"self_attn.q_proj": (q, hidden), "self_attn.o_proj": (hidden, q)},
        **{f"self_attn.{name}_proj": (kv, hidden) for name in "kv"},
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
    }


def settings(model: Path, count: int) -> dict[str, Any]:
    """The arguments of LLM for so many adapters."""
    config = json.loads((model / "config.json").read_text())
    names = [name.rpartition(".")[2] for name in projections(config)]
    return {
        **{"enable_lora": True, "max_loras": count, "max_lora_rank": RANK},
        "lora_target_modules": names,
    }


def write_adapters(model: Path, folder: Path, count: int) -> list[Path]:
    """Writes so many adapters of every projection of a dense model, in bf16, and returns them.

    One thread computes them: vLLM forks its engine's process from this one, and a child of a
    process whose OpenMP threads have run waits for them forever.
    """
    import torch
    from safetensors.torch import save_file

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = json.loads((model / "config.json").read_text())
    shapes = projections(config)
    stated = {
        **{"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"},
        "target_modules": [name.rpartition(".")[2] for name in shapes],
    }
    written = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (outputs, inputs) in shapes.items():
                place = f"base_model.model.model.layers.{layer}.{name}"
                for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    x = torch.randn(shape, generator=generator) * 0.02
                    tensors[f"{place}.lora_{factor}.weight"] = x.bfloat16()
        one = folder / f"adapter-{number}"
        one.mkdir(parents=True, exist_ok=True)
        save_file(tensors, one / "adapter_model.safetensors")
        (one / "adapter_config.json").write_text(json.dumps(stated))
        written.append(one)
    torch.set_num_threads(threads)
    return written
