"""Makes the HTML pages in reports/examples.

    python scripts/example_reports.py [--out reports/examples]

The pages show the default pair, a planted fault, and the default pair without the kernels and with
them. The script makes the runs in rlk-runs/ unless they exist, and probes the first two. The pages
contain paths of the machine that made them.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from rlk_align.cli.compare import WITHOUT

RUNS = {
    "healthy": [],
    "fault": ["--train", "megatron:fault=norm-eps"],
    "kernels": ["--kernels", "rlk"],
}
"""Name of a page -> the options of `rlk-align compare`."""


def tool(*words: str) -> None:
    """Runs `rlk-align`; exits unless its verdict is PASS or FAIL."""
    done = subprocess.run([sys.executable, "-m", "rlk_align", *words])
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)


def run_folders(name: str) -> list[str]:
    """The folder of this run, which is probed; or the folders of the runs without and with the
    kernels."""
    folder = Path("rlk-runs") / name
    if not folder.is_dir():
        tool("compare", *RUNS[name], "--run-dir", str(folder))
    without = folder / WITHOUT
    if without.is_dir():
        return [str(without), str(folder)]
    if not (folder / "probe.json").is_file():
        tool("probe", str(folder), "--attribute")
    return [str(folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("reports/examples"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in RUNS:
        tool("report", "html", *run_folders(name), "-o", str(out / f"{name}.html"))


if __name__ == "__main__":
    main()
