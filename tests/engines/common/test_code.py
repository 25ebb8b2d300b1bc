"""Where an operator is in its engine's code: the file and the line belong to one function."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import linear

from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.places import Place


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args)

    return around


class Inherits(torch.nn.Linear):
    """Has no `forward` of its own, as most linear layers of Megatron-core have none."""


class Defines(torch.nn.Linear):
    @wrapped
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class InheritsTheSecond(Defines):
    pass


@pytest.mark.parametrize(
    ("kind", "file", "of"),
    [
        (Inherits, "torch/nn/modules/linear.py", linear.Linear.forward),
        (Defines, __file__, Defines.__dict__["forward"].__wrapped__),
        (InheritsTheSecond, __file__, Defines.__dict__["forward"].__wrapped__),
    ],
)
def test_the_line_is_of_the_file(kind: type[torch.nn.Linear], file: str, of: Any) -> None:
    model = torch.nn.ModuleDict({"proj": kind(2, 2)})
    place = code_places(model, [Place(sites=("layers.0.q_proj",), module="proj")])[
        "layers.0.q_proj"
    ]
    assert place.kind == kind.__qualname__
    assert place.file == file
    assert place.line == inspect.getsourcelines(of)[1]
    source = Path(inspect.getsourcefile(of) or "").read_text().splitlines()
    assert any("def forward" in line for line in source[place.line - 1 : place.line + 1])
