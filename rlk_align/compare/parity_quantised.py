"""Sides whose weights are quantised: are the values and scales the quantiser's image of the other
side's weights, bit by bit, and if not, where and why?

Both checkpoints are on disk. A side counts as its checkpoint's if its live weights have the digests
of these, or of what its engine makes of them; what differs from its own checkpoint is said as well.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from rlk_align.compare.loaded_fp8 import as_loaded
from rlk_align.compare.sides import both_ways
from rlk_align.errors import RlkError
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.quantised import block_words, format_of
from rlk_align.model.stored import StoredTensor, stored_tensors
from rlk_align.results import Mismatch, Quantisation, SideName
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import Grid, QuantisedProduct, QuantisedRecord
from rlk_align.weights.quantiser import Kind, Origin, Stored, origin_of, other_readings
from rlk_align.weights.quantiser_words import why_left_out, words_of

NAME = "quantisation"
"""The name of a mismatch that quantisation explains, or should have explained."""
QUANTISED, NOT_QUANTISED = "quantised", "not quantised"
"""The values of such a mismatch on either side."""
_WHO = {"rollout": "rollout", "train": "trainer"}
_CHANGED = "they were changed after they were loaded, or the checkpoint was"
_SHOWN = 4
"""The largest number of projections that a sentence lists."""


def explain_quantised(
    mismatches: Sequence[Mismatch], rollout: Trace, train: Trace
) -> list[Mismatch]:
    """The mismatches; those of weights that are quantised on one side are replaced by one for each
    origin of them. An image of the other side's weights does not stop the comparison."""
    left = list(mismatches)
    found: list[Mismatch] = []
    for side, trace, other in both_ways(rollout, train):
        record, products = trace.record.quantised, trace.record.products
        if record is None and not products:
            continue
        found += _listed(side, record) if record is not None else ()
        differ = {m.name for m in left if m.kind == "weights"}
        held = dict.fromkeys([*(record.weights if record is not None else ()), *products])
        mine = [name for name in held if name in differ]
        try:
            said = list(_explained(side, trace, other, record, mine))
        except (RlkError, OSError, SafetensorError):
            # The precheck names the weights; without these files nothing explains them.
            continue
        found += [mismatch for mismatch, _ in said]
        names = {name for _, explained in said for name in explained}
        left = [m for m in left if m.kind != "weights" or m.name not in names]
    return [*left, *found]


def quantised_sides(rollout: Trace, train: Trace) -> dict[SideName, list[Quantisation]]:
    """Returns for each side what it quantises otherwise than the other side."""
    found: dict[SideName, list[Quantisation]] = {}
    for side, trace, other in both_ways(rollout, train):
        own, mine, theirs = trace.record, trace.weights, other.weights
        formats: set[Quantisation] = set()
        for name in {**(own.quantised.weights if own.quantised else {}), **own.products}:
            if name in mine and name in theirs and mine[name].digest != theirs[name].digest:
                product = own.products.get(name)
                formats.add(_format(own.quantised, product))
        if _grids(trace) != _grids(other) and any(_grids(trace).values()):
            formats.add("fp8-activations")
        if own.cache is not None and own.cache != other.record.cache:
            formats.add("fp8-cache")
        if formats:
            found[side] = sorted(formats)
    return found


