"""What each module of a model computes by transformers' own code.

The model is built without weights from config.json, in this process, which no patch of the user's
reaches. A module is known if its class, called with random weights and inputs, computes one of the
formulas below. Its epsilon is the one of config.json with which the formula fits; if none fits, it
is one that is usual in code.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import transformers_config
from rlk_align.probe.referee import formulas
from rlk_align.probe.referee.rounding import rounding_variance
from rlk_align.text import one_line

Formula = Literal["linear", "embedding", "rms_norm", "layer_norm", "activation"]

FITS = 1e-5
"""The largest relative error of a class in float32 that computes a formula."""
_ONCE = 2.0
"""The mean square of the error of an activation that rounds its result alone, in squared roundings;
1 is expected."""
_IN_CODE = (1e-5, 1e-6, 1e-8, 1e-12)
"""The epsilons that code states where config.json does not."""
_OTHER_CLASSES = (
    *(TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError),
    *(ArithmeticError, ImportError),
)
"""What a class raises that takes other arguments than one tensor."""
_ROWS = 8
"""The number of rows that a class is tried with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModule:
    """What a module computes."""

    formula: Formula
    transposed: bool = False
    """Whether a linear module's weight is `[in, out]`."""
    one_plus: bool = False
    """Whether a norm multiplies by 1 + weight."""
    eps: float = 0.0
    activation: str = ""
    """A key of `probe.referee.formulas.ACTIVATIONS`."""
    in_steps: Any = None
    """An activation that rounds the results of several steps, as a module."""

    def activate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact activation of `x`, and the variance of the roundings of its steps, float64 of
        the same shape."""
        exact = formulas.ACTIVATIONS[self.activation](x.double())
        if self.in_steps is None:
            return exact, torch.zeros_like(exact)
        with torch.no_grad():
            return exact, (self.in_steps(x).double() - exact).square()


@dataclass(frozen=True, slots=True)
class DefinedModule:
    """A module of the model by transformers' code."""

    kind: str
    """Its class."""
    parameters: tuple[str, ...]
    """The names of its own parameters."""
    known: KnownModule | None


def define(model: Path) -> dict[str, DefinedModule]:
    """Path -> module, for every module that owns parameters, and every activation.

    Raises ModelError if transformers cannot build the model.
    """
    built, config = _built(model)
    epsilons = sorted(set(_epsilons(config)))
    tried: dict[tuple[Any, ...], KnownModule | None] = {}
    found: dict[str, DefinedModule] = {}
    for path, module in built.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not path or not (own or _stateless(module)):
            continue
        key = (type(module), tuple((n, p.shape) for n, p in own.items()), repr(module))
        if key not in tried:
            tried[key] = _known(module, own, epsilons)
        if own or tried[key]:
            found[path] = DefinedModule(type(module).__name__, tuple(own), tried[key])
    return found


def _built(model: Path) -> tuple[Any, dict[str, Any]]:
    """The model without weights, and its config with all defaults."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # Its advice on the config is for the engines' logs.
    logging.set_verbosity_error()
    try:
        config = transformers_config(model)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval(), config.to_dict()
    except Exception as error:
        # The rules by which transformers checks configs may raise any exception.
        raise ModelError(f"transformers cannot build {model}: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _stateless(module: Any) -> bool:
    return not any(True for _ in (*module.children(), *module.parameters(), *module.buffers()))


def _epsilons(config: dict[str, Any]) -> Iterator[float]:
    """The values of config.json, defaults included, whose names speak of an epsilon."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _epsilons(value)
        elif "eps" in str(key) and isinstance(value, float) and 0 < value < 1:
            yield value


