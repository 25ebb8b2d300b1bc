"""Hooks and replacements in live modules, all of which are undone on closing."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch


class Hooks(ExitStack):
    """Closing removes every hook and restores every replaced attribute, in reverse order."""

    def before(self, module: torch.nn.Module, see: Callable[..., None], **options: Any) -> None:
        """Calls `see(module, inputs)` before each forward; `options` are those of torch."""
        self.callback(module.register_forward_pre_hook(see, **options).remove)

    def after(self, module: torch.nn.Module, see: Callable[[Any, Any, Any], Any]) -> None:
        """Calls `see(module, inputs, output)` after each forward; unless it returns None, the
        module returns its result."""
        self.callback(module.register_forward_hook(see).remove)

    def on_input(self, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
        """Calls `see(first input)` before each forward."""

        def hook(_module: Any, inputs: Any) -> None:
            see(inputs[0])

        self.before(module, hook)

    def on_output(self, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
        """Calls `see(output)` after each forward."""

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            see(output)

        self.after(module, hook)

    def on_outputs(self, module: torch.nn.Module, see: Callable[[Any], None]) -> None:
        """Calls `see` with each of several outputs in turn, after each forward."""

        def hook(outputs: Any) -> None:
            for output in outputs:
                see(output)

        self.on_output(module, hook)

    def around(
        self,
        module: torch.nn.Module,
        before: Callable[[Any, Any], None],
        after: Callable[[Any], None] | None = None,
    ) -> None:
        """Calls `before(args, kwargs)` and `after(output)` around each forward of a module. Some of
        vLLM's classes call `forward` past torch's hooks."""
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            before(args, kwargs)
            output = original(*args, **kwargs)
            if after is not None:
                after(output)
            return output

        self.replace(module, "forward", forward)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Makes `value` the attribute `name` of a module, a class, or one object."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)
