"""A document as a page."""

from pathlib import Path

from rlk_align.report.document import Document
from rlk_align.report.html.page import render
from rlk_align.report.html.steps import COLUMNS, RunSteps


def document_page(document: Document, steps: RunSteps | None = None) -> str:
    """Renders a document; `steps`: the run's metrics over its steps, as charts."""
    return render(
        "document.html",
        name=Path(document.folder).name or document.folder,
        document=document,
        steps=steps,
        columns=COLUMNS,
    )
