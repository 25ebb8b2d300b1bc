"""The rotary embedding of transformers' models, in each engine that runs their code: HF, and vLLM
for a family that it has no class for. The module returns positions and frequencies, and the
function that rotates calls the kernel with them."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import COMPLEX, LATENTS, of_code
from rlk_kernels.integrations.operators import Counted, become
from rlk_kernels.integrations.process_changes import Undo, change_process
from rlk_kernels.integrations.rotary import INTERLEAVED, rotation

_TAKES_POSITIONS = "rlk_takes_positions"
"""Marks an `apply_rotary_pos_emb` that takes positions instead of cosines."""


class Rotary(Counted):
    """Returns positions and frequencies instead of cos and sin; the scaling follows the frequencies
    if it is not 1. Both are integers, because FSDP2 casts floating-point tensors between layers to
    the compute dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `fn` may cast the frequencies, or replace them without values, and no checkpoint has them.
        exact = {name: getattr(self, name) for name in _frequencies(self)}
        super()._apply(fn, recurse)
        for name, values in exact.items():
            self.keep(name, values)
        return self

    def keep(self, name: str, frequencies: Tensor) -> None:
        """Stores fp32 frequencies in the live module; on the meta device they stay in memory."""
        device = getattr(self, name).device
        setattr(self, name, frequencies if device.type == "meta" else frequencies.to(device))

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        self.count()
        if not torch.compiler.is_compiling():
            _check_rotates(type(self).__module__, rotating(self.config))
        kind = f"{layer_type}_" if layer_type else ""
        inv_freq = getattr(self, f"{kind}inv_freq")
        if inv_freq.dtype != torch.float32:
            raise NotSupported(
                f"the rotary embedding's inv_freq was rounded to {inv_freq.dtype} after "
                "use_kernels (by DeepSpeed's data_types.buffer_dtype?): keep buffers in float32"
            )
        turns, scaling = inv_freq.to(x.device), getattr(self, f"{kind}attention_scaling")
        if scaling != 1.0:
            turns = torch.cat([turns, turns.new_full((1,), scaling)])
        return _of_text(position_ids), turns.view(torch.int32)


def _of_text(position_ids: Tensor) -> Tensor:
    """[B or 1, T] of [B or 1, T], or of [3, B, T]: time, height and width, equal in text."""
    if position_ids.dim() == 2:
        return position_ids
    # transformers expands the positions of text; others are compared.
    equal = position_ids.stride(0) == 0 or bool((position_ids == position_ids[:1]).all())
    if not equal:
        raise NotSupported("positions of images, whose height or width differs, are not supported")
    return position_ids[0]


def _frequencies(rotary: Any) -> dict[str, str]:
    """Name of the frequencies in a live module -> the kind of layer that they are for; empty if
    they are for all layers."""
    kinds = getattr(rotary, "rope_type", None)
    if not isinstance(kinds, dict):
        return {"inv_freq": ""}
    return {f"{kind}_inv_freq": kind for kind in kinds}


def _modeling(config: Any) -> Any:
    """The module of transformers with a family's code."""
    family = of_code(config.model_type)
    return sys.modules[f"transformers.models.{family}.modeling_{family}"]


def install(rotary: Any, config: Any) -> ExitStack:
    """Makes a live module a `Rotary`, and its family's function rotate by the kernel. Closing the
    result undoes both."""
    parameters, undo = config.rope_parameters, ExitStack()
    numbers = {
        name: rotation(parameters[kind] if kind else parameters, 2 * getattr(rotary, name).numel())
        for name, kind in _frequencies(rotary).items()
    }
    become(rotary, Rotary, undo)
    for name, (frequencies, scaling) in numbers.items():
        factor = name.replace("inv_freq", "attention_scaling")
        for changed in (name, factor):
            undo.callback(setattr, rotary, changed, getattr(rotary, changed))
        # The live module has them, so that later changes to them take effect.
        rotary.keep(name, frequencies)
        setattr(rotary, factor, 1.0 if scaling is None else scaling.item())
    modeling, interleaved = _modeling(config), config.model_type in INTERLEAVED
    name = rotating(config)
    undo.callback(change_process(modeling, lambda: _rotate_in(modeling, name, interleaved)))
    return undo


