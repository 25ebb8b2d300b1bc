"""The page in a real browser: what its script adds, and that it is whole without."""

import re

import pytest
from playwright.sync_api import Page, expect
from report_runs import HOSTILE

OVER = "layers.1.act"
ROWS = "#operators-table tbody tr:visible"


def column(page: Page, name: str) -> list[str]:
    """What the table of operators says in a column, from top to bottom."""
    heads = [
        h.removesuffix(" ▲").strip() for h in page.locator("#operators-table th").all_inner_texts()
    ]
    cells = page.locator(f"{ROWS} td:nth-child({heads.index(name) + 1})")
    return cells.all_inner_texts()


@pytest.mark.parametrize("name", ["healthy", "failing", "hostile", "several", "two", "imported"])
def test_it_opens_offline_and_the_console_stays_silent(visit, name: str) -> None:
    page = visit(name)
    expect(page.locator("#main")).to_be_visible()
    assert page.evaluate("document.fonts.size") == 0
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 1400, "the page scrolls sideways"


def test_the_policy_stops_what_is_put_in(visit, pages, tmp_path) -> None:
    """The planted fault of the test above: a script that is not ours does not run."""
    evil = (
        pages["healthy"]
        .read_text(encoding="utf-8")
        .replace(
            "</main>",
            "<script>document.title = 'ran'</script><img src='https://example.org/x.png'></main>",
        )
    )
    path = tmp_path / "evil.html"
    path.write_text(evil, encoding="utf-8")
    page = visit("healthy")
    heard: list[str] = []
    other = page.context.browser.new_context(offline=True).new_page()
    other.on("console", lambda said: heard.append(said.text))
    other.goto(path.as_uri())
    assert other.title() != "ran"
    assert any("Content Security Policy" in said for said in heard)
    other.context.close()


def test_columns_sort_both_ways_by_number(visit) -> None:
    page = visit("failing")
    button = page.locator("#operators-table th button", has_text=re.compile("^largest$"))
    button.click()
    rising = [float(v) for v in column(page, "largest")]
    assert rising == sorted(rising)
    assert page.locator("th[aria-sort=ascending]").count() == 1
    button.click()
    assert [float(v) for v in column(page, "largest")] == rising[::-1] != rising
    page.locator("#operators-table th button", has_text="operator").click()
    names = column(page, "operator")
    assert names == sorted(names)
    # By number, and not as text: 10 comes after 2.
    page.locator("#operators-table th button", has_text="#").click()
    assert column(page, "#") == [str(n + 1) for n in range(len(names))]


def test_failures_alone_can_be_shown(visit) -> None:
    page = visit("failing")
    everything = page.locator(ROWS).count()
    page.get_by_label("Show").select_option("failures")
    assert column(page, "operator") == [OVER]
    expect(page.locator("#filter-count")).to_have_text(f"1 of {everything} shown")
    page.get_by_label("Show").select_option("all")
    page.get_by_label("Find").fill("mlp_norm")
    assert column(page, "operator") == ["layers.0.mlp_norm", "layers.1.mlp_norm"]
    healthy = visit("healthy")
    healthy.get_by_label("Show").select_option("failures")
    expect(healthy.locator(ROWS)).to_have_count(0)


def test_a_cell_selects_its_row_and_a_row_its_cell(visit) -> None:
    page = visit("failing")
    row = page.locator("#operators-table tr", has_text=OVER)
    number = row.get_attribute("data-op")
    page.locator(f"#cell-{number}").click()
    expect(row).to_be_focused()
    expect(row).to_have_class(re.compile(r"\bon\b"))
    expect(row).to_be_in_viewport()
    assert page.locator(f"#drift-chart a.on[data-op='{number}']").count() == 1
    other = page.locator("#op-3")
    other.locator("td").first.click()
    expect(page.locator("#cell-3")).to_have_class(re.compile(r"\bon\b"))
    expect(page.locator(f"#cell-{number}")).not_to_have_class(re.compile(r"\bon\b"))
    # A filter that hides the row gives way.
    page.get_by_label("Show").select_option("failures")
    page.locator("#cell-3").click()
    expect(other).to_be_visible()


