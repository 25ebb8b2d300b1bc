"""The operators of a live model, each of which a formula can stand in for.

A subclass for each engine says where an operator lies there, and how its tensors are laid out;
formulas see canonical ones, `[N, F]`, N rows in whatever order the engine has them.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import Any

import torch

from rlk_align.engines.common.attributes import norm_epsilon
from rlk_align.engines.common.experts import has_kernels
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place, first
from rlk_align.engines.common.weights import Parameter, write_part
from rlk_align.errors import BadOption
from rlk_align.model.rotary import checkpoint_rotary
from rlk_align.model.sites import model_sites
from rlk_align.selftest.faults.catalogue import Chosen
from rlk_align.selftest.planting.operands import (
    Attention,
    Formula,
    ForwardTokens,
    Unit,
    in_place_of,
)
from rlk_align.selftest.planting.rank import ALONE, Sharing
from rlk_align.selftest.planting.sparse_layers import SparseLayers


class LiveOperators(Hooks, ABC):
    """Closing it undoes every replacement. Of a model that ranks share, every rank has one, and all
    are used alike: formulas are computed on all of them, and a rank keeps its part of the result,
    where it is one that has the fault."""

    rows: ForwardTokens
    """The rows of the whole forward that runs; an engine's hooks keep it up to date."""

    def __init__(
        self,
        engine: Any,
        model: Any,
        places: Iterable[Place],
        chosen: Chosen,
        sharing: Sharing = ALONE,
    ) -> None:
        """`engine`: has the `shape` and the `model_path`; `places`: where each site lies in the
        engine's model."""
        super().__init__()
        self._engine, self._model, self.shape = engine, model, engine.shape
        self._chosen, self._sharing = chosen, sharing
        self._rotary = checkpoint_rotary(engine.model_path, engine.shape)
        self._places = {site: place for place in places for site in place.sites}
        self.sites = {s.name: s for s in model_sites(engine.shape)}

    @property
    def faulty(self) -> bool:
        """Whether this rank has the fault."""
        return self._chosen.on(self._sharing.rank)

    @property
    def with_kernels(self) -> bool:
        """Whether the kernels compute the model's sparse layers."""
        return any(map(has_kernels, self._model.modules()))

    def replace_operator(self, site: str, formula: Formula) -> None:
        """From here on the operator returns what the formula computes."""
        at = self.sites[site]
        layer = -1 if at.layer is None else at.layer
        match at.operator.formula:
            case "attention":
                self._attention(layer, formula)
            case "residual" | "activation" | "rotary":
                self._combination(site, formula)
            case "log_softmax":
                self._logprob(formula)
            case "router" if not self.faulty:
                return
            case "router":
                self.sparse_layers().change_logits(layer, formula)
            case _:
                self._module_output(site, formula)

    def computes(self, site: str) -> bool:
        """Whether this rank computes it, or a part of it."""
        return True

    def module(self, site: str) -> Any:
        """What gives it."""
        return self._model.get_submodule(self._places[site].module)

    def whole(self, site: str, value: torch.Tensor, some: bool = False) -> torch.Tensor:
        """`[N, F]` of a site's live value, whatever dimensions its rows and its heads have. `some`:
        whether it may have fewer rows than the forward."""
        local = value.flatten(0, -2) if some else self._flat(site, value)
        return self._sharing.whole(site, local, self._places[site].layout)

    def _flat(self, site: str, value: torch.Tensor) -> torch.Tensor:
        if self.sites[site].operator.row != "token":
            return value.flatten(0, -2)
        shares = self._sharing.rows and self._places[site].layout is None
        return value.reshape(len(self.rows.ids) // (self._sharing.ranks if shares else 1), -1)

    def put_back(self, site: str, whole: torch.Tensor, value: torch.Tensor) -> None:
        """Writes this rank's part of `[N, F]` over a site's live value, where it has the fault."""
        if self.faulty:
            local = self._flat(site, value).clone()
            self._sharing.put_back(site, whole, local, self._places[site].layout)
            value.copy_(local.reshape(value.shape))

    @abstractmethod
    def parameter(self, name: str) -> torch.Tensor:
        """A canonical parameter, whole; called on all ranks."""

    @abstractmethod
    def live(self, name: str) -> tuple[torch.Tensor, Parameter | None]:
        """The parameter of this rank's model that holds it, and how; None where nothing else is in
        it and no rank shares it."""

    def biased(self, site: str) -> bool:
        """Whether the operator's own module adds a bias."""
        return getattr(self.module(site), "bias", None) is not None

    def attended(
        self,
        formula: Formula,
        layer: int,
        result: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """In place of what attention gives for one sequence; tensors as `Attention` has them, with
        this rank's heads."""
        site, width = f"layers.{layer}.attn", self.shape.head_dim

        def whole(name: str, local: torch.Tensor) -> torch.Tensor:
            name = f"layers.{layer}.{name}"
            layout = self._places[name].layout
            if layout is None:
                return local
            return self._sharing.whole(name, local.flatten(1), layout).unflatten(1, (-1, width))

        unit = Attention(
            result=whole("attn", result).flatten(1),
            query=whole("q_rope", query),
            # Values are cut into heads as keys are.
            key=whole("k_rope", key),
            value=whole("k_rope", value),
            visible=visible,
            scale=scale,
            head_dim=width,
        )
        new, local = in_place_of(formula, unit), result.clone()
        if self.faulty:
            self._sharing.put_back(site, new, local, self._places[site].layout)
        return local

    def frequencies(self) -> torch.Tensor:
        """The frequencies of the checkpoint's rotary embedding, float64. Raises BadOption where
        they change."""
        if self._rotary is None:
            raise BadOption("the rotary embedding's frequencies change: no fault is planted there")
        device = next(self._model.parameters()).device
        return torch.tensor(self._rotary.inv_freq, dtype=torch.float64, device=device)

    def _module_output(self, site: str, formula: Formula) -> None:
        """Replaces the output of an operator that has a module of its own: embeddings, norms,
        projections and the logits."""
        module, op = self.module(site), self.sites[site].operator
        name = op.parameter or site
        embedding, every_row = op.formula == "embedding", op.row == "token"
        weight = self.parameter(name) if op.weight and not embedding else None
        bias = self.parameter(f"{name}.bias") if self.biased(site) else None
        eps = norm_epsilon(module) or 0.0
        # A norm of heads has the heads that it gives; a product those of the operator before it.
        of = site if op.formula == "rms_norm" else next(iter(self.sites[site].inputs), site)

        def see(_module: Any, inputs: Any, out: Any) -> None:
            value = first(out)
            if value is None:
                return  # A rank that is given no logits.
            operands = () if embedding else (self.whole(of, inputs[-1], not every_row),)
            if op.formula == "rms_norm" and out is not value:
                # A fused norm also gives the sum that it norms.
                operands = (self.whole(site, out[1]),)
            unit = Unit(
                result=self.whole(site, value),
                inputs=operands,
                head_dim=self.shape.head_dim,
                rows=self.rows if every_row else None,
                weight=weight,
                bias=bias,
                eps=eps,
            )
            self.put_back(site, in_place_of(formula, unit), value)

        self.after(module, see)

    def _combination(self, site: str, formula: Formula) -> None:
        """Replaces what has no module: it is computed from the outputs of other operators."""
        place, inputs = self._places[site], self.sites[site].inputs
        frequencies = self.frequencies() if place.end == "rope" else None
        live: dict[str, torch.Tensor] = {}

        def note(name: str, passed: Any) -> None:
            live[name] = self.whole(name, self._places[name].access.read(passed)).clone()

        def overwrite(passed: Any) -> None:
            # Not where somebody asks an activation what it is.
            if len(live) == len(inputs):
                result = place.access.target(passed)
                unit = Unit(
                    result=self.whole(site, result),
                    inputs=tuple(live.pop(name) for name in inputs),
                    head_dim=self.shape.head_dim,
                    rows=self.rows,
                    frequencies=frequencies,
                )
                self.put_back(site, in_place_of(formula, unit), result)

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
        changed = change(self.parameter(site).clone())
        live, entry = self.live(site)
        if not self.faulty:
            return
        self.callback(live.copy_, live.clone())
        if entry is None:
            live.copy_(changed)
        else:
            write_part(entry, site, self._sharing.rank, changed, live)

    def change_positions(self, change: Formula) -> None:
        """`change(positions)` is what the model is given."""
        raise NotImplementedError

    def change_boundaries(self, change: Formula) -> None:
        """`change(ends)` is what the model is given of packed sequences."""
        raise NotImplementedError


def plant(operators: LiveOperators, chosen: Chosen) -> LiveOperators:
    """Puts a fault into a live model. Raises BadOption for a model that has no place for it."""
    fault, shape = chosen.fault, operators.shape
    make: Callable[[float], Formula] = resolve_name(f"rlk_align.selftest.formulas.{fault.formula}")
    for site in fault.sites:
        if site not in operators.sites:
            raise BadOption(
                f"fault={chosen}: a {shape.model_type} model of {shape.layers} layers has no {site}"
            )
        if not fault.fits(operators.sites):
            raise BadOption(f"fault={chosen}: {site} is of a sparse layer in this model")
        if fault.needs == "bias" and operators.computes(site) and not operators.biased(site):
            raise BadOption(f"fault={chosen}: {site} has no bias in this model")
    formula = make(chosen.strength)
    if fault.kind == "positions":
        operators.change_positions(formula)
    elif fault.kind == "boundaries":
        operators.change_boundaries(formula)
    elif fault.kind == "sparse":
        if operators.faulty and operators.computes(fault.site):
            formula(operators.sparse_layers(), operators.sites[fault.site].layer)
    else:
        change = operators.change_weight if fault.kind == "weights" else operators.replace_operator
        for site in filter(operators.computes, fault.sites):
            change(site, formula)
    return operators
