"""Small random checkpoints with the configs of published models, `wild_configs.json`."""

import json
from pathlib import Path
from typing import Any

from random_model import write_random_model
from safetensors.torch import load_file, save_file

from rlk_align.model.checkpoint import read_config

WILD: dict[str, Any] = json.loads((Path(__file__).parent / "wild_configs.json").read_text())
"""A model of a hub -> its config with sizes shrunk, where it was read, and the reason why it is
refused, if it is."""
ACCEPTED = [name for name, of in WILD.items() if not of["refused"]]
_INSIDE = {"mistral3": ("language_model.model.", "language_model.lm_head.")}
"""Kind of a checkpoint that sees images -> the starts of its decoder's names, if they are not the
usual ones."""


def wild_model(folder: Path, name: str) -> Path:
    """The checkpoint of one of `WILD` below `folder`, with config.json as published."""
    config, made = WILD[name]["config"], folder / name.replace("/", "--")
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    settings = dict(read_config(made))
    for key in ("auto_map", "architectures", "transformers_version", "attn_implementation"):
        settings.pop(key, None)
    settings["dtype"] = settings.pop("torch_dtype", None) or settings.get("dtype") or "bfloat16"
    write_random_model(made, **settings | {"initializer_range": 0.05})
    if "text_config" in config:
        _put_inside(made, *_INSIDE.get(config["model_type"], ("model.language_model.", "lm_head.")))
    (made / "config.json").write_text(json.dumps(config))
    return made


def _put_inside(folder: Path, inside: str, head: str) -> None:
    """Names the tensors of a decoder as a checkpoint that sees images does."""
    starts, stored = {"model.": inside, "lm_head.": head}, {}
    for path in folder.glob("*.safetensors"):
        tensors = {
            new + name.removeprefix(old): tensor
            for name, tensor in load_file(path).items()
            for old, new in starts.items()
            if name.startswith(old)
        }
        save_file(tensors, path, metadata={"format": "pt"})
        stored |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {}, "weight_map": stored}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
