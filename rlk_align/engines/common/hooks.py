"""Hooks on live modules that all come out again."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch


class Hooks(ExitStack):
    """Closing removes every hook, and puts back what was replaced, in reverse order."""

    def before(self, module: torch.nn.Module, see: Callable[..., None], **options: Any) -> None:
        """`see(module, inputs)` before each forward; `options` as torch has them."""
        self.callback(module.register_forward_pre_hook(see, **options).remove)

    def after(self, module: torch.nn.Module, see: Callable[[Any, Any, Any], Any]) -> None:
        """`see(module, inputs, output)` after each forward; what it returns, unless None, is what
        the module returns."""
        self.callback(module.register_forward_hook(see).remove)

    def on_input(self, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
        """`see(first input)` before each forward."""

        def hook(_module: Any, inputs: Any) -> None:
            see(inputs[0])

        self.before(module, hook)

    def on_output(self, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
        """`see(output)` after each forward."""

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            see(output)

        self.after(module, hook)

    def on_outputs(self, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
        """`see` each of several outputs, one after another, after each forward."""

        def hook(outputs: Any) -> None:
            for output in outputs:
                see(output)

        self.on_output(module, hook)

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """`function` as attribute `name` of a module, or of one object over its class's."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, function)
