"""A checkpoint on disk: its folder, its config, and the names of its tensors."""

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlk_align.data import data_path
from rlk_align.errors import ModelError
from rlk_align.model import vision
from rlk_align.model.layer_kinds import with_layer_types
from rlk_align.model.operators import OPERATORS


def default_model() -> str:
    """The embedded model's folder."""
    return str(data_path("model"))


def resolve_model(name: str) -> Path:
    """The folder of a checkpoint: a local path, or a hub id, which is downloaded if needed.

    Raises ModelError if neither exists.
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
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{name} is not a local folder, and the hub did not provide it: {error}",
            "check the spelling and the network, or download it first",
        ) from error


def read_config(model: Path) -> dict:
    """The config of the decoder in folder `model`: config.json, or a part of it if the checkpoint
    also sees images. Raises ModelError."""
    config = _whole_config(model)
    if vision.decoder(config) is None:
        return with_layer_types(config)
    return vision.decoder_config(config, _stores_head(model))


def _stores_head(model: Path) -> bool:
    """Whether a checkpoint that also sees images stores a head; False if its files are damaged,
    which `check_tensors` reports."""
    from safetensors import SafetensorError, safe_open

    names: list[str] = []
    try:
        for path in weight_files(model):
            names += safe_open(path, framework="np").keys()
    except (ModelError, OSError, SafetensorError):
        return False
    return any(vision.decoder_tensor(name) == "lm_head.weight" for name in names)


def decoder(model: Path) -> vision.Decoder | None:
    """The decoder in a checkpoint that also sees images; None for any other. Raises ModelError."""
    return vision.decoder(_whole_config(model))


def transformers_config(model: Path, **settings: Any) -> Any:
    """The decoder's config as transformers' class, with these settings on top. Raises ModelError,
    and any exception by which transformers refuses a config."""
    from transformers import AutoConfig

    if decoder(model) is None:
        return AutoConfig.from_pretrained(model, local_files_only=True, **settings)
    return AutoConfig.for_model(**read_config(model) | settings)


def _whole_config(model: Path) -> dict:
    path = model / "config.json"
    if not path.is_file():
        raise ModelError(
            f"no model at {model}: {path.name} does not exist",
            "give a folder with config.json and safetensors weights, or a hub id",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


GIVE_IDS = 'add the tokenizer, or give prompts as token ids: {"ids": [1, 2, 3]}'
"""The remedy for a checkpoint without a tokenizer."""


def check_tokenizer(model: Path) -> None:
    """Raises ModelError if the folder has no file of a tokenizer."""
    if not any(any(model.glob(p)) for p in ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")):
        raise ModelError(f"{model} has no tokenizer, and prompts are given as text", GIVE_IDS)


EXPERT = re.compile(r"(layers\.\d+)\.experts\.(\d+)\.(\w+)")
"""The canonical parameter of one expert, e.g. `layers.3.experts.5.up_proj`."""


def tensor_name(parameter: str, modules: Mapping[str, str] = MappingProxyType({})) -> str:
    """The tensor of a canonical parameter: `layers.3.k_proj.bias` ->
    `model.layers.3.self_attn.k_proj.bias`. `modules`: the family's `Family.modules`."""
    path = parameter.removesuffix(".bias")
    if expert := EXPERT.fullmatch(path):
        layer, number, name = expert.groups()
        operator = next(o for o in OPERATORS.values() if o.of_expert and o.site == name)
    else:
        layer, _, name = path.rpartition(".")
        number = ""
        operator = next(
            o
            for o in OPERATORS.values()
            if o.weight and not o.of_expert and name == (o.parameter or o.site)
        )
    module = modules.get(operator.name, operator.module).format(number)
    tensor = operator.tensor if path == parameter else operator.bias_tensor
    # A tensor of the layer itself has no module.
    return ".".join(filter(None, ("model" if layer else "", layer, module, tensor)))


def weight_files(model: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises ModelError if there are none, or if its index names a file outside the folder.
    """
    index = model / "model.safetensors.index.json"
    if not index.is_file():
        if not (model / "model.safetensors").is_file():
            raise ModelError(
                f"{model} has no model.safetensors", "save the checkpoint as safetensors"
            )
        return [model / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not an index of weights: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} points outside the checkpoint's folder: {name!r}")
        if not (model / name).is_file():
            raise ModelError(f"{model}: {name} is missing, and {index.name} names it")
    return [model / name for name in names]


SETTLED = 2.0
"""Seconds after which a further write certainly changes the time of a file."""


def fingerprint_files(folder: Path) -> str:
    """A digest of the model's files in `folder`. Files that have not changed since the last call
    are not read again, which would take seconds for a large model."""
    suffixes = (".json", ".safetensors", ".model", ".txt", ".jinja")
    paths = [p for p in sorted(folder.iterdir()) if p.suffix in suffixes and p.is_file()]
    states = [p.stat() for p in paths]
    files = tuple(
        (p.resolve(), p.name, k.st_dev, k.st_ino, k.st_size, k.st_mtime_ns, k.st_ctime_ns)
        for p, k in zip(paths, states, strict=True)
    )
    # Two changes within one tick of the file system's clock have the same time.
    settled = all(max(k.st_mtime, k.st_ctime) < time.time() - SETTLED for k in states)
    return (_fingerprint if settled else _fingerprint.__wrapped__)(files)


@lru_cache(maxsize=16)
def _fingerprint(files: tuple[tuple, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path, name, *_ in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()
