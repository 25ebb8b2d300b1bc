"""A checkpoint's operators in float64, applied to the inputs that a side recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlk_align.model.checkpoint import read_config
from rlk_align.model.quantised import stored_format
from rlk_align.model.rotary import checkpoint_rotary, last_features
from rlk_align.model.shape import (
    ModelShape,
    activation_of,
    cap_of,
    input_scales,
    is_tied,
    multiplier_of,
)
from rlk_align.model.sites import Site
from rlk_align.model.tensors import biased_operators
from rlk_align.model.truncation import truncation
from rlk_align.probe.referee import delta_net, formulas, state_space
from rlk_align.probe.referee.activations import E4M3_UNIT, on_grid
from rlk_align.probe.referee.experts import EXPERT_FORMULAS, ExpertReference
from rlk_align.probe.referee.exponentials import SumOrder, lost_share, sum_orders
from rlk_align.probe.referee.lora import AdapterReference, add_update
from rlk_align.probe.referee.rounding import (
    nearest_cut,
    nearest_rounding,
    relative_unit,
    rounding_variance,
)
from rlk_align.probe.referee.settings import (
    attention_scale,
    live_settings,
    sliding_window,
)
from rlk_align.probe.referee.weights import Checkpoint, CheckpointWeights, NotRefereed
from rlk_align.results import LiveSetting
from rlk_align.trace.cached import cached_keys, cached_values, quantised_queries
from rlk_align.trace.reader import Weight
from rlk_align.trace.schema import CacheRecord, Grid, LoraRecord, QuantisedProduct

FLOAT32_UNIT = 2.0**-24
"""Half an ulp of 1 in float32, the dtype in which engines add and rotate."""
SUM_ULPS = 2.0
"""The typical error, in ulps, of a float32 sum of exponentials that are added as a tree: the
exponentials, their sum and its logarithm are within an ulp each."""
CUT_FORMULAS = ("rms_norm", "rotary", "attention", "activation", "expert_activation", "combine")
"""What engines compute in kernels of their own that cut numbers off to bfloat16 on some processors
(`EngineInfo.rounds_with`); products are torch's."""
DELTA_EPS = 1e-6
"""The eps of the norms of q and k in a gated delta net, if an engine does not state its own: no
config.json does."""
_HYBRID_FORMULAS = (
    *("short_conv", "decay", "sigmoid", "delta_rule", "gated_norm", "output_gate"),
    *("time_step", "step_decay", "state_space", "gated_then_normed", "silu_gate"),
)
WEIGHT_ELEMENTS = 1 << 25
"""Entries of a weight that are converted to float64 at once."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of N rows, of one sequence or of several."""

    position: torch.Tensor
    """int64 `[N]`."""
    token: torch.Tensor
    """The token of each row, int64 `[N]`."""
    target: torch.Tensor
    """The token after each row, int64 `[N]`."""
    sample: torch.Tensor
    """The sample of each row, int64 `[N]`."""


