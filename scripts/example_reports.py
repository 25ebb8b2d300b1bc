"""The examples in reports/examples: the default pair, a planted fault, and the default pair without
our kernels and with them, as pages and pictures.

    python scripts/example_reports.py [--out reports/examples]

Makes the runs below the current directory, unless they are there, and probes the first two; then
writes NAME.html, NAME-light.png and NAME-dark.png. Paths of this machine are on the pages: run it
where they may be published.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from rlk_align.cli.compare import WITHOUT

RUNS = {
    "healthy": [],
    "fault": ["--train", "megatron:fault=norm-eps"],
    "kernels": ["--kernels", "rlk"],
}
WIDTH = 1400
COLOURS = 200
"""Of a picture: enough for text and charts, and small."""


def tool(*words: str) -> None:
    """`rlk-align`, whose verdict may be a fail."""
    done = subprocess.run([sys.executable, "-m", "rlk_align", *words])
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)


def made(name: str) -> list[str]:
    """The run of that name, probed; two of one that has another beside it."""
    folder = Path("rlk-runs") / name
    if not folder.is_dir():
        tool("compare", *RUNS[name], "--run-dir", str(folder))
    beside = folder / WITHOUT
    if beside.is_dir():
        return [str(beside), str(folder)]
    if not (folder / "probe.json").is_file():
        tool("probe", str(folder), "--attribute")
    return [str(folder)]


def picture(browser: Browser, page: Path, scheme: str, out: Path) -> None:
    """The whole page in one theme."""
    context = browser.new_context(
        offline=True, color_scheme=scheme, viewport={"width": WIDTH, "height": 1000}
    )
    tab = context.new_page()
    tab.goto(page.absolute().as_uri())
    tab.screenshot(path=out, full_page=True)
    context.close()
    small = Image.open(out).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(out, optimize=True)


def main() -> None:
    """Makes them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/examples"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or sys.exit("chromium is not installed")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for name in RUNS:
            page = out / f"{name}.html"
            tool("report", "html", *made(name), "-o", str(page))
            for scheme in ("light", "dark"):
                picture(browser, page, scheme, out / f"{name}-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
