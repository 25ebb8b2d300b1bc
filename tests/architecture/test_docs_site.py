"""The pages: each has its place on the site, and no link in them leads to nothing."""

import os
import re
from pathlib import Path

import docs_site
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = dict(docs_site.site_files())
GENERATED = {"reference/cli.md", "reference/schemas.md", "reference/rlk_align.md"} | {
    "reference/rlk_kernels.md"
}
PAGES = ["README.md", *(p for p in SITE if p.endswith(".md"))]


def broken(page: str, text: str) -> list[str]:
    """Targets of a page's relative links that the repository does not have."""
    targets = [m[3] for n, part in enumerate(docs_site.FENCE.split(text)) if n % 2 == 0
               for m in docs_site.LINK.finditer(part)]  # fmt: skip
    inside = [t for t in targets if not re.match(r"[a-z]+:", t)]
    return [t for t in inside if not (ROOT / os.path.dirname(page) / t).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    assert broken(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_broken_link_is_seen() -> None:
    assert broken("docs/ci.md", "[a](../README.md) ![b](no.png) ```x```") == ["no.png"]


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.findall(r": ([\w/.-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)
    assert sorted(navigation) == sorted({p for p in SITE.values() if p.endswith(".md")} | GENERATED)
    assert yaml.safe_load(text)["hooks"] == ["scripts/docs_site.py"]


def test_cells_show_pipes_and_code_as_they_are_meant() -> None:
    assert docs_site.moved(r"| `on\|off` | `a` |", "docs/probe.md", SITE) == (
        "| <code>on&#124;off</code> | `a` |"
    )
    assert docs_site.escaped("`a|b` | <c>") == r"<code>a&#124;b</code> \| \<c\>"


def test_the_command_line_shows_defaults_as_help_does() -> None:
    page = docs_site.command_line()
    for words in (
        "(default: <code>8GB</code>)",
        "(default: vllm, else hf)",
        "(default: <code>0</code>)",
        "No options.",
    ):
        assert words in page
    assert "(default: <code>False" not in page


def test_the_page_of_the_schemas_names_the_type_of_each_field() -> None:
    page = docs_site.schemas()
    assert "array of (integer, integer)" in page
    assert "| `status` | pass or fail or inconclusive |" in page


def test_links_become_those_of_the_site() -> None:
    text = "[r](../reports/probe.md#x) [t](../tests/support/padded.py) [h](https://a.b/c)\n```\n[r](../reports/probe.md)\n```\n"
    moved = docs_site.moved(text, "docs/probe.md", SITE)
    assert moved.startswith(
        "[r](reports/probe.md#x) t (`tests/support/padded.py`) [h](https://a.b/c)\n```\n[r](../reports"
    )
