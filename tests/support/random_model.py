"""A small random model of any family that transformers knows, as a checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import torch

from rlk_align.data import data_path

SMALL: dict[str, Any] = {
    **{"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"initializer_range": 0.05, "tie_word_embeddings": False, "sliding_window": None},
    **{"eos_token_id": 0, "bos_token_id": None, "pad_token_id": None},
}


def write_random_model(folder: Path, rounded: bool = False, **settings: Any) -> Path:
    """With the embedded tokenizer and its weights in several files. rounded: parameters that a
    checkpoint has in fp32 have values of the model's dtype, to which FSDP2 rounds them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = SMALL | settings
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings["dtype"]))
    for key, parameter in made.named_parameters():
        if key.endswith("gate_up_proj_bias"):
            # Beyond the limit of a clamped activation.
            torch.nn.init.uniform_(parameter, -8, 8)
        elif key.endswith("sinks"):
            # Near the scores that these biases of q and k cause.
            torch.nn.init.uniform_(parameter, 8, 12)
        elif key.endswith("A_log"):
            # Decays from slow ones, as trained models have, to fast ones.
            torch.nn.init.uniform_(parameter, -6, 1)
        elif "norm" in key or key.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif not parameter.any():
            # transformers leaves some routers at 0.
            torch.nn.init.normal_(parameter, std=settings["initializer_range"])
    for key, value in (*made.named_parameters(), *made.named_buffers()):
        if key.endswith("e_score_correction_bias"):
            # The scores of a softmax, which "statics" correct, differ less than those of a sigmoid.
            largest = 0.05 if "statics" in key else 0.2
            torch.nn.init.uniform_(value, -largest, largest)
        elif key.endswith("layer_scalar"):
            torch.nn.init.uniform_(value, 0.5, 1.5)
    for parameter in made.parameters() if rounded else ():
        parameter.data = parameter.to(made.dtype).to(parameter.dtype)
    made.save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data_path("model") / file, folder / file)
    return folder