class Reference:
    """One side's checkpoint. Weights are read when they are needed."""

    def __init__(
        self,
        model: Path,
        shape: ModelShape,
        dtype: str,
        tp: int,
        attributes: Mapping[str, Any],
        live: Mapping[str, Weight],
        device: torch.device,
        like: "Reference | None" = None,
        orders: Sequence[SumOrder] = (),
        added: frozenset[str] = frozenset(),
        cuts: bool = False,
        adapters: Sequence[LoraRecord | None] = (),
        products: Mapping[str, QuantisedProduct] = MappingProxyType({}),
        cache: CacheRecord | None = None,
        assumed: bool = False,
    ) -> None:
        """`dtype`: the dtype in which the side computes; `tp`: its number of tensor-parallel ranks;
        `attributes`: those of its trace; `live`: the weights of its engine; `like`: the other
        side's reference, whose checkpoint is shared if it is the same; `orders`: the orders in
        which it may add exponentials, by default those of an unknown processor; `added`: operators
        whose outputs its ranks round and add up; `cuts`: whether its own kernels cut numbers off to
        bfloat16 (`trace.schema.CUTS`); `adapters`: its LoRA adapters in turn;
        `products`: how it multiplies
        by weights in fp8; `cache`: its quantised keys and values; `assumed`: whether a weight that
        its trace lacks is taken to be the checkpoint's. Raises ModelError."""
        self.shape, self.dtype, self.device, self._model = shape, dtype, device, model
        self._tp, self._attributes, self._added = tp, attributes, added
        self._products, self._cache = products, cache
        self._orders, self._cuts = orders or sum_orders({}), cuts and dtype == "bfloat16"
        self._config = read_config(model)
        stored_format(model, self._config)
        if like is None or (like._model, like.dtype, like.shape) != (model, dtype, shape):
            self._checkpoint = Checkpoint(model, self._config, shape, dtype, device)
        else:
            self._checkpoint = like._checkpoint
        self._weights = CheckpointWeights(self._checkpoint, live, assumed)
        self._adapters = [
            None if record is None else AdapterReference(record, dtype, self._config, shape, device)
            for record in adapters
        ]
        self._merged = next((x for x in self._adapters if x is not None and x.merged_in), None)
        self._biased = biased_operators(self._config, shape)
        self._rotaries = [checkpoint_rotary(model, shape, i) for i in range(shape.layers)]
        shares = tp if "down_proj" in added else 1
        self._experts = ExpertReference(
            shape, dtype, self._weights.read, shares, self._biased, self._cuts
        )

    def heads(self, site: Site) -> int:
        """The number of heads of the site's features; 1 if they are not features of heads."""
        return self.shape.at(site.layer).heads_of(site.operator.features)

    def exact(
        self, site: Site, inputs: Sequence[torch.Tensor], rows: RowTokens
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the exact output and the variance of its rounding, float64 `[N, F]` each, and the
        variance of Σ error · exact over a head, or over a whole row, by errors that its features
        share, float64 `[N, H]`. The exact output of a choice of experts is 0, and `got` is its
        error.

        `inputs`: the recorded rows of each input, float64. Attention reads k and v of one sequence,
        from its first position to the last of the rows. Raises NotRefereed.
        """
        extra: torch.Tensor | float = 0.0
        shared: torch.Tensor | None = None
        formula = site.operator.formula
        inputs = self._scaled_inputs(site, inputs)
        if formula == "embedding":
            out = self._embedded(site, self._weights.read(site.parameter)[rows.token])
        elif formula == "rms_norm":
            x = inputs[0]
            if site.operator.weight:
                weight = self._weights.read(site.parameter).double()
            else:
                weight = x.new_ones(self.shape.at(site.layer).head_dim)
            weight = weight + 1 if self.shape.family.one_plus_weight else weight
            if site.operator.features == "latent":
                # Beside the key that is rotated.
                x = x[:, : site.features]
            elif x.shape[1] == 2 * site.features:
                # Queries beside their gates.
                x = delta_net.halves(x, self.shape.heads)[0]
            out = formulas.rms_norm(x, weight, self._eps)
        elif formula == "layer_norm":
            out, extra = self._layer_normed(site, inputs[0])
        elif formula == "rotary":
            out, extra = self._rotated(site, inputs[0], rows)
        elif formula == "residual":
            out, extra = self._residual(site, *inputs)
        elif formula == "expert_activation" and self.shape.swiglu_limit:
            activated, extra = self._experts.gated(*inputs[:2])
            out = activated.out
        elif formula in ("activation", "expert_activation"):
            # An MLP may lack a gate.
            up = inputs[1] if len(inputs) > 1 else 1.0
            out = self._activation(inputs[0]) * up
            if activation_of(self._config)[1].startswith("gelu"):
                # x/2 (1 + t): t and the sum are rounded near 1, also where they cancel.
                extra = 2 * (inputs[0] / 2 * up * relative_unit("float32")).square()
        elif formula == "attention":
            assert site.layer is not None
            heads = (self.shape.heads, self.shape.at(site.layer).kv_heads)
            window = sliding_window(self._config, self.shape, site.layer)
            q = quantised_queries(self._cache, site.layer, inputs[0])
            k = cached_keys(self._cache, site.layer, inputs[1])
            v = cached_values(self._cache, site.layer, inputs[2])
            scale = attention_scale(self._config, self.shape, rows.position)
            sinks = self._weights.read(site.parameter).double() if site.operator.weight else None
            out, extra, shared = formulas.attention(
                q, k, v, rows.position, heads, window, self._attention_roundings(sinks), scale,
                cap_of(self._config, self.shape.family.score_cap), sinks,
            )  # fmt: skip
        elif formula == "latent_attention":
            out, extra, shared = self._latent_attention(site, inputs, rows)
        elif formula == "log_softmax":
            out, extra = self._log_prob(inputs[0], rows)
        elif formula in ("linear", "router"):
            out, extra = self._scaled(site, *self._product(site, inputs[0], rows))
            cap = cap_of(self._config, self.shape.family.logit_cap)
            if site.op == "logits" and cap is not None:
                out, extra = self._capped(out, extra, cap)
        elif formula in _HYBRID_FORMULAS:
            out, extra = self._in_hybrid_layer(site, inputs, rows)
        elif formula in EXPERT_FORMULAS:
            out, extra, of_row = self._experts.exact(site, inputs)
            shared = of_row[:, None]
        else:
            raise AssertionError(formula)
        variance = rounding_variance(out, self.rounded_to(site)) + extra
        return out, variance, out.new_zeros(len(out), 1) if shared is None else shared

    def _scaled_inputs(self, site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs times the numbers of the config by which engines multiply them before, and
        round the products, all alike."""
        scales = input_scales(self._config, self.shape, site.operator)
        dtype, new = getattr(torch, self.dtype), list(inputs)
        for n, numbers in enumerate(scales):
            if {*numbers} == {1.0}:
                continue
            x = inputs[n]
            if len(numbers) == 1:
                factor = x.new_tensor(numbers)
            else:
                # The engines keep these in a vector of the model's dtype.
                keys = self.shape.delta_key_heads * self.shape.delta_key_width
                widths = torch.tensor([x.shape[1] - 2 * keys, keys, keys], device=x.device)
                factor = x.new_tensor(numbers).repeat_interleave(widths)
            if "ssm_multipliers" in self.shape.family.scales[site.operator.name][n]:
                factor = factor.to(dtype)
            new[n] = (x.float() * factor.float()).to(dtype).double()
        return new

    def _latent_attention(
        self, site: Site, inputs: Sequence[torch.Tensor], rows: RowTokens
    ) -> formulas.Attended:
        """Attention over the keys and values of latents (MLA, DeepSeek-V2), whose rows beside the
        queries' are those of one sequence. Engines expand the latents to keys and values in the
        rows' dtype, or multiply queries and outputs over latents by the weight instead, and round
        these: where the terms of an output cancel, they are larger than it."""
        query, rotated, latent, key = inputs
        shape, heads = self.shape, self.shape.heads
        weight = self._weights.read(site.parameter).double().unflatten(0, (heads, -1))
        expanded = torch.einsum("lc,hdc->lhd", latent, weight)
        k, v = expanded.split([shape.unrotated_width, shape.value_width], dim=-1)
        k = torch.cat([k, key[:, None].expand(-1, heads, -1)], dim=-1)
        q = query.unflatten(1, (heads, -1))[..., : shape.unrotated_width]
        q = torch.cat([q, rotated.unflatten(1, (heads, -1))], dim=-1)
        usual, once = self._attention_roundings(None), relative_unit(self.dtype) ** 2
        roundings = replace(usual, query=once, probability=usual.probability + once)
        scale = attention_scale(self._config, shape, rows.position)

        def attended(value: torch.Tensor) -> formulas.Attended:
            return formulas.attention(
                q.flatten(1), k.flatten(1), value.flatten(1), rows.position, (heads, heads), None,
                roundings, scale,
            )  # fmt: skip

        out, variance, shared = attended(v)
        over_latents = attended(latent[:, None].expand(-1, heads, -1)).out.unflatten(1, (heads, -1))
        of_values = weight[:, shape.unrotated_width :].square()
        rounded = rounding_variance(over_latents, self.dtype)
        variance = variance + torch.einsum("nhl,hel->nhe", rounded, of_values).flatten(1)
        return formulas.Attended(out, variance, shared)

    def _in_hybrid_layer(
        self, site: Site, inputs: Sequence[torch.Tensor], rows: RowTokens
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The exact output of an operator beside attention, and its variance within."""
        shape, dtype = self.shape, self.rounded_to(site)
        match site.operator.formula:
            case "short_conv":
                weight = self._weights.read(site.parameter).double()
                bias = self._bias(site) if self._has_bias(site) else None
                return delta_net.short_conv(inputs[0], weight, bias, rows.position, dtype)
            case "decay":
                return delta_net.decay(inputs[0], *self._decay_parameters(site))
            case "sigmoid":
                return delta_net.sigmoid(inputs[0], dtype)
            case "gated_norm":
                weight = self._weights.read(site.parameter).double()
                x, gate = inputs
                return delta_net.gated_norm(x, gate, weight, self._eps, dtype)
            case "output_gate":
                x, gate = inputs
                return delta_net.output_gate(x, gate, shape.heads, dtype)
            case "time_step":
                bias = self._weights.read(site.parameter).double()
                return state_space.time_step(inputs[0], bias, dtype)
            case "step_decay":
                a_log = self._weights.read_kept(site.parameter).double()
                return state_space.step_decay(inputs[0], a_log)
            case "gated_then_normed":
                weight = self._weights.read(site.parameter).double()
                x, gate = inputs
                groups = shape.delta_key_heads if shape.family.normed_by_group else 1
                return state_space.gated_then_normed(x, gate, weight, groups, self._eps, dtype)
            case "silu_gate":
                x, gate = inputs
                return state_space.silu_gate(x, gate, dtype)
            case "state_space":
                return self._state_space(site, inputs, rows)
        x, b, a = inputs
        g, _ = delta_net.decay(a, *self._decay_parameters(site))
        of = delta_net.DeltaShape(
            shape.delta_key_heads, shape.delta_heads, shape.delta_key_width, shape.delta_width
        )
        eps = float(self._attributes.get("delta_eps", DELTA_EPS))
        return delta_net.delta_rule(x, b, g, rows.position, of, eps, dtype)

    def _state_space(
        self, site: Site, inputs: Sequence[torch.Tensor], rows: RowTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scan of a layer's state-space model, from x, B and C and from the products of dt."""
        x, dt = inputs
        here, weights, shape = f"layers.{site.layer}", self._weights, self.shape
        dt, _ = state_space.time_step(dt, weights.read(f"{here}.dt").double(), "float32")
        log_decay, _ = state_space.step_decay(dt, weights.read_kept(f"{here}.dt_a").double())
        of = delta_net.DeltaShape(
            shape.delta_key_heads, shape.delta_heads, shape.delta_key_width, shape.delta_width
        )
        skip = weights.read(site.parameter).double()
        return state_space.scan(x, dt, log_decay, skip, rows.position, of, self.rounded_to(site))

    def _decay_parameters(self, site: Site) -> list[torch.Tensor]:
        """A and dt_bias of the layer's decay, float64 `[H]` each."""
        name = f"layers.{site.layer}.decay"
        return [self._weights.read_kept(name).double(), self._weights.read(f"{name}.bias").double()]

    def got(
        self, site: Site, recorded: torch.Tensor, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Returns the value that is compared with `exact`: the recorded one or, for a choice of
        experts `[N, K]`, by how much an omitted score exceeds a chosen one, `[N, 1]`. Raises
        NotRefereed."""
        if site.operator.formula != "top_k":
            return recorded
        return self._experts.beyond(site, inputs[0], recorded.long())

    def nearest(
        self,
        site: Site,
        exact: torch.Tensor,
        got: torch.Tensor,
        inputs: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Returns the exact output to compare with `got`, both `[N, F]`: see `nearest_rounding` and
        `nearest_cut`."""
        formula = site.operator.formula
        if len(self._grids(site)) > 1:
            return self._nearest_grid(site, exact, got, inputs[0], 1)
        if self._cuts and formula in CUT_FORMULAS:
            return nearest_cut(exact, got, self.rounded_to(site))
        if formula not in ("linear", "router", "expert_linear") or not self._has_bias(site):
            return exact
        of_experts = formula == "expert_linear"
        bias = self._experts.bias(site, inputs[-1].long()) if of_experts else self._bias(site)
        return nearest_rounding(exact, bias, got, self.rounded_to(site))

    def settings(self, site: Site) -> list[LiveSetting]:
        """Returns the settings of the operator in the live engine, beside those of config.json."""
        return live_settings(site, self._attributes, self._config, self.shape)

    def features(self, site: Site) -> int:
        """The number of features of `got`."""
        return 1 if site.operator.formula == "top_k" else site.features

    def rounded_to(self, site: Site) -> str:
        """The dtype of the site's outputs."""
        return site.operator.rounded_to or self.dtype

    def _grids(self, site: Site) -> list[Grid]:
        """The grids to which the inputs of a product may be rounded; empty for none."""
        product = self._products.get(site.parameter)
        return product.grids if product is not None else []

    def _nearest_grid(
        self, site: Site, exact: torch.Tensor, got: torch.Tensor, x: torch.Tensor, grid: int
    ) -> torch.Tensor:
        """For each row the exact output, with its inputs on the first grid or on another, which is
        closer to `got`."""
        other, _ = self._base_product(site, x, grid)
        distances = [(got - each).square().sum(dim=1, keepdim=True) for each in (exact, other)]
        return other.where(distances[1] < distances[0], exact)

    def _product(
        self, site: Site, x: torch.Tensor, rows: RowTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A linear layer with the adapter of each row."""
        out, extra = self._base_product(site, x)
        for number, adapter in enumerate(self._adapters):
            factors = adapter.factors(site.name) if adapter is not None else None
            mine = rows.sample % len(self._adapters) == number
            if factors is not None and bool(mine.any()):
                with_update = add_update(x[mine], out[mine], extra[mine], factors, self.dtype)
                out[mine], extra[mine] = with_update
        return out, extra

    def _base_product(
        self, site: Site, x: torch.Tensor, grid: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A linear layer, in blocks of features; `grid`: which of the grids of its inputs."""
        parameter = site.parameter
        bias = self._bias(site) if self._has_bias(site) else None
        tied_to = site.operator.tied_to if is_tied(self._config) else ""
        grids = self._grids(site)
        if parameter in self._products:
            weight = self._weights.read_fp8(parameter, self._products[parameter])
        elif self._merged is not None and self._merged.merges(site.name):
            weight = self._weights.read_merged(parameter, partial(self._merged.merged, site.name))
        else:
            weight = self._weights.read(tied_to or parameter, used_as=parameter)
        x, of_x = on_grid(x, grids[grid]) if grids else (x, None)
        out, extra = (x.new_empty(len(x), len(weight)) for _ in range(2))
        step = max(1, WEIGHT_ELEMENTS // weight.shape[1])
        for start in range(0, len(weight), step):
            at = slice(start, start + step)
            some = None if bias is None else bias[at]
            part = weight[at].double()
            out[:, at], extra[:, at] = self._sums(site, x, part, some)
            if of_x is not None:
                extra[:, at] += of_x @ part.square().T
        return out, extra

    def _residual(
        self, site: Site, stream: torch.Tensor, branch: torch.Tensor, *more: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The stream plus a branch or two, of which engines may add either to it first, unless a
        number of the config multiplies the sum of both."""
        factor = self._multiplier(site)
        if more and site.operator.multiplier:
            both = branch + more[0]
            of_sum = rounding_variance(both, self.dtype) * factor**2
            branch = both * factor
            return stream + branch, of_sum + rounding_variance(branch, self.dtype)
        branch = branch * factor
        out = sum(more, stream + branch)
        if site.operator.weight:
            # Every engine rounds the sum and its product alike. The errors of a product by one
            # number depend on the few bits of a sum alone, and so do not average out.
            factor, dtype = self._weights.read(site.parameter).double(), getattr(torch, self.dtype)
            scaled = (out.to(dtype).double() * factor).to(dtype).double()
            return scaled, rounding_variance(out, self.dtype) * factor.square()
        if not more:
            return out, rounding_variance(branch, self.dtype) if site.operator.multiplier else 0.0
        orders = (rounding_variance(x, self.dtype) for x in (stream + branch, branch + more[0]))
        return out, torch.maximum(*orders)

    def _multiplier(self, site: Site) -> float:
        return multiplier_of(self._config, site.operator)

    def _scaled(
        self, site: Site, out: torch.Tensor, variance: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A product and its variance, multiplied after the product was rounded."""
        if not site.operator.multiplier:
            return out, variance
        factor = self._multiplier(site)
        return out * factor, (variance + rounding_variance(out, self.dtype)) * factor**2

    def _capped(
        self, logits: torch.Tensor, variance: torch.Tensor, cap: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits under a cap, and their variance. An engine may round the product, its quotient by
        the cap, and the tanh of that."""
        out = formulas.soft_cap(logits, cap)
        tanh = out / cap
        slope = (1 - tanh.square()).square()
        rounded = [rounding_variance(x, self.dtype) for x in (logits, logits / cap, tanh)]
        variance = slope * (variance + rounded[0] + rounded[1] * cap**2) + rounded[2] * cap**2
        return out, variance

    def _layer_normed(self, site: Site, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A LayerNorm, and its variance by the float32 roundings of what it adds up."""
        weight = self._weights.read(site.parameter).double()
        bias = self._bias(site) if self._has_bias(site) else None
        out, scaled = formulas.layer_norm(x, weight, bias, self._eps)
        product = out if bias is None else out - bias
        parts = (scaled * weight, scaled * weight - product, product)
        return out, sum((rounding_variance(part, "float32") for part in parts), 0 * out)

    def _has_bias(self, site: Site) -> bool:
        return site.operator.name in self._biased

    def _bias(self, site: Site) -> torch.Tensor:
        return self._weights.read(f"{site.parameter}.bias").double()

    def _sums(
        self, site: Site, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x · weightᵀ + bias, and its variance by the float32 sums of each rank."""
        out = formulas.linear(x, weight, bias)
        extra = formulas.sum_rounding(x, weight, self.rounded_to(site))
        if bias is not None:
            # Some engines round the product before they add the bias.
            extra = extra + rounding_variance(out - bias, self.dtype)
        if site.op in self._added:
            shares = zip(x.chunk(self._tp, 1), weight.chunk(self._tp, 1), strict=True)
            partial = [formulas.linear(*share, None) for share in shares]
            # Each rank rounds its partial sum, and every addition of two is rounded. Some engines
            # add the bias to the first.
            rounded = [*partial, *torch.stack(partial).cumsum(dim=0)]
            rounded += [] if bias is None else [partial[0] + bias]
            extra = sum((rounding_variance(part, self.dtype) for part in rounded), extra)
        return out, extra

    def _embedded(self, site: Site, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, scaled by the family and rounded once, which every engine does
        alike: `[N, F]` -> float64. A number of the config is not rounded to the rows' dtype."""
        if site.operator.multiplier:
            return (rows.float() * self._multiplier(site)).to(rows.dtype).double()
        if not self.shape.family.embedding_scale:
            return rows.double()
        scale = torch.tensor(self.shape.hidden**0.5, dtype=rows.dtype).double().item()
        return (rows.double() * scale).to(rows.dtype).double()

    def _rotated(
        self, site: Site, x: torch.Tensor, rows: RowTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, rotary = self.heads(site), self._rotaries[site.layer or 0]
        if rotary is None:
            raise NotRefereed("its rotary embedding changes with the sequence")
        x = last_features(x, heads, site.features)
        inv_freq = torch.tensor(rotary.inv_freq, dtype=torch.float64, device=x.device)
        angle = rows.position.double()[:, None] * inv_freq
        out, slope = formulas.rotate(x, angle, heads, rotary.scaling, rotary.interleaved)
        # Frequencies and angles are float32, so an angle is off by about one ulp.
        off = 2 * FLOAT32_UNIT * angle
        off = off.repeat_interleave(2, dim=1) if rotary.interleaved else off.repeat(1, 2)
        width = x.shape[1] // heads - off.shape[1]
        off = torch.cat([off, off.new_zeros(len(off), width)], dim=1)
        return out, (slope * off.repeat(1, heads)).square()

    def _log_prob(self, logits: torch.Tensor, rows: RowTokens) -> tuple[torch.Tensor, torch.Tensor]:
        if limits := truncation(self._attributes):
            names = " and ".join(limits)
            raise NotRefereed(f"its log-probs are of the tokens within {names}")
        temperature = float(self._attributes.get("temperature", 1.0))
        out = formulas.log_prob(logits, rows.target, temperature)
        scaled = logits / temperature
        # A log-prob is a difference of two numbers that are both rounded.
        chosen = scaled.gather(1, rows.target[:, None])
        rounded = [rounding_variance(x, "float32") for x in (chosen, chosen - out)]
        exponentials = (scaled - scaled.amax(dim=1, keepdim=True)).exp()
        lost = (SUM_ULPS * FLOAT32_UNIT) ** 2 + lost_share(exponentials, self._orders)
        return out, sum(rounded) + lost

    def _attention_roundings(self, sinks: torch.Tensor | None) -> formulas.AttentionRoundings:
        """Engines may round scores twice and probabilities once to the model's dtype. Exponents are
        float32, or in the model's dtype beside sinks."""
        once = relative_unit(self.dtype) ** 2
        in_float32 = self.dtype == "float32"
        exponent = relative_unit("float32") ** 2 if sinks is None else once
        query = once if self.shape.family.temperature else 0.0
        # A cap rounds a quotient, its tanh, and the product of that.
        of_score = 5 if cap_of(self._config, self.shape.family.score_cap) else 2
        # An attention with queries in e4m3 has its probabilities in e4m3, too.
        narrow = self._cache is not None and self._cache.queries
        share = E4M3_UNIT**2 if narrow else once
        return formulas.AttentionRoundings(of_score * once, exponent, share, in_float32, query)

    @property
    def _eps(self) -> float:
        key = self.shape.family.norm_eps
        eps = {**self.shape.family.defaults, **self._config}.get(key)
        if not isinstance(eps, int | float):
            raise NotRefereed(f"config.json has no {key}")
        return float(eps)

    @property
    def _activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        key, name = activation_of(self._config)
        if name not in formulas.ACTIVATIONS:
            raise NotRefereed(f"{key}={name} has no formula")
        return formulas.ACTIVATIONS[name]
