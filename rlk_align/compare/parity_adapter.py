"""Compares the LoRA adapters of both sides, by what each engine computes with."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from rlk_align.model.dtypes import lower_precision
from rlk_align.results import Mismatch, SideName
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import LoraModule, LoraRecord

NAME = "adapter"
"""The name of a mismatch that is one of the whole adapter."""
OF_SITE = ".lora"
"""The end of the name of a mismatch that is one of a projection's adapter."""
_SHOWN = 8
"""The largest number of projections that a sentence lists."""
PROPORTIONAL = 2.0**-6
"""The relative error of the ratio of two sums of columns that were rounded separately."""


class Live(NamedTuple):
    """The adapter of one projection, in the dtype that both sides have."""

    rank: int
    scale: float
    a: str
    """The digest of A."""
    b: str
    """The digest of scale · B."""
    sums: list[float]
    zero: bool
    cast: tuple[str, str]


Modules = Mapping[str, Live]


def check_adapters(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Yields how the adapters differ, and what an equal adapter does not prove. Samples may have
    several adapters in turn."""
    a, b = rollout.record.adapters or [None], train.record.adapters or [None]
    if len(a) != len(b):
        counts = [f"{len(side)} in turn" if len(side) > 1 else "one for all" for side in (a, b)]
        yield Mismatch(
            kind="weights",
            name=NAME,
            rollout=counts[0],
            train=counts[1],
            detail="samples have other adapters: give both engines the same lora=A+B",
        )
        return
    dtype = lower_precision(rollout.record.dtype, train.record.dtype)
    for number, (mine, theirs) in enumerate(zip(a, b, strict=True), 1):
        for found in _check(mine, theirs, dtype):
            of = f"adapter {number} of {len(a)}: " if len(a) > 1 else ""
            yield found.model_copy(update={"detail": of + found.detail})


def _check(a: LoraRecord | None, b: LoraRecord | None, dtype: str) -> Iterator[Mismatch]:
    """How two adapters differ; `dtype`: the dtype of both sides."""
    if a is None and b is None:
        return
    if a is None or b is None or not a.modules or not b.modules:
        yield _one_sided(a, b)
        return
    mine, theirs = (_live(record, dtype) for record in (a, b))
    yield from _coverage(mine, theirs)
    both = [site for site in mine if site in theirs]
    differ = [site for site in both if not _equal(mine[site], theirs[site])]
    yield from _differences(mine, theirs, differ, (a.scale, b.scale))
    if not differ:
        yield from _zero(mine, both)


def _live(record: LoraRecord, dtype: str) -> dict[str, Live]:
    return {
        site: Live(m.rank, m.scale, *m.digests.get(dtype, ("", "")), m.sums, m.zero, m.cast)
        for site, m in record.modules.items()
    }


def _equal(a: Live, b: Live) -> bool:
    return (a.rank, a.a, a.b) == (b.rank, b.a, b.b) and bool(a.a)


def _one_sided(a: LoraRecord | None, b: LoraRecord | None) -> Mismatch:
    have: SideName = "rollout" if a is not None and a.modules else "train"
    lacks = "rollout" if have == "train" else "train"
    record = a if have == "rollout" else b
    assert record is not None
    withheld = (b if have == "rollout" else a) is not None
    why = "was given one that no projection computes with" if withheld else "has no adapter"
    detail = (
        f"the {_WHO[lacks]} {why}; the {_WHO[have]} has one of {_ranks(record.modules)} in "
        f"{_count(record.modules)}: every one of them will differ"
    )
    if not record.modules:
        detail = (
            "an adapter was given, and no projection of the live model computes with one: it was "
            "not delivered, or it is disabled"
        )
    return Mismatch(kind="weights", name=NAME, rollout=_words(a), train=_words(b), detail=detail)


_WHO = {"rollout": "rollout", "train": "trainer"}


def _words(record: LoraRecord | None) -> str:
    if record is None:
        return "none"
    if not record.modules:
        return "given, in no projection"
    return f"{_ranks(record.modules)}, {_count(record.modules)}"


def _ranks(modules: Mapping[str, LoraModule]) -> str:
    return f"rank {', '.join(map(str, sorted({m.rank for m in modules.values()})))}"


def _count(modules: Collection[str]) -> str:
    return f"{len(modules)} projection{'s' * (len(modules) != 1)}"


def _coverage(a: Modules, b: Modules) -> Iterator[Mismatch]:
    """Projections that have an adapter on one side only."""
    sides: tuple[tuple[SideName, Modules, Modules], ...] = (("rollout", a, b), ("train", b, a))
    for side, here, other in sides:
        lacking = [site for site in other if site not in here]
        if lacking:
            yield Mismatch(
                kind="weights",
                name=NAME,
                rollout=_count(a),
                train=_count(b),
                detail=f"the {_WHO[side]} has no adapter in {_count(lacking)} that have one on the "
                f"other side: {_listed(lacking)}",
            )


def _listed(sites: list[str]) -> str:
    """The projections, by layer if every projection of these layers is meant alike."""
    by_layer: dict[str, list[str]] = {}
    for site in sites:
        layer, _, op = site.rpartition(".")
        by_layer.setdefault(layer, []).append(op)
    if len(sites) > _SHOWN and len({tuple(ops) for ops in by_layer.values()}) == 1:
        ops = next(iter(by_layer.values()))
        return f"{', '.join(ops)} of {', '.join(by_layer)}"
    more = f" and {len(sites) - _SHOWN} more" if len(sites) > _SHOWN else ""
    return ", ".join(sites[:_SHOWN]) + more


def _differences(
    a: Modules, b: Modules, differ: list[str], stated: tuple[float, float]
) -> Iterator[Mismatch]:
    """Projections whose adapters differ: in one mismatch those that are zeros on one side and those
    whose scale differs by one factor, in one those with other values of the same factors, and of
    the others each alone. `stated`: the scales of each side's adapter_config.json."""
    scaled: dict[tuple[SideName, float], list[str]] = {}
    zero: dict[SideName, list[str]] = {}
    other: dict[tuple[str, str, str], list[str]] = {}
    for site in differ:
        factor = _factor(a[site], b[site])
        if a[site].zero != b[site].zero:
            zero.setdefault("rollout" if a[site].zero else "train", []).append(site)
        elif factor is not None:
            scaled.setdefault(factor, []).append(site)
        elif exchanged := _exchanged(site, a, b):
            yield _of_site(site, a, b, exchanged)
        elif a[site].rank != b[site].rank:
            ranks = f"rank {a[site].rank} in the rollout, {b[site].rank} in the trainer"
            yield _of_site(site, a, b, ranks)
        else:
            other.setdefault(_other_values(a[site], b[site]), []).append(site)
    for (parts, has, why), sites in other.items():
        if len(sites) == 1:
            yield _of_site(sites[0], a, b, f"{parts} {has} other values{why}")
            continue
        yield Mismatch(
            kind="weights",
            name=NAME,
            rollout=f"{parts} of {_count(sites)}",
            train="other values",
            detail=f"{parts} {has} other values in {_count(sites)}, {_listed(sites)}{why}",
        )
    for side, sites in zero.items():
        yield Mismatch(
            kind="weights",
            name=NAME,
            rollout="zeros" if side == "rollout" else "not zeros",
            train="zeros" if side == "train" else "not zeros",
            detail=f"the {_WHO[side]}'s A or B is all zeros in {_count(sites)}, {_listed(sites)}, "
            "and the other side's is not: it was not delivered there. PEFT starts B at zero, and "
            "only warns of factors that a file lacks",
        )
    for (more, times), sites in scaled.items():
        yield Mismatch(
            kind="weights",
            name=NAME,
            rollout=_stated(a[sites[0]]),
            train=_stated(b[sites[0]]),
            detail=_scale_words(more, times, sites, stated),
        )


def _factor(a: Live, b: Live) -> tuple[SideName, float] | None:
    """The side with the larger scale · B and how many times it is the other's, to two digits, if A
    is equal and the columns have one factor; else None."""
    if a.a != b.a or a.rank != b.rank or a.zero or b.zero or not all((*a.sums, *b.sums)):
        return None
    factors = sorted(x / y for x, y in zip(a.sums, b.sums, strict=True))
    # Columns whose entries nearly cancel are less exact than the others.
    typical = factors[len(factors) // 2]
    near = [abs(f - typical) <= PROPORTIONAL * abs(typical) for f in factors]
    if abs(typical - 1) <= PROPORTIONAL or sum(near) * 4 < 3 * len(near):
        return None
    larger: SideName = "rollout" if abs(typical) > 1 else "train"
    return larger, float(f"{max(typical, 1 / typical, key=abs):.2g}")


def _scale_words(
    more: SideName, factor: float, sites: list[str], stated: tuple[float, float]
) -> str:
    scale, other = stated
    if scale != other:
        why = f"adapter_config.json says {scale:.3g} in the rollout and {other:.3g} in the trainer"
    elif abs(factor - max(scale, 1 / scale)) <= 0.05 * factor:
        why = (
            f"adapter_config.json says {scale:.3g} on both sides: the scale was applied twice on "
            "one of them, or not at all"
        )
    else:
        why = f"adapter_config.json says {scale:.3g} on both sides"
    return (
        f"the same A and B, and scale · B of the {_WHO[more]} is {factor:.3g} times that of the "
        f"other side in {_count(sites)}, {_listed(sites)}; {why}"
    )


def _stated(module: Live) -> str:
    return f"scale {'folded into B' if module.scale == 1.0 else f'{module.scale:g}'}"


def _exchanged(site: str, a: Modules, b: Modules) -> str:
    """Says of which other projection the trainer has the adapter here; empty if of none."""
    mine, theirs = a[site], b[site]
    exchanged = next((s for s in a if s != site and _equal(a[s], theirs)), None)
    back = next((s for s in b if s != site and _equal(b[s], mine)), None)
    if exchanged is None:
        return ""
    both = ", and the other way round" if back == exchanged else ""
    return (
        f"the trainer's adapter of {site} is the rollout's of {exchanged}{both}: exchanged, or "
        "stacked in another order"
    )


def _other_values(mine: Live, theirs: Live) -> tuple[str, str, str]:
    """(which factors have other values, the verb, what that means)."""
    parts = [n for n, x, y in (("A", mine.a, theirs.a), ("B", mine.b, theirs.b)) if x != y]
    equal = {"A": "; B is equal", "B": "; A is equal"}.get("".join(parts), "")
    casts = [
        f"the {_WHO[side]}'s {name} was cast to {live.cast[i]}"
        for side, live, other in (("rollout", mine, theirs), ("train", theirs, mine))
        for i, name in enumerate("AB")
        if name in parts and live.cast[i] and live.cast[i] != other.cast[i]
    ]
    why = ", ".join(casts) or "an adapter of another step, or one that was not delivered"
    return " and ".join(parts), "has" if equal else "have", f"{equal}: {why}"


def _of_site(site: str, a: Modules, b: Modules, detail: str) -> Mismatch:
    mine, theirs = a[site], b[site]
    return Mismatch(
        kind="weights",
        name=f"{site}{OF_SITE}",
        rollout=f"A {mine.a[:8]}, B {mine.b[:8]}",
        train=f"A {theirs.a[:8]}, B {theirs.b[:8]}",
        detail=detail,
    )


def _zero(modules: Modules, sites: list[str]) -> Iterator[Mismatch]:
    zero = [site for site in sites if modules[site].zero]
    if zero:
        which = "every projection" if len(zero) == len(sites) else _listed(zero)
        yield Mismatch(
            kind="weights",
            name=NAME,
            rollout="zeros",
            train="zeros",
            detail=f"A or B is all zeros in {which}: an adapter that changes nothing, as before "
            "the first step, proves nothing about how either side applies one: --perturb-lora "
            "compares copies with other numbers in B",
            stops=False,
        )
