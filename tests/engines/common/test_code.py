"""The location of an operator in its engine's code: file and line belong to the same function."""

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
    """Inherits its `forward`, like most linear layers of Megatron-core."""


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


def test_a_replaced_forward_is_where_a_module_computes() -> None:
    model = torch.nn.ModuleDict({"proj": torch.nn.Linear(2, 2)})
    place = Place(sites=("layers.0.q_proj",), module="proj")

    def own(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * factor

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output

    for forward in (own, functools.partial(own, factor=2.0), wrapped(own)):
        model["proj"].forward = forward
        found = code_places(model, [place])["layers.0.q_proj"]
        assert (found.file, found.line) == (__file__, inspect.getsourcelines(own)[1])
        assert found.hooks == []
    del model["proj"].forward
    model["proj"].register_forward_hook(hook)
    found = code_places(model, [place])["layers.0.q_proj"]
    assert found.file == "torch/nn/modules/linear.py"
    assert found.hooks == [f"{__file__}:{inspect.getsourcelines(hook)[1]}"]
    assert str(found).endswith(f", hook {found.hooks[0]})")
