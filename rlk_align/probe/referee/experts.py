"""A sparse layer's operators in float64: the router's choice, its weights, the experts, their sum.

N = rows, E = experts, K = experts of a token, I = inner size of an expert, H = hidden
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from rlk_align.compare.expert_choice import beyond_choice, scores
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import Site
from rlk_align.probe.referee import formulas
from rlk_align.probe.referee.rounding import cut_center, rounding_variance

Read = Callable[[str], torch.Tensor]
"""Canonical name -> the parameter."""
Exact = tuple[torch.Tensor, torch.Tensor]
"""The exact output of an operator, and the variance of its rounding."""


EXPERT_FORMULAS = ("top_k", "routing_weights", "expert_linear", "combine")


def as_recorded(site: Site, sites: Mapping[str, Site], unexposed: Collection[str]) -> Site:
    """Returns the site with the inputs that it is recomputed from. If its rows have slots, the
    choice of experts is one of them. The sum of the experts is recomputed from the inputs of those
    rows and products that an engine does not show."""

    def shown(name: str) -> Iterator[str]:
        of = sites[name]
        if name not in unexposed or not (of.experts or of.operator.formula == "linear"):
            yield name
            return
        for deeper in of.inputs:
            yield from shown(deeper)

    inputs = site.inputs
    if site.operator.formula == "combine":
        inputs = tuple(dict.fromkeys(name for i in inputs for name in shown(i)))
    elif site.experts:
        inputs = (*inputs, site.experts)
    return replace(site, inputs=inputs)


class ExpertReference:
    """One side's sparse layers."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: str,
        read: Read,
        ranks: int = 1,
        biased: Collection[str] = (),
        cuts: bool = False,
    ) -> None:
        """`ranks`: the number of ranks that share each expert's inner features, round their partial
        sums, and add them up; `biased`: the operators that have a bias; `cuts`: whether what
        the engine does not show of the experts is cut off instead of rounded."""
        self._shape, self._dtype, self._read, self._ranks = shape, dtype, read, ranks
        self._cuts = cuts
        self._biased = {OPERATORS[n].site for n in biased if OPERATORS[n].of_expert}

    def exact(
        self, site: Site, inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the exact output, the variance of its rounding, and the variance of Σ error ·
        exact over a row by errors that its features share, `[N]`. `inputs`: float64, in the order
        of `as_recorded`."""
        formula = site.operator.formula
        by_op = {n.rpartition(".")[2]: x for n, x in zip(site.inputs, inputs, strict=True)}
        if formula == "combine":
            return self.combined(site, by_op)
        if formula == "top_k":
            out, extra = self._tied(self._scores(site, inputs[0]), bool(site.operator.weight))
        elif formula == "routing_weights":
            out, extra = self.weights_of(inputs[0], by_op["experts"].long())
        else:
            out, extra = self.product(site, inputs[0], by_op["experts"].long())
        return out, extra, out.new_zeros(len(out))

    def beyond(self, site: Site, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """By how much a choice `[N, K]` contradicts its logits, `[N, 1]`."""
        return beyond_choice(self._scores(site, logits), chosen, self._shape)

    def _scores(self, site: Site, logits: torch.Tensor) -> torch.Tensor:
        corrected = bool(site.operator.weight)
        correction = self._read(site.parameter) if corrected else None
        return scores(logits, correction, self._shape.family.sigmoid)

    def _tied(self, scores_NE: torch.Tensor, corrected: bool) -> Exact:
        """An exact choice omits no larger score. The logit is rounded, and the probability that is
        compared in its place may be. Of corrected scores, the float32 value, its correction and the
        sum of two by which a group is chosen are rounded."""
        kth = scores_NE.topk(self._shape.top_k, dim=1).values[:, -1:]
        if corrected:
            return torch.zeros_like(kth), 8 * rounding_variance(kth.abs() + 1, "float32")
        of_probability = 4.0 ** -DTYPES[self._dtype] / 3
        return torch.zeros_like(kth), 2 * rounding_variance(kth, self._dtype) + 2 * of_probability

    def weights_of(self, logits: torch.Tensor, chosen: torch.Tensor) -> Exact:
        """The weights of the chosen experts `[N, K]`, from logits `[N, E]`: the softmax over all
        experts or, in a model that normalises the weights, over the chosen ones alone; or the
        sigmoids, normalised likewise and scaled."""
        picked = logits.gather(1, chosen)
        if self._shape.family.sigmoid:
            return self._of_sigmoids(picked.sigmoid())
        over = picked if self._shape.norm_topk else logits
        total = over.logsumexp(dim=1, keepdim=True)
        out = (picked - total).exp()
        # Some engines round the weights before they normalise them, others the logarithm and the
        # difference.
        extra = rounding_variance(out, self._dtype)
        if not self._shape.norm_topk:
            rounded = (rounding_variance(x, self._dtype) for x in (total, picked - total))
            extra = extra + out.square() * sum(rounded)
        return out, extra

    def _of_sigmoids(self, picked: torch.Tensor) -> Exact:
        total = picked.sum(dim=1, keepdim=True) if self._shape.norm_topk else 1.0
        out = picked / total * self._shape.weight_scale
        # The sigmoids, their sum, the quotient and its multiple are rounded a few times each.
        return out, 8 * rounding_variance(out, "float32")

    def product(self, site: Site, x: torch.Tensor, chosen: torch.Tensor) -> Exact:
        """The product with the weights of each token's experts. `x`: `[N, H]`, or the rows of all
        slots `[N, K * I]`."""
        k = chosen.shape[1]
        of_slots = site.op == "down_proj"
        slots = x.reshape(len(x), k, -1) if of_slots else x[:, None].expand(-1, k, -1)
        out, extra = self._by_expert(site.layer, site.op, slots, chosen)
        return out.flatten(1), extra.flatten(1)

    def bias(self, site: Site, chosen: torch.Tensor) -> torch.Tensor:
        """The biases of the experts of each slot, `[N, K * F]`."""
        every = [
            self._read(f"layers.{site.layer}.experts.{e}.{site.op}.bias").double()
            for e in range(self._shape.experts)
        ]
        return torch.stack(every)[chosen].flatten(1)

    def combined(
        self, site: Site, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weighted sum of the experts' rows, plus the row of the shared experts. If an engine
        does not show the rows, they are recomputed from earlier sites, and the rounding of each
        step counts."""
        weights, chosen = inputs["routing_weights"], inputs["experts"].long()
        act: Exact | None = None
        if "down_proj" in inputs:
            rows = inputs["down_proj"].unflatten(1, (weights.shape[1], -1))
            shares = [self._summed(rows * weights[..., None])]
        else:
            act = self._activated(site, inputs, chosen)
            shares = self._after_activation(site, act, chosen, weights)
            if self._cuts and self._shape.shared_intermediate:
                shares = [(cut_center(out, self._dtype), extra) for out, extra in shares]
        gated: torch.Tensor | None = None
        if shared := self._shared(site, inputs):
            if "shared_gate" in inputs:
                gated = torch.stack([row for row, _ in shared]).sum(dim=0)
                shared = [self._gated(row, inputs["shared_gate"]) for row in shared]
            shares = [self._with_shared(*both) for both in zip(shares, shared, strict=True)]
        out, extra = shares[0]
        for share, variance in shares[1:]:
            out, extra = out + share, extra + variance
            # The sum of the ranks' shares is rounded as it grows.
            extra = extra + rounding_variance(out, self._dtype)
        if len(shares) > 1:
            extra = extra + sum(rounding_variance(share, self._dtype) for share, _ in shares)
        common = out.new_zeros(len(out))
        if gated is not None:
            # A row has one gate, whose sigmoid is rounded.
            of_gate = rounding_variance(inputs["shared_gate"].sigmoid(), self._dtype)[:, 0]
            common = of_gate * (gated * out).sum(dim=1).square()
        if act is None:
            return out, extra, common
        return out, extra, common + self._in_common(site, act[1], out, chosen, weights)

    def _in_common(
        self,
        site: Site,
        variance: torch.Tensor,
        out: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The variance of Σ error · out of each row, `[N]`, by errors of the activated values with
        this `variance`: the down projection spreads each error over all features of the row."""
        of_slots = torch.zeros_like(weights)
        along = out[:, None].expand(-1, chosen.shape[1], -1)
        for e in chosen.unique().tolist():
            at = chosen == e
            reach = along[at] @ self._read(f"layers.{site.layer}.experts.{e}.down_proj").double()
            of_slots[at] = (variance[at] * reach.square()).sum(dim=1)
        return (of_slots * weights.square()).sum(dim=1)

    def _with_shared(self, routed: Exact, shared: Exact) -> Exact:
        (out, extra), (row, variance) = routed, shared
        # Some engines round the routed sum, and some round it again after scaling it.
        return out + row, extra + variance + 2 * rounding_variance(out, self._dtype)

    def _gated(self, shared: Exact, gate: torch.Tensor) -> Exact:
        """A shared expert's row times the sigmoid of its gate `[N, 1]`; both are rounded."""
        (row, variance), share = shared, gate.sigmoid()
        out = share * row
        extra = rounding_variance(share, self._dtype) * row.square() + share.square() * variance
        return out, extra + rounding_variance(out, self._dtype)

    def _shared(self, site: Site, inputs: Mapping[str, torch.Tensor]) -> list[Exact]:
        """The partial row of the shared experts on each rank; empty without shared experts."""
        if "shared_down_proj" in inputs:
            row = inputs["shared_down_proj"]
            return [(row, torch.zeros_like(row))]
        if "shared_act" not in inputs:
            return []
        weight = self._read(f"layers.{site.layer}.shared_down_proj").double()
        parts = (inputs["shared_act"].chunk(self._ranks, 1), weight.chunk(self._ranks, 1))
        rows = [formulas.linear(*part, None) for part in zip(*parts, strict=True)]
        return [(row, rounding_variance(row, self._dtype)) for row in rows]

    def _activated(
        self, site: Site, inputs: Mapping[str, torch.Tensor], chosen: torch.Tensor
    ) -> Exact:
        """The activated values `[N, K, I]`, from their factors or, if an engine does not show them,
        from the layer's input."""
        if "gate_proj" in inputs:
            gate, up = (self._exactly(inputs[op]) for op in ("gate_proj", "up_proj"))
        else:
            x = inputs["mlp_norm"]
            gate, up = (self._rounded(site, op, x, chosen) for op in ("gate_proj", "up_proj"))
        (g, g_variance), (u, u_variance) = gate, up
        act, variance = self.gated(g, u)
        variance = variance + act.by_gate.square() * g_variance + act.by_up.square() * u_variance
        # The activation is rounded once or twice, and again if the weight is applied first.
        out = cut_center(act.out, self._dtype) if self._cuts else act.out
        return out, variance + 2 * rounding_variance(act.out, self._dtype)

    def gated(
        self, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[formulas.Activated, torch.Tensor]:
        """The activation of the experts, and its variance by roundings on the way to it."""
        clamped = functools.partial(
            formulas.clamped_swiglu, alpha=self._shape.swiglu_alpha, limit=self._shape.swiglu_limit
        )
        act = (clamped if self._shape.swiglu_limit else formulas.swiglu)(gate, up)
        rounded = (slope.square() * rounding_variance(x, self._dtype) for x, slope in act.steps)
        return act, sum(rounded, 0 * act.out)

    def _exactly(self, rows: torch.Tensor) -> Exact:
        slots = rows.reshape(len(rows), self._shape.top_k, -1)
        return slots, torch.zeros_like(slots)

    def _rounded(self, site: Site, op: str, x: torch.Tensor, chosen: torch.Tensor) -> Exact:
        slots = x[:, None].expand(-1, chosen.shape[1], -1)
        out, extra = self._by_expert(site.layer, op, slots, chosen)
        # If the products agree in sign, the partial sums grow up to the whole sum.
        extra = extra + x.shape[1] / 3 * rounding_variance(out, "float32")
        return out, extra + rounding_variance(out, self._dtype)

    def _after_activation(
        self, site: Site, activated: Exact, chosen: torch.Tensor, weights: torch.Tensor
    ) -> list[Exact]:
        """The partial weighted sum of the experts' rows on each rank."""
        (act, variance), shares, w = activated, [], weights[..., None]
        for columns in torch.arange(act.shape[2], device=act.device).chunk(self._ranks):
            down, extra = self._by_expert(
                site.layer, "down_proj", act[..., columns], chosen, variance[..., columns], columns
            )
            extra = extra + rounding_variance(down, self._dtype)
            out, summed = self._summed(down * w)
            shares.append((out, summed + (extra * w.square()).sum(dim=1)))
        return shares

    def _summed(self, parts: torch.Tensor) -> Exact:
        """The sum of `[N, K, H]` over K. Some engines round each part and each partial sum."""
        partial = parts.cumsum(dim=1)
        extra = rounding_variance(parts, self._dtype).sum(dim=1)
        extra = extra + rounding_variance(partial[:, 1:-1], self._dtype).sum(dim=1)
        return partial[:, -1], extra

    def _by_expert(
        self,
        layer: int | None,
        op: str,
        slots: torch.Tensor,
        chosen: torch.Tensor,
        variance: torch.Tensor | None = None,
        columns: torch.Tensor | slice = slice(None),
    ) -> Exact:
        """Products `[N, K, F]` of `[N, K, D]`, expert by expert, and the variance that sums in
        float32 and inexact inputs cause. `columns`: the columns of each weight that are used."""
        out: torch.Tensor | None = None
        for e in chosen.unique().tolist():
            at = chosen == e
            weight = self._read(f"layers.{layer}.experts.{e}.{op}")[:, columns].double()
            if out is None:
                out = slots.new_zeros(*chosen.shape, len(weight))
                extra = torch.zeros_like(out)
            out[at] = formulas.linear(slots[at], weight, None)
            extra[at] = formulas.sum_rounding(slots[at], weight, self._dtype)
            if op in self._biased:
                # Some engines round the product before they add the bias.
                extra[at] += rounding_variance(out[at], self._dtype)
                out[at] += self._read(f"layers.{layer}.experts.{e}.{op}.bias").double()
            if variance is not None:
                extra[at] += variance[at] @ weight.square().T
        assert out is not None
        return out, extra