def test_what_is_pointed_at_is_named_below_the_chart(visit) -> None:
    page = visit("failing")
    page.locator("#drift-chart a.hit").nth(4).hover()
    figure = page.locator("figure", has=page.locator("#drift-chart"))
    expect(figure.locator(".readout")).to_contain_text("layers.0.v_proj: ")
    expect(figure.locator(".readout")).to_contain_text("inherited")


def test_the_keyboard_goes_everywhere(visit) -> None:
    page = visit("failing")
    page.keyboard.press("Tab")
    expect(page.locator("a.skip")).to_be_focused()
    page.locator("#heat a").first.focus()
    focused = "document.activeElement.id"
    assert page.evaluate(focused) == "cell-2"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "cell-3"
    page.keyboard.press("ArrowDown")
    below = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert below.startswith("layers.1.q_proj")
    page.keyboard.press("End")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("#op-2")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#op-3")).to_be_focused()
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "cell-3"
    # One stop of the Tab key for a chart, however many cells it has.
    assert page.locator("#heat [tabindex='0']").count() == 1
    page.keyboard.press("Tab")
    assert not page.evaluate("document.activeElement.closest('#heat') !== null")


def test_the_theme_follows_the_system_until_the_button_is_pressed(visit) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        page = visit("healthy", color_scheme=scheme)
        seen[scheme] = page.evaluate(ground)
        page.locator("#theme").click()
        seen[f"{scheme}, other"] = page.evaluate(ground)
    assert seen["light"] == seen["dark, other"] != seen["dark"] == seen["light, other"]


def test_it_is_whole_without_its_script(visit) -> None:
    page = visit("failing", java_script_enabled=False)
    for words in ("FAIL", "the training side is off", "Where drift starts"):
        expect(page.get_by_text(words).first).to_be_visible()
    expect(page.locator("#drift-chart")).to_be_visible()
    expect(page.locator("#operators-table tbody tr")).to_have_count(
        page.locator("#heat a.cell").count()
    )
    # Nothing that needs it is offered.
    for part in ("#theme", ".tools", ".readout"):
        expect(page.locator(part).first).to_be_hidden()
    page.locator("#heat a.cell").nth(5).click()
    assert "#op-" in page.url
    page.locator("details.data summary").first.click()
    expect(page.locator("details.data[open] table").first).to_be_visible()


def test_hostile_text_is_read_as_it_is(visit) -> None:
    page = visit("hostile")
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    shown = HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e").replace("\x00", r"\x00")
    expect(page.locator(".provenance td", has_text=shown).first).to_be_visible()
    token = page.locator(".tokens bdi").first
    assert token.inner_text() == shown
    assert shown in page.locator("#tokens-1 .hit title").first.text_content()


@pytest.mark.parametrize("width", [400, 1400])
def test_charts_of_a_run_can_be_read(visit, width: int) -> None:
    """On a narrow screen they scroll sideways, and the page does not."""
    page = visit("failing")
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    labels = page.locator(".chart text:visible")
    heights = labels.evaluate_all(
        "all => all.map(e => [e.getBBox().height, e.ownerSVGElement]).map(([height, svg]) =>"
        "  height * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"
    )
    assert len(heights) > 100
    assert min(heights) >= 9
    drawn = page.locator(".drawing:has(#drift-chart)")
    assert drawn.evaluate("e => e.scrollWidth > e.clientWidth") == (width < 900)


@pytest.mark.parametrize("width", [400, 1400])
def test_charts_over_steps_can_be_read(visit, width: int) -> None:
    page = visit("imported")
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    labels = page.locator(".chart text.label")
    heights = labels.evaluate_all("all => all.map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 9
    # No label is cut off by the chart's edge.
    assert page.locator(".chart").evaluate_all(
        "all => all.every(c => [...c.querySelectorAll('text.label')].every(e => {"
        "  const [a, b] = [c.getBoundingClientRect(), e.getBoundingClientRect()];"
        "  return b.left >= a.left && b.right <= a.right && b.bottom <= a.bottom; }))"
    )
    assert page.locator("rect.failing").count() > 0
