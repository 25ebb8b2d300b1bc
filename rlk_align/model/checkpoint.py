"""A checkpoint on disk: where it is, what its config says, what its tensors are called."""

import hashlib
import json
import os
import re
from pathlib import Path

from rlk_align.data import data_path
from rlk_align.errors import ModelError

LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
"""Operator -> the module of a decoder layer that holds its parameters, in an HF checkpoint."""


def default_model() -> str:
    """The embedded model's folder."""
    return str(data_path("model"))


def resolve_model(name: str) -> Path:
    """The folder of a checkpoint: a local path, or a hub id, downloaded when needed.

    Raises ModelError where neither exists.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path.resolve()
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelError(
            f"no model at {name}",
            "give a folder with config.json and safetensors weights, or a hub id ORG/NAME",
        )
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{name} is no local folder, and the hub did not give it: {error}",
            "check the spelling and the network, or download it first",
        ) from error


def read_config(model: Path) -> dict:
    """config.json of the checkpoint in folder `model`. Raises ModelError."""
    path = model / "config.json"
    if not path.is_file():
        raise ModelError(
            f"no model at {model}: {path.name} is not there",
            "give a folder with config.json and safetensors weights, or a hub id",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return config


def tensor_name(parameter: str) -> str:
    """The tensor of a canonical parameter: `layers.3.k_proj.bias` ->
    `model.layers.3.self_attn.k_proj.bias`."""
    whole = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    if parameter in whole:
        return f"{whole[parameter]}.weight"
    _, layer, rest = parameter.split(".", 2)
    module, _, bias = rest.partition(".")
    return f"model.layers.{layer}.{LAYER_MODULES[module]}.{bias or 'weight'}"


def fingerprint_files(folder: Path) -> str:
    """A short name for the contents of the model's files in `folder`."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".model", ".txt") and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(1 << 22):
                    digest.update(chunk)
    return digest.hexdigest()
