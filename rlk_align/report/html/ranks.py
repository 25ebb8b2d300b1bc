"""The rank map: the ranks of a sharded side that hold differing weights."""

from collections import Counter
from collections.abc import Iterator

from markupsafe import Markup

from rlk_align.report.html.figure import Figure
from rlk_align.report.html.svg import chart, el, text
from rlk_align.results import Comparison, EngineRecord

_CELL, _LEFT = 96.0, 210.0


def ranks_of(engine: EngineRecord) -> int:
    """Returns the number of processes in which the engine ran."""
    ranks = engine.environment.get("ranks", "1")
    return int(ranks) if ranks.isdecimal() else 1


def rank_map(c: Comparison) -> Figure | None:
    """Draws the rank map; None where both sides ran in one process."""
    sides = {side: ranks_of(e) for side, e in c.engines.items()}
    most = max(sides.values())
    if most == 1:
        return None
    differing = Counter(r for m in c.mismatches for r in m.ranks)
    title = "Ranks"
    desc = (
        "A row for each side, a square for each of its ranks, with the weights that differ there."
    )
    # A mismatch names ranks of a sharded side; where both are sharded, of either side.
    drawn = list(_squares(c, sides, differing))
    rows = [
        [side, str(rank), str(differing[rank]) if count > 1 else "–"]
        for side, count in sides.items()
        for rank in range(count)
    ]
    caption = "Parameters that differ, by the ranks that hold them."
    if not differing:
        caption = "No parameter differs between the sides."
    return Figure(
        name="ranks",
        title=title,
        caption=[caption],
        svg=chart("ranks", (max(600.0, _LEFT + _CELL * most), 96.0), title, desc, drawn),
        columns=["side", "rank", "parameters that differ"],
        rows=rows,
    )


def _squares(c: Comparison, sides: dict, differing: Counter[int]) -> Iterator[Markup]:
    for row, (side, count) in enumerate(sides.items()):
        y = 4.0 + row * 46
        split = ", ".join(
            f"{k}={v}"
            for k, v in c.engines[side].options.items()
            if k in ("tp", "cp", "pp", "ep", "dp")
        )
        yield text(_LEFT - 8, y + 24, f"{side} {split}".strip(), class_="label end")
        for rank in range(count):
            x, differ = _LEFT + rank * _CELL, differing[rank] if count > 1 else 0
            level = "bad" if differ else "l0"
            box = {"x": x, "y": y, "width": _CELL - 4, "height": 40.0}
            yield el("rect", class_=level, **box)
            words = f"✕ {differ} differ" if differ else "= equal"
            yield text(x + 6, y + 16, f"rank {rank}", class_=f"ink {level}")
            yield text(x + 6, y + 32, words, class_=f"ink {level}")
