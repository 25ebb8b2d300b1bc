"""Sentences about the experts that tokens are sent to."""

from collections.abc import Iterator
from typing import Any

from rlk_align.judge.contract import Contract
from rlk_align.probe.record import Probe, ReplayedEdge
from rlk_align.results import EdgeResult, EdgeRouting, LayerRouting


def routing_lines(edge: EdgeResult, contract: Contract) -> Iterator[str]:
    """Yields how many tokens of a sparse model go to other experts, and the part of each layer."""
    r = edge.routing
    if r is None:
        return
    if not r.flipped_tokens:
        yield (
            f"routing ({edge.name}): both sides send all {r.tokens:,} tokens to the same experts, "
            f"in {len(r.layers)} sparse layers"
        )
        return
    yield (
        f"routing ({edge.name}): {r.flipped_tokens:,} of {r.tokens:,} tokens "
        f"({r.flipped_tokens / r.tokens:.1%}) go to other experts in some layer"
    )
    yield f"  {_log_probs(r)}"
    for layer in r.layers:
        if layer.flipped:
            yield f"  layers.{layer.layer}: {layer_words(layer, contract)}"


def replay_lines(replay: ReplayedEdge, edge: EdgeResult) -> Iterator[str]:
    """Yields how much of an edge's differences remains once its second engine computes the first
    engine's experts."""
    r, whole, rest = edge.routing, edge.metrics, replay.rest
    yield (
        f"replayed ({edge.name}): with the other side's experts in {replay.side}, mean |Δ| is "
        f"{rest.mean_abs_dlogp:.2g} instead of {whole.mean_abs_dlogp:.2g}, max |Δ| "
        f"{rest.max_abs_dlogp:.2g} instead of {whole.max_abs_dlogp:.2g}"
    )
    if r is not None:
        yield (
            f"  on tokens that were flipped {replay.mean_abs_rest_flipped:.2g} instead of "
            f"{r.mean_abs_dlogp_flipped:.2g}, on others {replay.mean_abs_rest_other:.2g} instead "
            f"of {r.mean_abs_dlogp_other:.2g}"
        )
    yield (
        f"  routing by itself moves log-probs by {replay.routing.mean_abs_dlogp:.2g} in the mean, "
        f"{replay.routing.max_abs_dlogp:.2g} at most"
    )


def _log_probs(r: EdgeRouting) -> str:
    return (
        f"{r.flipped_sampled:,} of {r.sampled:,} sampled tokens are among them, with "
        f"{r.share_of_dlogp:.0%} of all |Δ|: {r.mean_abs_dlogp_flipped:.2g} in the mean, others "
        f"{r.mean_abs_dlogp_other:.2g}"
    )


def layer_words(layer: LayerRouting, contract: Contract) -> str:
    """States whether a layer's flips arise at its router or follow from its inputs."""
    effects = layer.flipped - layer.at_router
    parts = [f"{layer.flipped:,} of {layer.rows:,} rows flipped"]
    if layer.at_router:
        parts.append(
            f"{layer.at_router:,} at the router, on equal inputs ({_kind(layer, contract)})"
        )
    if effects:
        parts.append(f"{effects:,} follow from inputs that differ already")
    return "; ".join(parts)


def _kind(layer: LayerRouting, contract: Contract) -> str:
    """States whether flips on equal inputs are ties, rounding, or larger."""
    others = layer.measured - layer.ties
    kinds = [f"{layer.ties:,} tie{'s' * (layer.ties > 1)} of logits"] if layer.ties else []
    if others:
        gap = f"{others:,} with a gap of up to {layer.largest_gap:.2g} roundings"
        budget = contract.budget(layer.site.rpartition(".")[2], "routing")
        if budget is not None:
            within = layer.largest_gap <= budget.peak
            gap += (
                ", which is rounding" if within else f": beyond rounding, {budget.peak:g} allowed"
            )
        kinds.append(gap)
    if layer.at_router > layer.measured:
        kinds.append(f"{layer.at_router - layer.measured:,} whose gap is not known")
    return ", ".join(kinds)


def routing_json(edge: EdgeResult, contract: Contract, probe: Probe | None) -> dict[str, Any]:
    """Returns the record of an edge's routing, with `replay` where routing was replayed; empty for
    a dense model."""
    if edge.routing is None:
        return {}
    record = edge.routing.model_dump()
    for layer, words in zip(record["layers"], edge.routing.layers, strict=True):
        layer["words"] = layer_words(words, contract) if words.flipped else ""
    replay = probe.replay(edge.name) if probe else None
    if replay is not None:
        record["replay"] = replay.model_dump(exclude={"name"})
    return record
