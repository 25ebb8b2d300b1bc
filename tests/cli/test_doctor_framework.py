"""`rlk-align doctor --framework NAME`: the settings of the pages."""

from pathlib import Path

import pytest
from command import Cli

from rlk_align.cli.frameworks import FRAMEWORKS, ON

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_settings_are_those_of_the_page(cli: Cli, name: str) -> None:
    framework = FRAMEWORKS[name]
    page = (ROOT / framework.page).read_text(encoding="utf-8")
    assert all(line.rpartition(".")[2] in page for line in framework.lines)
    assert framework.version in page
    done = cli("doctor", "--framework", name)
    assert done.code == 0, done.err
    said = [line.strip() for line in done.out.splitlines()]
    assert list(framework.lines) == [line for line in said if line in framework.lines]
    assert framework.page in done.out
    assert (ON in framework.lines) or (name in ("trl", "roll", "nemo-rl", "slime", "miles"))


def test_an_unknown_framework_is_refused(cli: Cli) -> None:
    done = cli("doctor", "--framework", "other")
    assert done.code == 2
    assert "--framework other is unknown" in done.err
    assert "verl" in done.err
