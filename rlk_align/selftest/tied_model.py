"""Makes a sparse model whose experts tie, for the fault that breaks ties differently."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlk_align.model.checkpoint import tensor_name, weight_files
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites, site_parameters


def tied_model(model: Path, folder: Path) -> Path:
    """Returns a copy of the checkpoint in which the first k + 1 experts of every router have the
    same row. A token is sent to k experts, so if these have the largest logits, one of them is not
    chosen."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = read_shape(model)
    sites = [s for s in model_sites(shape) if s.operator.formula == "router"]
    routers = {
        tensor_name(name, shape.family.modules) for s in sites for name in site_parameters(s, shape)
    }
    for path in weight_files(model):
        tensors = load_file(path)
        for name in routers & tensors.keys():
            tensors[name][1 : shape.top_k + 1] = tensors[name][0].clone()
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    # config.json is written last: a folder that has it is complete.
    rest = [p for p in model.iterdir() if p.is_file() and p.suffix != ".safetensors"]
    for path in sorted(rest, key=lambda p: p.name == "config.json"):
        shutil.copyfile(path, folder / path.name)
    return folder