def quantised_inputs(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Yields the inputs of products, and the keys and values, that one side alone quantises."""
    for name, words in (("activations", _grid_words), ("kv_cache", _cache_words)):
        lost = name == "kv_cache" and any(map(_loses, (rollout, train)))
        said = {side: words(trace) for side, trace, _ in both_ways(rollout, train)}
        if said["rollout"] != said["train"]:
            yield Mismatch(
                kind="attributes",
                name=name,
                rollout=said["rollout"],
                train=said["train"],
                detail="each side's operators are judged by its own grid"
                + (f"; {LOSES}" if lost else ""),
                stops=False,
            )


LOSES = (
    "on processors with AMX, vLLM 0.32's attention drops small numbers on the way, e.g. a value "
    "times its probability where that is below 2^-6"
)


def _loses(trace: Trace) -> bool:
    """Whether a side's attention loses small products of its quantised cache."""
    cache = trace.record.cache
    return cache is not None and cache.cuts and cache.backend.endswith("amx")


def _grid_words(trace: Trace) -> str:
    """The grids of a side's products and what computes them, in words."""
    kinds: dict[str, int] = {}
    for product in trace.record.products.values():
        grids = [_one_grid(grid) for grid in product.grids]
        said = f"{' or '.join(grids) or 'not quantised'} ({product.kernel})"
        kinds[said] = kinds.get(said, 0) + 1
    return "; ".join(f"{said} in {n} projections" for said, n in kinds.items()) or "not quantised"


def _one_grid(grid: Grid) -> str:
    if grid.scale is not None:
        return "e4m3 with a static scale"
    group = f"{grid.columns} entries" if grid.columns else "row"
    powers = ", a power of two" if grid.powers_of_two else ""
    return f"e4m3 with a scale for each {'forward' if grid.by_batch else group}{powers}"


def _cache_words(trace: Trace) -> str:
    cache = trace.record.cache
    if cache is None:
        return "not quantised"
    queries = ", and so are its queries and probabilities" if cache.queries else ""
    cut = ", cut off and not rounded" if cache.cuts else ""
    return f"{cache.dtype} ({cache.backend}){cut}{queries}"


def _format(record: QuantisedRecord | None, product: QuantisedProduct | None) -> Quantisation:
    if product is not None:
        return format_of(product.block)
    assert record is not None
    return record.name


def _grids(trace: Trace) -> dict[str, list[Grid]]:
    """Parameter -> the grids of the inputs of its product."""
    return {name: product.grids for name, product in trace.record.products.items()}


def _listed(side: SideName, record: QuantisedRecord) -> Iterator[Mismatch]:
    """Yields modules that are not quantised although config.json does not list them, and modules
    that are, although it does."""
    who = f"the {_WHO[side]}'s checkpoint"
    by_entry: dict[str, list[str]] = {}
    for name, entry in record.left_out.items():
        by_entry.setdefault(entry, []).append(name)
    for entry, names in by_entry.items():
        here = f"{who} has {_projections(names)} in another format than fp8"
        yield _mismatch(side, NOT_QUANTISED, f"{here}; {why_left_out(entry)}", stops=True)
    if record.listed:
        yield _mismatch(
            side,
            QUANTISED,
            f"{who} has {_projections(record.listed)} in fp8, and config.json lists them as not "
            "quantised: an engine that obeys it reads e4m3 numbers without their scales",
            stops=True,
        )


def _explained(
    side: SideName,
    trace: Trace,
    other: Trace,
    record: QuantisedRecord | None,
    names: Sequence[str],
) -> Iterator[tuple[Mismatch, list[str]]]:
    """(mismatch, the weights that it explains)."""
    mine, theirs = _tensors(trace), _tensors(other)
    both = other.record.quantised
    origins: dict[str, Origin] = {}
    misread: dict[str, list[str]] = {}
    ways: dict[str, list[str]] = {}
    for name in names:
        stored = _stored(mine[name], record) if mine[name].scales is not None else None
        product = trace.record.products.get(name)
        if product is not None:
            fused = [mine[each] for each in product.fused if each in mine]
            loaded = as_loaded(mine[name], fused, product)
            if loaded is None:
                misread.setdefault(_CHANGED, []).append(name)
                continue
            if loaded.way:
                ways.setdefault(loaded.way, []).append(name)
            stored = stored or Stored(loaded.values, loaded.scales, loaded.block)
        elif record is None or trace.weights[name].digest != record.weights[name][2]:
            assert stored is not None
            misread.setdefault(_misread(trace, name, stored), []).append(name)
            continue
        assert stored is not None
        if both is not None and name in both.weights:
            continue
        weight = _read(theirs.get(name))
        live = None if weight is None else _live(other, name, weight)
        if weight is not None and live is not None:
            master = weight if weight.dtype != live.dtype else None
            origins[name] = origin_of(stored, live, master)
    by_kind: dict[Kind, list[str]] = {}
    for name, origin in origins.items():
        by_kind.setdefault(origin.kind, []).append(name)
    for kind, of_kind in by_kind.items():
        told = {name: origins[name] for name in of_kind}
        yield _words(side, kind, told, _format_words(trace, told)), of_kind
    for way, names_of_way in ways.items():
        detail = f"in the {_WHO[side]} {way}: {_projections(names_of_way)}"
        yield _mismatch(side, QUANTISED, detail, stops=False), []
    for how, misread_names in misread.items():
        detail = (
            f"the {_WHO[side]}'s live weights are not those of its own checkpoint "
            f"in {_projections(misread_names)}: {how}"
        )
        yield _mismatch(side, QUANTISED, detail, stops=True), misread_names


def _tensors(trace: Trace) -> dict[str, StoredTensor]:
    """Parameter -> its tensor in the checkpoint of a trace."""
    shape = trace.record.shape
    stored = stored_tensors(
        Path(trace.record.model), shape.family.modules, shape.fused_rows, shape.family.stacks
    )
    named = {name: stored.get(tensor_name(name, shape.family.modules)) for name in trace.weights}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _stored(tensor: StoredTensor, record: QuantisedRecord | None) -> Stored:
    powers_of_two = record is not None and record.powers_of_two
    return Stored(*tensor.load_quantised(), tensor.block, powers_of_two)


def _format_words(trace: Trace, names: Iterable[str]) -> str:
    """The format of a side's weights, in words."""
    if trace.record.quantised is not None:
        return trace.record.quantised.format
    blocks = dict.fromkeys(trace.record.products[name].block for name in names)
    return " and ".join(map(block_words, blocks))


def _read(tensor: StoredTensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.load()


def _live(trace: Trace, name: str, stored: torch.Tensor) -> torch.Tensor | None:
    """The weight that an engine computes with, from its checkpoint's; None if it has another."""
    weight = trace.weights[name]
    rounded = stored.to(getattr(torch, weight.dtype))
    return rounded if digest_parameter(rounded) == weight.digest else None


def _misread(trace: Trace, name: str, stored: Stored) -> str:
    """How an engine came to a weight that is not the dequantised one of its checkpoint."""
    weight = trace.weights[name]
    for how, value in other_readings(stored):
        if digest_parameter(value.to(getattr(torch, weight.dtype))) == weight.digest:
            return how
    return _CHANGED


def _words(side: SideName, kind: Kind, origins: Mapping[str, Origin], format: str) -> Mismatch:
    who = f"the {_WHO[side]}"
    where = _projections(list(origins))
    detail = f"{who}'s weights are {format}: {words_of(kind, origins)} in {where}"
    if kind == "image":
        ways = {origin.way for origin in origins.values() if origin.way}
        detail += f", computed as {'; '.join(sorted(ways))}" if ways else ""
    return _mismatch(side, QUANTISED, detail, stops=kind != "image")


def _projections(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    count = f"{len(names)} projection{'s' * (len(names) != 1)}"
    return f"{count} ({', '.join(names[:_SHOWN])}{more})"


def _mismatch(side: SideName, here: str, detail: str, *, stops: bool) -> Mismatch:
    return Mismatch(
        kind="weights",
        name=NAME,
        rollout=here if side == "rollout" else "as stored",
        train=here if side == "train" else "as stored",
        detail=detail,
        stops=stops,
    )
