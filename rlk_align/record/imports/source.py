"""What a reader returns of one side's files. F = features of a tensor-parallel rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

Load = Callable[[], torch.Tensor]
"""Reads a tensor when it is needed."""


class Tap(NamedTuple):
    """Where in the model a tool took a tensor."""

    module: str
    """The path of a module, e.g. `model.layers.3.mlp.down_proj`; or the name of a site."""
    end: str
    """`input.N` or `output.N`, where `output.0` is also an only output; `SITE` for a site."""


SITE = "site"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one sequence in a forward."""

    key: str
    """What names the sequence in all forwards of the files."""
    start: int
    """The position of the first token."""
    ids: tuple[int, ...]
    rows: np.ndarray
    """int64 `[len(ids)]`: their rows among those of the forward, -1 for tokens without one."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of the model."""

    name: str
    """In words, for notes."""
    segments: tuple[Segment, ...]
    shape: tuple[int, ...]
    """The shape of its tokens, padding included: `[batch, length]`, or `[rows]`."""
    taps: Mapping[Tap, tuple[Load, ...]]
    """Tap -> the tensor of each tensor-parallel rank: `[*shape, F]`, where F may be heads and their
    size, or `[batch, heads, length, size]`."""
    of_last: frozenset[Tap] = frozenset()
    """Taps with a row for each segment only, that of its last token."""


@dataclass(frozen=True, slots=True)
class Source:
    """What the files have of one side."""

    tool: str
    """Who wrote them, e.g. `SGLang's dumper`."""
    forwards: tuple[Forward, ...]
    tp: int = 1
    parameters: Mapping[str, Load] = field(default_factory=dict)
    """Name of a tensor of the live model, e.g. `model.norm.weight` -> the whole tensor."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was read and left out, in words."""
