"""The comment on a pull request: what it says, and that nothing in it is acted upon."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile_runs import PAYLOADS, doubtful_source, hostile_source, huge_source
from markdown_it import MarkdownIt
from report_runs import report_run

from rlk_align.report.markup import code, prose
from rlk_align.report.source import load_source
from rlk_align.report.verdict import markdown
from rlk_align.text import printable

OVER = "layers.1.act"
TAGS = {*("h2", "h3", "p", "strong", "ul", "li", "code", "pre"), *("table", "thead", "tbody")}
TAGS |= {"tr", "th", "td"}


class Page(HTMLParser):
    """The rendered comment: its tags, and its text in and outside of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.code, self.words, self.whole, self._inside = "", "", "", 0
        self.feed(MarkdownIt("commonmark").enable("table").enable("strikethrough").render(text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self._inside += tag in ("code", "pre")

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag in ("code", "pre")

    def handle_data(self, data: str) -> None:
        self.whole += data
        if self._inside:
            self.code += data
        else:
            self.words += data


def unharmed(text: str) -> Page:
    page = Page(text)
    assert page.tags <= TAGS, page.tags - TAGS
    assert {name for name, _ in page.attributes} <= {"style", "class"}
    # What a forge makes of plain words: mentions, links, references, emoji, formulas.
    assert not re.search(r"[@$]|://|www\.|#\d|:\w+:", page.words), page.words
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\ufffe\u202e]", text)
    return page


@pytest.mark.parametrize("said", PAYLOADS)
def test_a_name_is_shown_as_it_is(said: str) -> None:
    shown = printable(said)
    for text in (code(said), f"| {code(said)} | x |\n| --- | --- |\n| {code(said)} | y |"):
        page = unharmed(text)
        assert shown.strip() in page.code
    page = unharmed(f"- {prose(said)}")
    assert re.sub(r"\s", "", page.whole) == re.sub(r"\s", "", shown)


def test_all_that_is_hostile_is_shown_as_text(tmp_path: Path) -> None:
    for made in (hostile_source, doubtful_source):
        page = unharmed(markdown(made(tmp_path / made.__name__)))
        assert "<script>alert" in page.code
        assert "javascript:alert(1)" in page.code
    assert "@octocat" in page.code


def test_plain_words_stay_readable() -> None:
    said = "layers.0.attn_norm is further from exact (1.2 roundings, 1.1 allowed); see 3 × x."
    assert prose(said) == said.replace("layers.0.attn_norm", "`layers.0.attn_norm`")
    assert prose("- not a list") == "`-` not a list"
    assert prose("1. nor this") == "`1`. nor this"


def test_it_says_what_is_wrong_where_and_what_to_do(tmp_path: Path) -> None:
    run = report_run(tmp_path / "failing", over=[OVER])
    text = markdown(load_source(str(run.folder), None))
    head, edges, operators, *_ = text.split("\n### ")
    assert head.startswith(
        "## rlk-align: FAIL\n\n**A bug: `layers.1.act`, the training side is off.**"
    )
    assert "`layers.1.act` is further from exact" in head
    assert "- **side:** the training side is off" in head
    assert f"- **next:** check `{OVER}` on the train side" in head
    assert edges.startswith("edges")
    assert "| `prefill_vs_train` | 0.6 | 0.002 |" in edges
    assert operators.startswith("over budget (`prefill_vs_train`)")
    assert f"**`{OVER}`**: the training side is off\n  - at sample" in operators
    assert "engine/layers.py:12" in operators
    assert "roundings" in operators
    for heading in ("breaches", "to make the run again"):
        assert f"\n### {heading}\n" in text
    unprobed = report_run(tmp_path / "unprobed", over=[OVER], probed=False)
    text = markdown(load_source(str(unprobed.folder), None))
    assert "introduced which difference: `rlk-align probe unprobed`" in text


def test_a_pass_says_how_close_it_came(tmp_path: Path) -> None:
    run = report_run(tmp_path / "healthy")
    text = markdown(load_source(str(run.folder), None))
    assert text.startswith("## rlk-align: PASS\n")
    assert "- **closest:** " in text
    assert "- **next:** in CI: `rlk-align gate healthy --contract bf16`" in text
    assert "do not hold" not in text


def test_it_is_the_same_wherever_the_run_lies(tmp_path: Path) -> None:
    run = report_run(tmp_path / "a" / "run")
    (tmp_path / "b").mkdir()
    before = markdown(load_source(str(run.folder), None))
    run.folder.rename(tmp_path / "b" / "run")
    after = markdown(load_source(str(tmp_path / "b" / "run"), None))
    assert before == after
    assert str(tmp_path) not in before


def test_the_largest_run_fits_a_comment(tmp_path: Path) -> None:
    text = markdown(huge_source(tmp_path / "huge"))
    assert len(text.encode()) < 64 * 1024
    assert re.search(r"and \d{3,} more", text)
    unharmed(text)