def rotating(config: Any) -> str:
    """The name of the function that rotates in the module with a family's code."""
    if config.model_type in COMPLEX:
        return "apply_rotary_emb"
    latent = config.model_type in LATENTS
    return "apply_rotary_pos_emb_interleave" if latent else "apply_rotary_pos_emb"


def _rotate_in(modeling: Any, name: str, interleaved: bool) -> Undo:
    """Makes the family's function of this name also accept the values of `Rotary`, for which the
    features keep their order. The returned function undoes the change. interleaved: see
    `profile.rope`."""
    original = getattr(modeling, name)
    first, *rest = inspect.signature(original).parameters
    if first == "x":
        wrap: Callable[[Any], Any] = _wrapped_alone
    else:
        kind = _wrapped_complex if len(rest) == 2 else _wrapped
        wrap = partial(kind, interleaved=interleaved)
    setattr(modeling, name, wrap(original))
    return lambda: setattr(modeling, name, original)


def _check_rotates(modeling: str, name: str) -> None:
    """Raises NotSupported if the family's function does not accept the values of `Rotary`. A
    wrapper around ours accepts them if it uses `functools.wraps`."""
    rotate = getattr(sys.modules[modeling], name)
    if not hasattr(rotate, _TAKES_POSITIONS):
        raise NotSupported(
            f"{name} of {modeling} is {rotate.__module__}.{rotate.__qualname__}: it "
            "was replaced after use_kernels, or the model is a copy of one whose kernels were "
            "removed"
        )


def _wrapped(original: Any, interleaved: bool) -> Any:
    @functools.wraps(original)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cos.is_floating_point():
            return original(q, k, cos, sin, *args, **kwargs)
        return _rotate(q, k, cos, sin.view(torch.float32), interleaved)

    setattr(rotate, _TAKES_POSITIONS, True)
    return rotate


def _wrapped_complex(original: Any, interleaved: bool) -> Any:
    """The same for a function that takes complex numbers in place of cosines and sines."""

    @functools.wraps(original)
    def rotate(q: Tensor, k: Tensor, at: Tensor, turns: Tensor | None = None) -> Any:
        if turns is None:
            return original(q, k, at)
        return _rotate(q, k, at, turns.view(torch.float32), interleaved)

    setattr(rotate, _TAKES_POSITIONS, True)
    return rotate


def _wrapped_alone(original: Any) -> Any:
    """The same for a function that rotates either q or k, [B, T, H, D]."""

    @functools.wraps(original)
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if cos.is_floating_point():
            return original(x, cos, sin, unsqueeze_dim)
        if unsqueeze_dim != 2:
            raise NotSupported(f"apply_rotary_pos_emb with unsqueeze_dim={unsqueeze_dim}")
        x = x.transpose(1, 2)
        # The operator rotates two tensors.
        turned, _ = _rotate(x, x[:, :1], cos, sin.view(torch.float32), False)
        return turned.transpose(1, 2)

    setattr(rotate, _TAKES_POSITIONS, True)
    return rotate


def _rotate(
    q: Tensor, k: Tensor, positions: Tensor, turns: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """(q[B, H, T, D], k[B, Hk, T, D]) rotated by positions[B or 1, T]; turns: the second value of
    `Rotary`."""
    batch, _, length, width = q.shape
    inv_freq, scaling = turns[: width // 2], turns[width // 2 :]
    at = positions.expand(batch, length).reshape(-1)
    # The heads' norm or the projection has written [B, T, H, D], so that these are no copies.
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
    turned = profile.rope(*rows, at, inv_freq, scaling if len(scaling) else None, interleaved)
    new = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in turned)
    return tuple(new)
