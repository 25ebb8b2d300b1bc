"""The distributions of two passes over the whole vocabulary, in words and figures."""

from collections.abc import Iterator

from rlk_align.report.document import DataTable, Section
from rlk_align.results import Comparison, Distribution, EdgeResult

COLUMNS = ("edge", "rows", "KL(p‖q)", "KL(q‖p)", "TV", "max |Δ|", "top-1", "top-20")


def distribution_sections(c: Comparison) -> Iterator[Section]:
    """Yields the section of the edges whose passes both keep logits; nothing without such edges."""
    found = [(e, d) for e in c.edges if (d := e.distribution) is not None and d.positions]
    if found:
        yield Section(
            heading="distributions over the whole vocabulary",
            table=DataTable(
                name="distributions",
                caption="p and q are the distributions of the first and the second pass, and TV "
                "is half the sum of |p − q|; Δ is the log-prob of any token of the vocabulary in "
                "the second pass minus that in the first. The last columns say how often both "
                "have the same most probable token, and the same 20.",
                columns=COLUMNS,
                rows=[[e.name, *_figures(d)] for e, d in found],
            ),
            items=[text for e, d in found for text in _largest(e, d)],
        )


def _figures(d: Distribution) -> list[str]:
    sizes = (d.kl, d.reverse_kl, d.total_variation, d.max_abs_dlogp)
    shares = (f"{d.top1_agreement:.2%}", f"{d.top20_agreement:.2%}")
    return [f"{d.positions:,}", *(f"{x:.2g}" for x in sizes), *shares]


def _largest(edge: EdgeResult, d: Distribution) -> Iterator[str]:
    """Yields at how many positions logits are missing, and which token differs most at one position
    and in the mean."""
    if d.missing:
        yield f"{edge.name}: a side keeps no logits of {d.missing:,} more positions"
    if d.largest is not None:
        sample, position, token = d.largest
        yield (
            f"{edge.name}: the largest |Δ|, {d.max_abs_dlogp:.2g}, is that of token {token} at "
            f"sample {sample}, position {position}; in the mean token {d.worst_token_id} differs "
            f"most, by {d.worst_token:.2g}, and a typical one by {d.typical_token:.2g}"
        )
