"""The record of a checkpoint's quantised weights."""

from collections.abc import Iterator
from pathlib import Path

import torch

from rlk_align.model.block_fp8 import dequantise
from rlk_align.model.checkpoint import read_config, tensor_name
from rlk_align.model.quantised import PROJECTIONS, stored_format
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites, site_parameters
from rlk_align.model.stored import StoredTensor, stored_tensors
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.schema import QuantisedRecord


def record_quantised(model: Path, shape: ModelShape, dtype: str) -> QuantisedRecord | None:
    """The stored weights of a checkpoint; None if they are not quantised. `dtype`: that of the
    engine. Raises ModelError."""
    stored = stored_format(model, read_config(model))
    if stored is None:
        return None
    weights: dict[str, tuple[str, str, str]] = {}
    unquantised, listed = [], []
    left_out: dict[str, str] = {}
    for parameter, tensor in projections(model, shape):
        module = tensor.name.removesuffix(".weight")
        if tensor.scales is None:
            unquantised.append(parameter)
            if not stored.lists(module):
                left_out[parameter] = stored.substring(module)
            continue
        if stored.lists(module):
            listed.append(parameter)
        values, scales = tensor.load_quantised()
        whole = dequantise(values, scales, tensor.block).to(getattr(torch, dtype))
        of_values, of_scales, of_whole = map(digest_parameter, (values, scales, whole))
        weights[parameter] = of_values, of_scales, of_whole
    return QuantisedRecord(
        name=stored.name,
        format=str(stored),
        block=stored.block,
        powers_of_two=stored.powers_of_two,
        ignored=list(stored.ignored),
        weights=weights,
        unquantised=unquantised,
        left_out=left_out,
        listed=listed,
    )


def projections(model: Path, shape: ModelShape) -> Iterator[tuple[str, StoredTensor]]:
    """(parameter, tensor) of each projection of a checkpoint."""
    tensors = stored_tensors(model, shape.family.modules, shape.fused_rows, shape.family.stacks)
    for site in model_sites(shape):
        if site.operator.formula in PROJECTIONS and site.op != "logits":
            for parameter in site_parameters(site, shape):
                tensor = tensors.get(tensor_name(parameter, shape.family.modules))
                if tensor is not None:
                    yield parameter, tensor
