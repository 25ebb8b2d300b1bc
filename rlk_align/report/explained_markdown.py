"""What was explained of a run, for a pull request."""

from collections.abc import Iterator

from rlk_align.logs.diagnose.explain import Explanation
from rlk_align.report.explained_words import (
    BLIND,
    breach_words,
    interval,
    next_command,
    scope,
    sentence,
    value_words,
)
from rlk_align.report.markup import code, prose, table


def explained_markdown(explained: Explanation, folder: str) -> str:
    """Renders the verdict on a run as Markdown."""
    lines = [
        f"## rlk-align: {explained.status.upper()}",
        f"**{sentence(explained)}** {prose(scope(explained))}.",
        measured(explained),
        *(prose(doubt) for doubt in explained.doubts),
        *(prose(breach_words(b)) + "." for b in explained.breaches if b[0] == "numerics"),
        *diagnosis_sections(explained, folder),
    ]
    return "\n\n".join(lines) + "\n"


def measured(explained: Explanation) -> str:
    """The figures that every verdict on a dump has, and its contract."""
    return (
        f"E[ρ] {interval(explained.mean_ratio)}, c {interval(explained.c)}; contract "
        f"{code(explained.contract.id)} {explained.contract.version}."
    )


def diagnosis_sections(explained: Explanation, folder: str) -> Iterator[str]:
    """Yields the blocks of each diagnosis, of what was not tested, and of what cannot be told."""
    for diagnosis in explained.diagnoses:
        yield f"### {diagnosis.name}, confidence {diagnosis.confidence}"
        yield prose(diagnosis.why)
        yield prose(value_words(diagnosis)) + "."
        if diagnosis.samples:
            rows = [
                [code(t.id), str(t.position), str(t.token), str(t.rollout), str(t.train)]
                for t in diagnosis.samples
            ]
            yield table(["sequence", "position", "token", "rollout", "trainer"], rows, figures=True)
        yield f"Next: {prose(next_command(diagnosis.next, folder))}"
    if explained.untested:
        yield "Could not be tested:"
        yield "\n".join(f"- {x.name}: {prose(x.why)}" for x in explained.untested)
    yield f"A dump cannot tell: {'; '.join(BLIND)}."
