"""What was explained of a run, for a pull request."""

from rlk_align.diagnose.explain import Explanation
from rlk_align.report.explained_words import BLIND, interval, next_command, scope, sentence
from rlk_align.report.markup import code, prose


def explained_markdown(explained: Explanation, folder: str) -> str:
    """Renders the verdict on a run as Markdown."""
    lines = [
        f"## rlk-align: {explained.status.upper()}",
        f"**{sentence(explained)}** {prose(scope(explained))}.",
        f"E[ρ] {interval(explained.mean_ratio)}, c {interval(explained.c)}; contract "
        f"{code(explained.contract.id)} {explained.contract.version}.",
        *(prose(doubt) for doubt in explained.doubts),
    ]
    for diagnosis in explained.diagnoses:
        lines.append(f"### {diagnosis.name}, confidence {diagnosis.confidence}")
        lines.append(prose(diagnosis.why))
        lines.append(
            f"{prose(diagnosis.statistic)}: {diagnosis.value:.4g} ({diagnosis.low:.4g} to "
            f"{diagnosis.high:.4g}), limit {diagnosis.limit:g}."
        )
        if diagnosis.samples:
            rows = [
                "| sequence | position | token | rollout | trainer |",
                "| --- |" + " ---: |" * 4,
            ]
            rows += [
                f"| {code(t.id)} | {t.position} | {t.token} | {t.rollout} | {t.train} |"
                for t in diagnosis.samples
            ]
            lines.append("\n".join(rows))
        lines.append(f"Next: {prose(next_command(diagnosis.next, folder))}")
    if explained.untested:
        lines.append("Could not be tested:")
        lines.append("\n".join(f"- {x.name}: {prose(x.why)}" for x in explained.untested))
    lines.append(f"Cannot be told from a dump: {'; '.join(BLIND)}.")
    return "\n\n".join(lines) + "\n"
