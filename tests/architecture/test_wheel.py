"""The wheel: what is in it, and that the tool runs from it alone."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_both_packages_are_whole(names: set[str]) -> None:
    for folder, package in ((ROOT, "rlk_align"), (ROOT / "kernels", "rlk_kernels")):
        found = [p for kind in ("py", "cu") for p in (folder / package).rglob(f"*.{kind}")]
        sources = {p.relative_to(folder).as_posix() for p in found}
        assert sources
        assert sources <= names
    parts = (ROOT / "rlk_align" / "report" / "html" / "templates").iterdir()
    pages = {p.relative_to(ROOT).as_posix() for p in parts}
    assert {Path(p).suffix for p in pages} == {".html", ".css", ".js"}
    assert pages <= names
    assert "rlk_kernels/matmul/hopper/product.cu" in names


def test_the_data_is_inside(names: set[str]) -> None:
    wanted = {f"contracts/{p.name}" for p in (ROOT / "contracts").glob("*.toml")}
    wanted |= {f"model/{p.name}" for p in (ROOT / "fixtures" / "model").iterdir()}
    wanted.add("prompts.jsonl")
    assert {"contracts/bf16.toml", "contracts/bitwise.toml"} <= wanted
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= wanted
    assert {f"rlk_align/data/{name}" for name in wanted} <= names


def test_nothing_else_is_inside(names: set[str]) -> None:
    info = {n for n in names if n.split("/")[0].endswith(".dist-info")}
    assert any(n.endswith("entry_points.txt") for n in info)
    assert any(n.endswith("LICENSE") for n in info)
    rest = names - info
    assert {n.split("/")[0] for n in rest} == {"rlk_align", "rlk_kernels"}
    data = {n for n in rest if n.startswith("rlk_align/data/")}
    assert {n.split("/")[2] for n in data} == {"contracts", "model", "prompts.jsonl"}
    kinds = {Path(n).suffix or Path(n).name for n in rest - data}
    assert kinds <= {".py", ".cu", ".typed", ".html", ".css", ".js", ".json", ".md"}
    assert {n for n in rest if n.endswith(".md")} == {"rlk_kernels/PROFILE.md"}
    assert not [n for n in data if n.endswith(".py")]
    scripts = {p.name for p in (ROOT / "fixtures").glob("*.py")} | {"conftest.py"}
    assert len(scripts) > 3
    assert not [n for n in rest if Path(n).name in scripts or Path(n).name.startswith("test_")]
    assert not [n for n in rest if {"__pycache__", "tests", "bench"} & set(n.split("/"))]


def test_the_wheel_is_small_enough_to_ship(wheel: Path) -> None:
    assert wheel.stat().st_size < 60e6


def run(installed: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Python that sees the unpacked wheel, and neither the checkout nor the current folder."""
    env: Mapping[str, str] = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-P", *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )


def test_the_tool_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "rlk_align", "doctor", "--help")
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    done = run(installed, tmp_path, "-m", "rlk_align", "--version")
    assert done.stdout.startswith("rlk-align ")


def test_data_is_found_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import rlk_align, rlk_kernels\n"
        "from rlk_align.data import data_path\n"
        "from rlk_align.judge.load import load_contract\n"
        "print(rlk_align.__file__, rlk_kernels.__file__, load_contract('bf16', 'bfloat16').id)\n"
        "print(*(data_path(n) for n in ('contracts', 'model', 'prompts.jsonl')))\n"
    )
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[2] == "bf16"
    for text in (*first[:2], *second):
        path = Path(text).resolve()
        assert path.exists()
        assert installed.resolve() in path.parents
    assert (Path(second[1]) / "model.safetensors").stat().st_size > 0


def test_data_is_found_in_the_checkout() -> None:
    from rlk_align.data import data_path

    assert data_path("contracts") == ROOT / "contracts"
    assert data_path("model") == ROOT / "fixtures" / "model"
    assert data_path("prompts.jsonl") == ROOT / "fixtures" / "prompts.jsonl"
    for name in ("contracts", "model", "prompts.jsonl"):
        assert data_path(name).exists()