def _known(module: Any, own: dict[str, Any], epsilons: list[float]) -> KnownModule | None:
    if type(module) is torch.nn.Linear:
        return KnownModule(formula="linear")
    if isinstance(module, torch.nn.Embedding):
        plain = type(module) is torch.nn.Embedding and module.max_norm is None
        return KnownModule(formula="embedding") if plain else None
    if not own:
        name = next((n for n in formulas.ACTIVATIONS if _is_activation(module, n)), None)
        if name is None:
            return None
        in_steps = module if _rounds_often(module, name) else None
        return KnownModule(formula="activation", activation=name, in_steps=in_steps)
    weight = own.get("weight")
    if weight is None or not own.keys() <= {"weight", "bias"} or dict(module.named_buffers()):
        return None
    if weight.dim() == 2:
        return next((k for k in _PRODUCTS if _is_product(module, k)), None)
    if weight.dim() != 1:
        return None
    norms = (
        KnownModule(formula=formula, one_plus=one_plus, eps=eps)
        for eps in (*epsilons, *_IN_CODE)
        for formula in _NORMS
        for one_plus in (False, True)
    )
    return next((k for k in norms if _is_norm(module, k)), None)


_NORMS: tuple[Formula, ...] = ("rms_norm", "layer_norm")
_PRODUCTS = (KnownModule(formula="linear"), KnownModule(formula="linear", transposed=True))


def norm(
    known: KnownModule, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The output of a norm, float64 `[N, F]`."""
    weight = weight + 1 if known.one_plus else weight
    if known.formula == "rms_norm":
        out = formulas.rms_norm(x, weight, known.eps)
        return out if bias is None else out + bias.repeat(x.shape[1] // len(bias))
    groups = x.reshape(-1, len(weight))
    return formulas.layer_norm(groups, weight, bias, known.eps)[0].reshape_as(x)


def _is_norm(module: Any, known: KnownModule) -> bool:
    trial, generator = _filled(module), torch.Generator().manual_seed(0)
    # As large as the epsilon, and off zero, so that both matter.
    x = torch.randn(_ROWS, len(trial.weight), generator=generator) + 0.5
    x = x * known.eps**0.5
    bias = getattr(trial, "bias", None)
    exact = norm(known, x.double(), trial.weight.double(), None if bias is None else bias.double())
    return _fits(trial, x, exact)


def _is_product(module: Any, known: KnownModule) -> bool:
    trial, generator = _filled(module), torch.Generator().manual_seed(0)
    weight = trial.weight.double().T if known.transposed else trial.weight.double()
    x = torch.randn(_ROWS, weight.shape[1], generator=generator)
    bias = getattr(trial, "bias", None)
    if bias is not None and len(bias) != len(weight):
        return False
    exact = formulas.linear(x.double(), weight, None if bias is None else bias.double())
    return _fits(trial, x, exact)


def _is_activation(module: Any, name: str) -> bool:
    x = torch.linspace(-3, 3, 97)[None]
    return _fits(module, x, formulas.ACTIVATIONS[name](x.double()))


def _rounds_often(module: Any, name: str) -> bool:
    """Whether an activation rounds more than its result: transformers composes some of several
    operators, each of which rounds to the model's dtype."""
    x = torch.linspace(-3, 3, 4096).bfloat16()
    exact = formulas.ACTIVATIONS[name](x.double())
    with torch.no_grad():
        error = module(x[None])[0].double() - exact
    squares = error.square() / rounding_variance(exact, "bfloat16")
    return not bool(squares.mean() <= _ONCE)


def _filled(module: Any) -> Any:
    """A copy of a module on the CPU with random weights."""
    trial, generator = copy.deepcopy(module).to_empty(device="cpu").float(), torch.Generator()
    for parameter in trial.parameters(recurse=False):
        parameter.data.uniform_(0.5, 1.5, generator=generator.manual_seed(parameter.numel()))
    return trial


def _fits(module: Any, x: torch.Tensor, exact: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            out = module(x[None])
    except _OTHER_CLASSES:
        return False
    if not isinstance(out, torch.Tensor) or out.numel() != exact.numel():
        return False
    error = (out.double().reshape(exact.shape) - exact).norm()
    return bool(error <= FITS * exact.norm())
