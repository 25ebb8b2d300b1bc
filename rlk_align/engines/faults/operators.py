"""The operators of a live model, each of which a formula can stand in for.

A subclass for each engine says where an operator lies there, and how its tensors are laid out;
formulas see canonical ones, `[N, F]`, N rows in whatever order the engine has them.
"""

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlk_align.engines.common.attributes import norm_epsilon
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place, first
from rlk_align.engines.faults.catalogue import Chosen
from rlk_align.engines.faults.sparse import SparseLayers
from rlk_align.engines.faults.unit import Attention, Formula, ForwardTokens, Unit, in_place_of
from rlk_align.errors import BadOption
from rlk_align.model.rotary import checkpoint_rotary
from rlk_align.model.sites import model_sites


class Operators(Hooks, ABC):
    """Closing it undoes every replacement."""

    rows: ForwardTokens
    """Of the forward that runs; an engine's hooks keep it."""

    def __init__(self, engine: Any, model: Any, places: Iterable[Place]) -> None:
        """`places`: where each site lies in the engine's model, of which one rank holds all."""
        super().__init__()
        self._engine, self._model, self.shape = engine, model, engine.shape
        self._rotary = checkpoint_rotary(engine.model_path, engine.shape)
        self._places = {site: place for place in places for site in place.sites}
        self.sites = {s.name: s for s in model_sites(engine.shape)}

    def replace_operator(self, site: str, formula: Formula) -> None:
        """From here on the operator gives what the formula says."""
        at = self.sites[site]
        layer = -1 if at.layer is None else at.layer
        match at.operator.formula:
            case "attention":
                self._attention(layer, formula)
            case "residual" | "activation" | "rotary":
                self._combination(site, formula)
            case "log_softmax":
                self._logprob(formula)
            case "router":
                self.sparse_layers().change_logits(layer, formula)
            case _:
                self._module_output(site, formula)

    def module(self, site: str) -> Any:
        """What gives it."""
        return self._model.get_submodule(self._places[site].module)

    def outputs(self, site: str) -> Any:
        """Which of its module's outputs are the site's."""
        layout = self._places[site].layout
        if layout is None:
            return slice(None)
        return torch.cat([torch.arange(at, at + p.size) for _, at, p in layout.holders(site)])

    def rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """`[N, F]` of an activation, whatever dimensions its rows and its heads have."""
        return value.reshape(len(self.rows.ids), -1)

    def weight(self, site: str) -> torch.Tensor:
        """`[F, ...]`, what the site's operator computes with; a norm's is shared by all heads."""
        whole = self._whole_weight(site)
        return whole if whole.dim() == 1 else whole[self.outputs(site)]

    def _whole_weight(self, site: str) -> torch.Tensor:
        """With that of the operators that are fused with it."""
        return self._model.get_submodule(self._places[site].holder).weight.detach()

    def biased(self, site: str) -> bool:
        """Whether the operator's own module adds a bias."""
        return getattr(self.module(site), "bias", None) is not None

    def attended(
        self,
        formula: Formula,
        result: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """In place of what attention gives for one sequence; tensors as `Attention` has them."""
        unit = Attention(
            result=result,
            query=query,
            key=key,
            value=value,
            visible=visible,
            scale=scale,
            head_dim=self.shape.head_dim,
        )
        return in_place_of(formula, unit)

    def frequencies(self) -> torch.Tensor:
        """Of the checkpoint's rotary embedding, float64. Raises BadOption where they change."""
        if self._rotary is None:
            raise BadOption("the rotary embedding's frequencies change: no fault is planted there")
        device = next(self._model.parameters()).device
        return torch.tensor(self._rotary.inv_freq, dtype=torch.float64, device=device)

    def _module_output(self, site: str, formula: Formula) -> None:
        """Of what has a module of its own: embeddings, norms, projections and the logits."""
        module, index, op = self.module(site), self.outputs(site), self.sites[site].operator
        embedding, every_row = op.formula == "embedding", op.row == "token"
        weight = self.weight(site) if op.weight and not embedding else None
        bias = module.bias.detach()[index] if self.biased(site) else None
        eps = norm_epsilon(module) or 0.0

        def flat(x: torch.Tensor) -> torch.Tensor:
            return self.rows_of(x) if every_row else x.flatten(0, -2)

        def see(_module: Any, inputs: Any, out: Any) -> None:
            value = first(out)
            operands = () if embedding else (flat(inputs[-1]),)
            if op.formula == "rms_norm" and out is not value:
                # A fused norm also gives the sum that it norms.
                operands = (flat(out[1]),)
            new, rows = flat(value).clone(), self.rows if every_row else None
            unit = Unit(
                result=new[:, index],
                inputs=operands,
                head_dim=self.shape.head_dim,
                rows=rows,
                weight=weight,
                bias=bias,
                eps=eps,
            )
            new[:, index] = in_place_of(formula, unit)
            value.copy_(new.reshape(value.shape))

        self.after(module, see)

    def _combination(self, site: str, formula: Formula) -> None:
        """Of what has no module: it is computed from the outputs of other operators."""
        place, inputs = self._places[site], self.sites[site].inputs
        frequencies = self.frequencies() if place.end == "rope" else None
        live: dict[str, torch.Tensor] = {}

        def note(name: str, passed: Any) -> None:
            value = self._places[name].access.read(passed)
            live[name] = self.rows_of(value)[:, self.outputs(name)].clone()

        def overwrite(passed: Any) -> None:
            # Not where somebody asks an activation what it is.
            if len(live) == len(inputs):
                result = place.access.target(passed)
                values = tuple(live.pop(name) for name in inputs)
                unit = Unit(
                    result=self.rows_of(result),
                    inputs=values,
                    head_dim=self.shape.head_dim,
                    rows=self.rows,
                    frequencies=frequencies,
                )
                new = in_place_of(formula, unit)
                result.copy_(new.reshape(result.shape))

        for name in inputs:
            self._watch(name, functools.partial(note, name))
        self._watch(site, overwrite)

    def _watch(self, site: str, see: Callable[[Any], None]) -> None:
        """`see(what the site's module takes or gives)` in each forward."""
        module = self.module(site)
        match self._places[site].end:
            case "input":
                self.on_input(module, see)
            case "output":
                self.on_output(module, see)
            case "rope":
                turns: list[bool] = []
                query_first = [self.sites[site].op == op for op in ("q_rope", "k_rope")]
                self.before(module, lambda *_: turns.extend(query_first))
                self.on_rotation(lambda x: see(x) if turns and turns.pop(0) else None)

    @abstractmethod
    def sparse_layers(self) -> SparseLayers:
        """What faults can change in the model's sparse layers."""

    @abstractmethod
    def on_rotation(self, see: Callable[[torch.Tensor], None]) -> None:
        """`see(what the rotary embedding gives)`: in each attention the query, then the key."""

    @abstractmethod
    def _attention(self, layer: int, formula: Formula) -> None:
        """The formula is given an `Attention` for each sequence."""

    @abstractmethod
    def _logprob(self, formula: Formula) -> None:
        """The formula is given a `Report`."""

    def change_weight(self, site: str, change: Formula) -> None:
        """Writes `change(weight)` over the live weight of a site, until this is closed."""
        whole = self._whole_weight(site)
        before, changed = whole.clone(), whole.clone()
        index = slice(None) if whole.dim() == 1 else self.outputs(site)
        changed[index] = change(changed[index])
        whole.copy_(changed)
        self.callback(whole.copy_, before)

    def change_positions(self, change: Formula) -> None:
        """`change(positions)` is what the model is given."""
        raise NotImplementedError

    def change_boundaries(self, change: Formula) -> None:
        """`change(ends)` is what the model is given of packed sequences."""
        raise NotImplementedError


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
        if not fault.fits(operators.sites):
            raise BadOption(f"fault={chosen}: {site} is of a sparse layer in this model")
        if fault.needs == "bias" and not operators.biased(site):
            raise BadOption(f"fault={chosen}: {site} has no bias in this model")
    formula = make(chosen.strength)
    if fault.kind == "positions":
        operators.change_positions(formula)
    elif fault.kind == "boundaries":
        operators.change_boundaries(formula)
    elif fault.kind == "sparse":
        formula(operators.sparse_layers(), operators.sites[fault.site].layer)
    else:
        change = operators.change_weight if fault.kind == "weights" else operators.replace_operator
        for site in fault.sites:
            change(site, formula)
