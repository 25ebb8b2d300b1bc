"""A real browser: the system's Chromium, offline. A missing one fails, and never skips."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from report_runs import HOSTILE, hostile_engines, hostile_mismatch, report_run
from simulate_dumps import Dump, faulty

from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.explain import Explanation, explain
from rlk_align.logs.monitor.history import History
from rlk_align.logs.monitor.run_monitor import RunMonitor
from rlk_align.report.explained import explained_document
from rlk_align.report.html.document import document_page
from rlk_align.report.html.page import run_page
from rlk_align.report.html.several import several_page
from rlk_align.report.html.steps import run_steps
from rlk_align.report.source import load_source
from rlk_align.trace.run import Run

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    *("--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-sandbox"),
]
OVER = "layers.1.act"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert found, f"none of {', '.join(CHROMIUM)} is installed: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=ARGUMENTS, env=dict(os.environ)
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name: healthy, failing, hostile, several, two, imported."""
    folder = tmp_path_factory.mktemp("pages")

    def source(run: Run):
        return load_source(str(run.folder), None)

    small = {"samples": 2, "length": 16}
    healthy = source(report_run(folder / "run-healthy", **small))
    failing = source(report_run(folder / "run-failing", over=[OVER], **small))
    hostile = source(
        report_run(
            folder / "run-hostile",
            over=[OVER],
            text=HOSTILE,
            engines=hostile_engines(),
            mismatches=[hostile_mismatch()],
            allowed=["weights"],
            model=HOSTILE,
            **small,
        )
    )
    texts = {
        "healthy": run_page(healthy),
        "failing": run_page(failing),
        "hostile": run_page(hostile),
        "several": several_page([healthy, failing, hostile]),
        "two": several_page([healthy, failing]),
        "imported": document_page(
            explained_document(explained(), HOSTILE), run_steps(0, HOSTILE, watched_run())
        ),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def explained() -> Explanation:
    """A run whose trainer's log-probs are one token late, with ids that are no plain text."""
    run = faulty("trainer one late", 1, 2_000)
    return explain([replace(run, ids=[HOSTILE] * len(run))], load_run_contract())


def watched_run() -> History:
    """Steps of which the last ones fail."""
    history = History()
    monitor = RunMonitor(on_step=history.add)
    for step, sequences in enumerate([Dump(seed, 600).sequences_of() for seed in range(6)]):
        shift = 0.3 if step > 3 else 0.0
        monitor.sequences(step, [replace(sequences, train=sequences.train - shift)])
    return history


Visit = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, pages: dict[str, Path]) -> Iterator[Visit]:
    """Opens a page by name, offline; whatever the console says, and whatever is asked of a network,
    fails the test."""
    contexts, complaints = [], []

    def go(name: str, **options: object) -> Page:
        context = browser.new_context(
            offline=True, viewport={"width": 1400, "height": 1000}, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: asked.url.startswith("file:") or complaints.append(asked.url),
        )
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(pages[name].as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert not complaints
