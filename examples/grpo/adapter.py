"""LoRA (`--lora RANK`): the adapter that is trained, the file that vLLM loads, and the digests of
both sides."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rlk_kernels.integrations.operators import LORA
from safetensors.torch import save_file
from torch import Tensor

from rlk_align.engines.common.lora import LiveLora, folded
from rlk_align.engines.vllm.limits import LORA_RANKS
from rlk_align.trace.digest import digest_parameters

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALE = 2
"""alpha / rank. vLLM without the kernels folds it into B, which is exact for a power of two."""


def settings(rank: int) -> dict[str, Any]:
    """The arguments of PEFT's LoraConfig."""
    return {"r": rank, "lora_alpha": SCALE * rank, "target_modules": list(PROJECTIONS)}


def add_adapter(model: torch.nn.Module, rank: int, seed: int) -> None:
    """Puts PEFT's layers around the projections of a model, whose weights are frozen. A is random,
    by the seed, and B is zeros. Both are in the model's dtype."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    get_peft_model(model, LoraConfig(**settings(rank)), autocast_adapter_dtype=False)


def for_vllm(rank: int) -> dict[str, Any]:
    """The arguments of LLM."""
    return {
        "enable_lora": True, "max_loras": 1,
        "max_lora_rank": min(r for r in LORA_RANKS if r >= rank),
        # Otherwise vLLM wraps the output layer as well.
        "lora_target_modules": list(PROJECTIONS),
    }  # fmt: skip


def write_adapter(folder: Path, rank: int, factors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes (name in the trainer, A or B) in PEFT's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "bias": "none", **settings(rank)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    named = {f"base_model.model.{n.replace('.default', '')}": x.cpu() for n, x in factors}
    save_file({n: x.contiguous() for n, x in named.items()}, folder / "adapter_model.safetensors")


def digests_of(adapter: Iterable[LiveLora]) -> dict[str, str]:
    """Digests of A and of scale · B of each projection."""
    named: dict[str, Tensor] = {}
    for each in adapter:
        b = folded(each.b, each.scale, each.a.dtype)
        named |= {f"{each.site}.{LORA}_A": each.a, f"{each.site}.{LORA}_B": b}
    return digest_parameters(named.items())
