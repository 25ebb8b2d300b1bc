"""axe-core over the pages, in both themes: nothing serious, nothing critical."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

ALL = {"resultTypes": ["violations"]}
CONTRAST = ALL | {"runOnly": {"type": "rule", "values": ["color-contrast"]}}


def serious(page: Page, options: dict = ALL) -> list[str]:
    """Rules that are broken, and by what."""
    found = Axe().run(page, options=options).response["violations"]
    return [
        f"{v['impact']} {v['id']}: {[n['target'] for n in v['nodes'][:3]]}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("name", ["healthy", "failing", "several", "imported"])
def test_nothing_serious(visit, name: str) -> None:
    page = visit(name, color_scheme="light")
    # What is folded away is looked at too; of the charts' data one table, since all are alike.
    page.evaluate(
        "for (const d of document.querySelectorAll('details:not(.data), details.code'))"
        "  d.open = true;"
        "document.querySelector('details.data').open = true"
    )
    assert not serious(page)
    page.emulate_media(color_scheme="dark")
    # Between the themes, colours are all that differs.
    assert not serious(page, CONTRAST)


def test_axe_sees_planted_faults(visit) -> None:
    page = visit("healthy")
    page.evaluate(
        "const field = document.getElementById('filter-text');"
        "field.closest('label').replaceWith(field)"
    )
    assert any("label" in found for found in serious(page))
    page.evaluate("document.querySelector('.lead').style.color = '#ccc'")
    assert any("color-contrast" in found for found in serious(page, CONTRAST))
