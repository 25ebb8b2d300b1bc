"""The operators of a live model, each of which can be replaced by a formula.

A subclass for each engine knows where an operator is and how its tensors are laid out. Formulas see
canonical tensors `[N, F]`, with N rows in the engine's order.
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
from rlk_align.engines.common.layout import even, of_outputs
from rlk_align.engines.common.places import HEADS_FIRST, Place, first
from rlk_align.engines.common.weights import Parameter, write_part
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import read_config
from rlk_align.model.operators import OPERATORS
from rlk_align.model.rotary import checkpoint_rotary
from rlk_align.model.shape import input_scales, multiplier_of
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
    """The operators of one rank's model. Closing it undoes every replacement. All ranks compute
    each formula on whole operators, and a rank with the fault writes back its part of the
    result."""

    norms_add = False
    """Whether a residual is added inside the norm that follows it."""
    rows: ForwardTokens
    """The rows of the current forward; the engine's hooks update them."""

    def __init__(
        self,
        engine: Any,
        model: Any,
        places: Iterable[Place],
        chosen: Chosen,
        sharing: Sharing = ALONE,
    ) -> None:
        """`engine` has a `shape` and a `model_path`; `places` are those of the engine's model."""
        super().__init__()
        self._engine, self._model, self.shape = engine, model, engine.shape
        self._chosen, self._sharing = chosen, sharing
        self._config = read_config(engine.model_path)
        self._rotary = functools.partial(checkpoint_rotary, engine.model_path, engine.shape)
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
        """Makes the operator return the formula's result."""
        at = self.sites[site]
        layer = -1 if at.layer is None else at.layer
        match at.operator.formula:
            case "attention" | "latent_attention":
                self._attention(layer, formula)
            case "delta_rule":
                self._delta_rule(layer, formula)
            case "state_space":
                self._state_space(layer, formula)
            case "time_step" | "step_decay" | "decay":
                self._while_running(site, formula)
            case "short_conv":
                self._convolution(layer, formula)
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
        """Whether this rank computes the site or a part of it."""
        return True

    def module(self, site: str) -> Any:
        """The module that computes the site."""
        return self._model.get_submodule(self._places[site].module)

    def whole(self, site: str, value: torch.Tensor, some: bool = False) -> torch.Tensor:
        """Returns a site's live value as `[N, F]`. `some`: whether it may have fewer rows than the
        forward."""
        local = value.flatten(0, -2) if some else self._flat(site, value)
        return self._sharing.whole(site, local, self._places[site].layout)

    def _flat(self, site: str, value: torch.Tensor) -> torch.Tensor:
        if self.sites[site].operator.row != "token":
            return value.flatten(0, -2)
        shares = self._sharing.rows and self._places[site].layout is None
        return value.reshape(len(self.rows.ids) // (self._sharing.ranks if shares else 1), -1)

    def put_back(self, site: str, whole: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrites a site's live value by this rank's part of `[N, F]`, if the rank has the
        fault."""
        if self.faulty:
            local = self._flat(site, value).clone()
            self._sharing.put_back(site, whole, local, self._places[site].layout)
            value.copy_(local.reshape(value.shape))

    @abstractmethod
    def parameter(self, name: str) -> torch.Tensor:
        """Returns a whole canonical parameter. All ranks call this."""

    @abstractmethod
    def live(self, name: str) -> tuple[torch.Tensor, Parameter | None]:
        """Returns this rank's live parameter with the canonical one, and its layout; None if the
        live parameter is exactly the canonical one."""

    def biased(self, site: str) -> bool:
        """Whether the operator's own module adds a bias."""
        holder = self._model.get_submodule(self._places[site].holder)
        return getattr(holder, "bias", None) is not None

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
        """Returns the replacement of attention's result for one sequence. The tensors have the
        shapes of `Attention`, with this rank's heads."""
        op, shape = "latent_attn" if self.shape.latent else "attn", self.shape.at(layer)
        site, width = f"layers.{layer}.{op}", shape.head_dim

        def whole(name: str, local: torch.Tensor) -> torch.Tensor:
            name = f"layers.{layer}.{name}"
            if self.shape.latent:
                # Queries and keys have more features than their sites, and every head has its own.
                ranks, rows = self._sharing.ranks, local.flatten(1)
                shared = even(name, rows.shape[1] * ranks, ranks)
                return self._sharing.whole(name, rows, shared).unflatten(1, (-1, local.shape[-1]))
            if name in self._places:
                layout = self._places[name].layout
            else:  # a layer that does not rotate
                layout = of_outputs((name,), shape, self._sharing.ranks)
            if layout is None:
                return local
            return self._sharing.whole(name, local.flatten(1), layout).unflatten(1, (-1, width))

        place, sinks = self._places[site], None
        if self.sites[site].operator.weight and not self.shape.latent:
            sinks = getattr(self._model.get_submodule(place.holder), place.weight).detach()
        unit = Attention(
            result=whole(op, result).flatten(1),
            query=whole("q_rope", query),
            # Values have the same heads as keys.
            key=whole("k_rope", key),
            value=whole("k_rope", value),
            visible=visible,
            scale=scale,
            head_dim=width,
            sinks=sinks,
            latent=self.shape.size("latent_and_key") if self.shape.latent else 0,
        )
        new, local = in_place_of(formula, unit), result.clone()
        if self.faulty:
            self._sharing.put_back(site, new, local, place.layout)
        return local

    def frequencies(self, layer: int) -> torch.Tensor:
        """The frequencies of a layer's rotary embedding in the checkpoint, float64. Raises
        BadOption if they depend on the sequence."""
        rotary = self._rotary(layer)
        if rotary is None:
            raise BadOption("the rotary embedding's frequencies change: no fault is planted there")
        device = next(self._model.parameters()).device
        return torch.tensor(rotary.inv_freq, dtype=torch.float64, device=device)

    def multiplier(self, site: str) -> float:
        """The number that multiplies the site's output, or its branch: one of the config, or the
        layer's own."""
        operator = self.sites[site].operator
        if operator.formula == "residual" and operator.weight:
            return float(self.parameter(site))
        return multiplier_of(self._config, operator)

    def _module_output(self, site: str, formula: Formula) -> None:
        """Replaces the output of an operator that has a module of its own: embeddings, norms,
        projections and the logits."""
        module, op = self.module(site), self.sites[site].operator
        if module is self._model:
            raise BadOption(f"{site} lies outside of any module: no fault is planted there")
        name = op.parameter or site
        embedding, every_row = op.formula == "embedding", op.row == "token"
        weight = self.parameter(name) if op.weight and not embedding else None
        if weight is not None and op.formula == "rms_norm" and self.shape.family.one_plus_weight:
            weight = weight.float() + 1
        bias = self.parameter(f"{name}.bias") if self.biased(site) else None
        eps = norm_epsilon(module) or 0.0
        turned = any(self.sites[s].operator.formula == "rotary" for s in self.sites[site].inputs)
        frequencies = self.frequencies(self.sites[site].layer or 0) if turned else None
        # A norm's input has the layout of its output, a product's input that of the site it reads.
        gated = op.formula in ("gated_norm", "gated_then_normed")
        norm = gated or op.formula in ("rms_norm", "layer_norm")
        of = site if norm else next(iter(self.sites[site].inputs), site)

        def see(_module: Any, inputs: Any, out: Any) -> None:
            value = first(out)
            if value is None:
                return  # This rank gets no logits.
            # Megatron calls its embedding with keywords, and no formula reads the ids.
            x: Any = None if embedding else inputs[0 if norm else -1]
            if self._places[site].access is HEADS_FIRST:
                value, x = value.transpose(1, 2), x.transpose(1, 2)
            operands: tuple[torch.Tensor, ...] = ()
            if norm and self.norms_add and isinstance(out, tuple):
                # A fused norm also returns the sum that it normalises.
                operands = (self.whole(site, out[1]),)
            elif gated:
                operands = tuple(self.whole(site, y) for y in inputs)
            elif not embedding:
                operands = (self.whole(of, x, not every_row),)
            unit = Unit(
                result=self.whole(site, value),
                inputs=operands,
                head_dim=self.shape.of_site(site).head_dim,
                rows=self.rows if every_row else None,
                weight=weight,
                bias=bias,
                multiplier=self.multiplier(site),
                eps=eps,
                frequencies=frequencies,
                interleaved=self.shape.family.interleaved,
            )
            self.put_back(site, in_place_of(formula, unit), value)

        if self._places[site].end == "input":
            # The module with the parameters ran before.
            given: list[Any] = []
            holder = self._model.get_submodule(self._places[site].holder)
            self.before(holder, lambda _, inputs: given.append(inputs))
            self.before(module, lambda _, inputs: see(None, given.pop(), inputs[0]))
        else:
            self.after(module, see)

    def _combination(self, site: str, formula: Formula) -> None:
        """Replaces an operator without a module, whose inputs are the outputs of other
        operators."""
        place, inputs = self._places[site], self.sites[site].inputs
        layer = self.sites[site].layer or 0
        frequencies = self.frequencies(layer) if place.end == "rope" else None
        scales = input_scales(self._config, self.shape, self.sites[site].operator)
        live: dict[str, torch.Tensor] = {}

        def note(name: str, passed: Any) -> None:
            live[name] = self.whole(name, self._places[name].access.read(passed)).clone()

        def overwrite(passed: Any) -> None:
            # Other calls of the activation have no inputs here.
            if len(live) == len(inputs):
                result = place.access.target(passed)
                unit = Unit(
                    result=self.whole(site, result),
                    inputs=tuple(live.pop(name) for name in inputs),
                    head_dim=self.shape.of_site(site).head_dim,
                    rows=self.rows,
                    multiplier=self.multiplier(site),
                    input_multiplier=scales[0][0] if scales else 1.0,
                    frequencies=frequencies,
                    interleaved=self.shape.family.interleaved,
                )
                self.put_back(site, in_place_of(formula, unit), result)

        for name in inputs:
            self._watch(name, functools.partial(note, name))
        self._watch(site, overwrite)

    def _watch(self, site: str, see: Callable[[Any], None]) -> None:
        """Calls `see` in each forward with the input or output of the module that is the site."""
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
        """Returns the changes that faults can make to the model's sparse layers."""

    @abstractmethod
    def on_rotation(self, see: Callable[[torch.Tensor], None]) -> None:
        """Calls `see` with the output of the rotary embedding: for each attention the query's, then
        the key's."""

    @abstractmethod
    def _attention(self, layer: int, formula: Formula) -> None:
        """Replaces attention; the formula gets an `Attention` for each sequence."""

    def _delta_rule(self, layer: int, formula: Formula) -> None:
        """Replaces the gated delta rule; the formula gets a `Recurrence` for each sequence."""
        raise NotImplementedError

    def _state_space(self, layer: int, formula: Formula) -> None:
        """Replaces the state-space scan; the formula gets a `Recurrence` for each sequence."""
        raise NotImplementedError

    def _convolution(self, layer: int, formula: Formula) -> None:
        """Replaces the convolution; the formula gets a `Convolution` for each sequence."""
        raise NotImplementedError

    def _while_running(self, site: str, change: Formula) -> None:
        """Lets the module of a recurrence compute with another parameter of a site: A, of which
        some engines keep the logarithm, or the bias of dt. The live parameter stays."""
        place, module, live = self._places[site], self.module(site), []
        name, keeps_log = place.weight, place.weight == OPERATORS["dt_a"].tensor
        if not self.faulty:
            return

        def begin(*_: Any) -> None:
            kept = getattr(module, name)
            value = change(-kept.float().exp() if keeps_log else kept.detach())
            live.append(kept)
            changed = (-value).log() if keeps_log else value
            module._parameters[name] = torch.nn.Parameter(changed, requires_grad=False)

        self.before(module, begin, with_kwargs=True)
        self.after(module, lambda *_: module._parameters.update({name: live.pop()}))

    @abstractmethod
    def _logprob(self, formula: Formula) -> None:
        """Replaces the reported log-probs; the formula gets a `Report`."""

    def change_weight(self, site: str, change: Formula) -> None:
        """Overwrites the live weight of a site by `change(weight)` until this is closed."""
        changed = change(self.parameter(site).clone())
        live, entry = self.live(site)
        if not self.faulty:
            return
        self.callback(live.copy_, live.clone())
        if entry is None:
            live.copy_(changed)
        else:
            write_part(entry, site, self._sharing.rank, changed, live)

    def change_copy(self, site: str, change: Formula) -> None:
        """Makes a site's product compute with `change(weight)`; its parameter stays as it is."""
        raise NotImplementedError

    def change_positions(self, change: Formula) -> None:
        """Gives `change(positions)` to the model."""
        raise NotImplementedError

    def change_boundaries(self, change: Formula) -> None:
        """Gives `change(ends)` to the model as the ends of packed sequences."""
        raise NotImplementedError


def plant(operators: LiveOperators, chosen: Chosen) -> LiveOperators:
    """Puts a fault into a live model. Raises BadOption if the model lacks an operator that it
    changes."""
    fault, shape = chosen.fault, operators.shape
    make: Callable[[float], Formula] = resolve_name(f"rlk_align.selftest.formulas.{fault.formula}")
    for site in fault.sites:
        if site not in operators.sites:
            raise BadOption(
                f"fault={chosen}: a {shape.model_type} model of {shape.layers} layers has no {site}"
            )
        if fault.needs == "variant" and not fault.fits(operators.sites):
            raise BadOption(f"fault={chosen}: {site} is of another kind in this model")
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
        change = {"weights": operators.change_weight, "copies": operators.change_copy}.get(
            fault.kind, operators.replace_operator
        )
        for site in filter(operators.computes, fault.sites):
            change(site, formula)
    return operators
