"""The self-test's result as lines of text."""

from collections.abc import Iterator, Sequence

from rlk_align.selftest.record import Detection, SelfTest


def lines(result: SelfTest) -> Iterator[str]:
    """Yields the results by operator class, then unexpected ones, the smallest faults that were
    named, and the pairs without a fault."""
    engines = ", ".join(f"{name} {version}" for name, version in result.engines.items())
    yield f"engines  {engines}"
    yield f"faults   on {result.rows:,} rows, planted on either side of each pair"
    yield ""
    yield from _classes([d for d in result.detections if not d.curve])
    unexpected = result.unexpected
    if unexpected:
        yield ""
        yield f"not as expected: {len(unexpected)}"
        yield from (f"  {_sentence(d)}" for d in unexpected)
    if result.left_out:
        yield ""
        yield f"left out: {len(result.left_out)}"
        yield from (f"  {text}" for text in result.left_out)
    curves = [*smallest(result.detections)]
    if curves:
        yield ""
        yield "smallest strength that is named, and all larger ones with it"
        yield from curves
    yield ""
    yield from _clean(result)


def _classes(detections: Sequence[Detection]) -> Iterator[str]:
    rows = [("class", "faults", "seen as expected", "planted as described")]
    for op_class in dict.fromkeys(d.op_class for d in detections):
        of = [d for d in detections if d.op_class == op_class]
        expected = sum(d.as_expected or not d.well_planted for d in of)
        planted = sum(d.well_planted for d in of)
        faults = len({d.fault for d in of})
        rows.append((op_class, str(faults), f"{expected} of {len(of)}", f"{planted} of {len(of)}"))
    yield from _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()


def _sentence(d: Detection) -> str:
    strength = f"@{d.strength:g}" if d.unit else ""
    where = f"{d.rollout} against {d.train}, {d.side}"
    said: str = d.seen
    if d.found_site is not None:
        said += f": {d.found_site} of {d.found_side}" if d.found_side else f": {d.found_site}"
    text = f"{d.fault}{strength} at {d.site} ({where}): {said}"
    if d.others:
        text += f"; also blamed: {', '.join(d.others)}"
    if not d.curve and not d.well_planted:
        parting = f"at {d.planted}" if d.planted else "nowhere: the fault changes nothing"
        text += f"; the engine diverges from itself {parting}"
    return text


def smallest(detections: Sequence[Detection]) -> Iterator[str]:
    """Yields the smallest named strength of each fault that was planted in several strengths, by
    engine."""
    curved = {d.fault for d in detections if d.curve}
    engines = list(dict.fromkeys(_engine(d) for d in detections if d.fault in curved))
    rows = [("fault", "unit", *engines)]
    for fault in dict.fromkeys(d.fault for d in detections if d.fault in curved):
        of = [d for d in detections if d.fault == fault]
        cells = []
        for engine in engines:
            mine = sorted((d for d in of if _engine(d) == engine), key=lambda d: -d.strength)
            named = None
            for d in mine:
                if d.seen != "named":
                    break
                named = d.strength
            weakest = mine[-1].strength if mine else None
            more = "≤ " if named is not None and named == weakest else ""
            cells.append("-" if not mine else "none" if named is None else f"{more}{named:.3g}")
        rows.append((fault, of[0].unit, *cells))
    if len(rows) > 1:
        yield from _columns(rows)


def _engine(d: Detection) -> str:
    """The engine with the fault."""
    return d.rollout if d.side == "rollout" else d.train


def _clean(result: SelfTest) -> Iterator[str]:
    if not result.clean:
        yield "no pair without a fault was compared"
        return
    pairs = len({(c.rollout, c.train) for c in result.clean})
    seeds = len({c.seed for c in result.clean})
    tokens = sum(c.tokens for c in result.clean)
    yield (
        f"false alarms: in {len(result.alarms)} of {len(result.clean)} pairs without a fault "
        f"({pairs} pairs of engines, {seeds} seeds, {tokens:,} sampled tokens)"
    )
    for c in result.alarms:
        yield f"  seed {c.seed}, {c.rollout} against {c.train}: {', '.join(c.alarms)}"
