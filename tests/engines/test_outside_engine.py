"""A third-party package adds an engine with kernels by an entry point. Its source is shown in
docs/write-an-engine.md."""

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Cli, Outcome, capture_of

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "outside_engine"
SOURCES = [PACKAGE / "pyproject.toml", *sorted((PACKAGE / "outside_engine").glob("*.py"))]
PAGE = HERE.parents[1] / "docs" / "write-an-engine.md"


@pytest.fixture
def compare(cli: Cli, few_prompts: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs `compare` with the package installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    installed = tmp_path / "site" / f"outside_engine-{project['version']}.dist-info"
    installed.mkdir(parents=True)
    named = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (installed / "METADATA").write_text(named)
    (points,) = project["entry-points"].items()
    lines = [f"[{points[0]}]", *(f"{name} = {value}" for name, value in points[1].items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    found = [installed.parent, PACKAGE, HERE, os.environ.get("PYTHONPATH")]
    env = {"PYTHONPATH": os.pathsep.join(str(path) for path in found if path)}

    def run(*args: object) -> Outcome:
        few = ("--prompts", few_prompts, "--max-new-tokens", 8, "--run-dir", tmp_path / "run")
        return cli("compare", *few, *args, env=env)

    return run


def test_it_is_compared_as_any_other(compare: Callable[..., Outcome]) -> None:
    done = compare("--rollout", "outside", "--train", "hf")
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["contract"]["id"] == "bf16"
    assert done.verdict["precheck"]["mismatches"] == []
    assert done.verdict["coverage"]["unpaired"] == []
    assert done.verdict["controls"]["observer"] == "bitwise"
    assert done.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 0
    assert done.verdict["divergence"]["first_over_budget"] is None


def test_with_the_kernels_every_row_is_equal(
    compare: Callable[..., Outcome], tmp_path: Path
) -> None:
    sides = ("--rollout", "outside:kernels=rlk", "--train", "hf:kernels=rlk")
    done = compare(*sides, "--contract", "bitwise")
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.first is None
    coverage = done.verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 1000
    assert all(e["bit_mismatches"] == 0 for e in done.verdict["edges"].values())
    replaced = capture_of(tmp_path / "run", "rollout").record.kernels
    assert (len(replaced), set(replaced.values())) == (4 * 15 + 4, {"torch"})


def test_an_excluded_operator_stays_its_own(compare: Callable[..., Outcome]) -> None:
    sides = ("--rollout", "outside:kernels=rlk,except=act", "--train", "hf:kernels=rlk")
    done = compare(*sides, "--contract", "bitwise")
    assert (done.code, done.first) == (1, "layers.0.act"), done.out + done.err


def test_a_planted_mistake_is_named_with_its_side(compare: Callable[..., Outcome]) -> None:
    patched = "outside:patch=outside_patches:scaled_down_proj"
    done = compare("--rollout", patched, "--train", "hf", "--edges", "prefill_vs_train")
    assert done.code == 1, done.out + done.err
    assert done.verdict is not None
    over = done.verdict["divergence"]["first_over_budget"]
    assert (over["site"], over["side"]) == ("layers.1.down_proj", "rollout")


def test_another_family_is_refused_before_anything_starts(
    compare: Callable[..., Outcome], model_copy: Callable[..., Path]
) -> None:
    other = model_copy(config={"model_type": "llama"})
    done = compare("--rollout", f"outside:model={other}", "--train", f"hf:model={other}")
    assert done.code == 2
    assert "engine 'outside' runs qwen3, and this is a llama" in done.err


def test_it_takes_150_lines() -> None:
    """Without the blank ones."""
    lines = [line for path in SOURCES for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(list(filter(None, lines))) <= 150


def test_the_page_shows_its_files() -> None:
    shown = dict(re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)```$", PAGE.read_text("utf-8"), re.M | re.S))
    files = {str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in SOURCES}
    assert shown == files
