"""The operators of a live model, each of which a formula can stand in for.

A subclass for each engine says where an operator lies there, and how its tensors are laid out;
formulas see canonical ones, `[N, F]`, N rows in whatever order the engine has them.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place
from rlk_align.engines.faults.catalogue import Chosen
from rlk_align.engines.faults.unit import Formula, Rows, Unit, in_place_of
from rlk_align.errors import BadOption
from rlk_align.model.families import ModelShape
from rlk_align.model.rotary import Rotary
from rlk_align.model.sites import model_sites


class Operators(Hooks, ABC):
    """Closing it undoes every replacement."""

    rows: Rows
    """Of the forward that runs; an engine's hooks keep it."""

    def __init__(
        self, model: Any, places: Iterable[Place], shape: ModelShape, rotary: Rotary | None
    ) -> None:
        """`places`: where each site lies in the model, of which one rank holds all."""
        super().__init__()
        self._model, self.shape, self._rotary = model, shape, rotary
        self._places = {site: place for place in places for site in place.sites}
        self.sites = {s.name: s for s in model_sites(shape)}

    def on_input(self, module: Any, see: Callable[[Any], object]) -> None:
        """`see(first input)` before each forward."""
        self.before(module, lambda _module, inputs: _seen(see, inputs[0]))

    def on_output(self, module: Any, see: Callable[[Any], object]) -> None:
        """`see(output)` after each forward."""
        self.after(module, lambda _module, _inputs, out: _seen(see, out))

    def replace_operator(self, site: str, formula: Formula) -> None:
        """From here on the operator gives what the formula says."""
        at = self.sites[site]
        layer, op = -1 if at.layer is None else at.layer, at.op
        match at.operator.formula:
            case "embedding":
                self._embed(formula)
            case "rms_norm":
                self._norm(site, formula)
            case "linear" if layer < 0:
                self._logits(formula)
            case "linear":
                self._projection(site, formula)
            case "rotary":
                self._rope(layer, op, formula)
            case "attention":
                self._attention(layer, formula)
            case "residual":
                self._residual(layer, op, formula)
            case "activation":
                self._act(layer, formula)
            case "log_softmax":
                self._logprob(formula)

    def module(self, site: str) -> Any:
        """What gives it."""
        return self._model.get_submodule(self._places[site].module)

    def outputs(self, site: str) -> Any:
        """Which of its module's outputs are the site's."""
        layout = self._places[site].layout
        if layout is None:
            return slice(None)
        return torch.cat([torch.arange(at, at + p.size) for _, at, p in layout.holders(site)])

    def computed(
        self,
        formula: Formula,
        own: torch.Tensor,
        inputs: tuple[torch.Tensor, ...] = (),
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 0.0,
        rows: Rows | None = None,
        frequencies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In place of an operator's own result, `[N, F]`."""
        unit = Unit(
            own=own,
            inputs=inputs,
            head_dim=self.shape.head_dim,
            rows=rows,
            weight=weight,
            bias=bias,
            eps=eps,
            frequencies=frequencies,
        )
        return in_place_of(formula, unit)

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Of the checkpoint's rotary embedding, float64. Raises BadOption where they change."""
        if self._rotary is None:
            raise BadOption("the rotary embedding's frequencies change: no fault is planted there")
        return torch.tensor(self._rotary.inv_freq, dtype=torch.float64, device=device)

    @abstractmethod
    def _embed(self, formula: Formula) -> None: ...

    @abstractmethod
    def _norm(self, site: str, formula: Formula) -> None: ...

    @abstractmethod
    def _projection(self, site: str, formula: Formula) -> None: ...

    @abstractmethod
    def _rope(self, layer: int, op: str, formula: Formula) -> None: ...

    @abstractmethod
    def _attention(self, layer: int, formula: Formula) -> None:
        """The formula is given an `Attention` for each sequence."""

    @abstractmethod
    def _act(self, layer: int, formula: Formula) -> None: ...

    @abstractmethod
    def _residual(self, layer: int, op: str, formula: Formula) -> None:
        """Inputs: the stream, then the branch."""

    @abstractmethod
    def _logits(self, formula: Formula) -> None: ...

    @abstractmethod
    def _logprob(self, formula: Formula) -> None:
        """The formula is given a `Report`."""

    @abstractmethod
    def biased(self, site: str) -> bool:
        """Whether a projection adds a bias of its own."""

    @abstractmethod
    def change_weight(self, site: str, change: Formula) -> None:
        """Writes `change(weight)` over the live weight of a site."""

    def change_positions(self, change: Formula) -> None:
        """`change(positions)` is what the model is given."""
        raise NotImplementedError

    def change_boundaries(self, change: Formula) -> None:
        """`change(ends)` is what the model is given of packed sequences."""
        raise NotImplementedError

    def write_weight(self, weight: torch.Tensor, changed: torch.Tensor) -> None:
        """Over a live weight, until this is closed."""
        before = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(changed)

        def restore() -> None:
            with torch.no_grad():
                weight.copy_(before)

        self.callback(restore)


def _seen(see: Callable[[Any], object], value: Any) -> None:
    """A hook that returns nothing changes nothing."""
    see(value)


def plant(chosen: Chosen, operators: Operators) -> None:
    """Puts a fault into a live model. Raises BadOption for a model that has no place for it."""
    fault, shape = chosen.fault, operators.shape
    module, _, name = fault.formula.partition(":")
    make: Callable[[float], Formula] = getattr(
        importlib.import_module(f"rlk_align.engines.faults.formulas.{module}"), name
    )
    for site in fault.sites:
        if site not in operators.sites:
            raise BadOption(
                f"fault={chosen}: a {shape.model_type} model of {shape.layers} layers has no {site}"
            )
        if fault.needs_bias and not operators.biased(site):
            raise BadOption(f"fault={chosen}: {site} has no bias in this model")
    formula = make(chosen.strength)
    if fault.kind == "positions":
        operators.change_positions(formula)
    elif fault.kind == "boundaries":
        operators.change_boundaries(formula)
    else:
        change = operators.change_weight if fault.kind == "weights" else operators.replace_operator
        for site in fault.sites:
            change(site, formula)
