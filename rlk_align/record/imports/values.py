"""The values of a place in a forward, gathered from the tensor-parallel ranks. F = features."""

import math
from dataclasses import dataclass

import torch

from rlk_align.engines.common.layout import Layout, of_outputs
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.shape import ModelShape
from rlk_align.record.imports.places import Place
from rlk_align.record.imports.source import Forward


class OtherValues(Exception):
    """A tensor cannot be that of a site; the message says why."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a site in a forward."""

    rows: torch.Tensor
    """`[rows, F]`"""
    copies: dict[int, torch.Tensor]
    """Rank -> `[rows, F]`, for ranks whose copy of some feature has other bits."""


def read_place(place: Place, forward: Forward, shape: ModelShape) -> dict[str, Values]:
    """Site -> its values in a forward, for the sites of a place. Raises OtherValues, and DumpError
    for a file that cannot be read."""
    shape_of_rows = (len(forward.segments),) if place.tap in forward.of_last else forward.shape
    parts = [_as_rows(load(), shape_of_rows, place) for load in forward.taps[place.tap]]
    layout = None if place.gathered else of_outputs(place.sites, shape, len(parts))
    if layout is None:
        return {place.sites[0]: _whole(parts, place, shape)}
    widths = [sum(piece.size for _, piece in layout.local(r)) for r in range(len(parts))]
    for part, width in zip(parts, widths, strict=True):
        padded = place.sites == ("logits",) and part.shape[1] > width
        if part.shape[1] != width and not padded:
            raise OtherValues(f"{place.tap.module} has {part.shape[1]} features instead of {width}")
    return {site: _gathered(site, layout, parts) for site in place.sites}


def _as_rows(value: torch.Tensor, shape: tuple[int, ...], place: Place) -> torch.Tensor:
    """The values as `[rows, F]`."""
    count, module = math.prod(shape), place.tap.module
    by_token = tuple(value.shape[: len(shape)]) == shape
    by_head = len(shape) == 2 and value.dim() == 4 and (value.shape[0], value.shape[2]) == shape
    if by_token and by_head:
        raise OtherValues(f"{module} has {shape[1]} heads and tokens, which cannot be told apart")
    # A norm of heads has a row for each head, or for each token of all sequences.
    flat = value.dim() == 2 and value.shape[0] % count == 0
    if not value.numel() or value.dim() < 2 or not (by_token or by_head or flat):
        said = "x".join(map(str, value.shape))
        raise OtherValues(f"{module} has values of shape {said} for {count} rows")
    if str(value.dtype).removeprefix("torch.") not in DTYPES:
        raise OtherValues(f"{module} has values in {value.dtype}")
    return (value.transpose(1, 2) if by_head else value).reshape(count, -1)


def _whole(parts: list[torch.Tensor], place: Place, shape: ModelShape) -> Values:
    """Values that each rank has whole."""
    [site] = place.sites
    operator = shape.operator_of(site)
    features = shape.of_site(site).size(operator.features)
    if any(part.shape[1] < features if site == "logits" else part.shape[1] != features
           for part in parts):  # fmt: skip
        raise OtherValues(
            f"{place.tap.module} has {parts[0].shape[1]} features instead of {features}"
        )
    copies = {r: part for r, part in enumerate(parts) if r and not _same(part, parts[0])}
    if operator.sharding.join == "sum" and len(copies) == len(parts) - 1 > 0:
        raise OtherValues("its tensor-parallel ranks wrote it before they added up their parts")
    return Values(parts[0], copies)


def _gathered(site: str, layout: Layout, parts: list[torch.Tensor]) -> Values:
    """Values that the ranks share, as the layout declares."""
    value = layout.assemble(site, parts, 1)
    copies: dict[int, torch.Tensor] = {}
    for rank, pieces in layout.copies(site):
        copy = value.clone()
        for at, piece in pieces:
            copy[:, piece.start : piece.stop] = parts[rank][:, at : at + piece.size]
        if not _same(copy, value):
            copies[rank] = copy
    return Values(value, copies)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are equal."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
