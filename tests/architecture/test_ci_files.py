"""What users copy into their CI: the action, the workflows and the script, run as a runner does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from report_runs import report_run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "ci"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
STEPS: dict[str, dict[str, Any]] = {step["name"]: step for step in ACTION["runs"]["steps"]}
GATE = STEPS["Gate"]
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")


def checked_by_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_action_uses_what_it_declares() -> None:
    assert set(ACTION) == {"name", "description", "branding", "inputs", "outputs", "runs"}
    assert ACTION["runs"]["using"] == "composite"
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(ACTION["inputs"])
    for given in ACTION["inputs"].values():
        assert given["description"]
        assert given.get("required") or isinstance(given["default"], str)
    written = set(re.findall(r'echo "([\w-]+)=.*GITHUB_OUTPUT', GATE["run"]))
    for name, output in ACTION["outputs"].items():
        assert output["value"] == f"${{{{ steps.gate.outputs.{name} }}}}"
    assert written == set(ACTION["outputs"])


@pytest.mark.parametrize("name", STEPS)
def test_the_actions_scripts_hold_no_expression(name: str) -> None:
    """An input that is pasted into a script is run."""
    step = STEPS[name]
    assert step["shell"] == "bash"
    assert not EXPRESSION.search(step["run"])
    checked_by_bash(step["run"])
    for variable in step.get("env", {}):
        assert f"${variable}" in step["run"]
        assert not re.search(rf'(?<!["=/:])\${variable}\b', step["run"]), "not quoted"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_the_workflows_are_workflows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert set(workflow) == {"name", True, "permissions", "jobs"}  # `on` is a truth in YAML 1.1
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            checked_by_bash(step.get("run", ""))
            if "rlk-align@" in step.get("uses", ""):
                assert set(step["with"]) <= set(ACTION["inputs"])
                needed = {n for n, i in ACTION["inputs"].items() if i.get("required")}
                assert needed <= set(step["with"])
    assert not EXPRESSION.search(text)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_the_workflows_flags_are_there(path: Path) -> None:
    from typer.main import get_command

    from rlk_align.cli.main import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"rlk-align (compare|gate)((?:[^|\n]|\n\s+-)*)", path.read_text()):
        known = {flag for p in commands[line[0]].params for flag in p.opts}
        assert set(re.findall(r"--[\w-]+", line[1])) <= known


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as a job has it: `rlk-align` on PATH, and GitHub's files."""
    shim = tmp_path / "bin" / "rlk-align"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rlk_align "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gate(run: str, contract: str = "", output: str = "rlk-align") -> tuple[int, str]:
    given = {"RUN": run, "CONTRACT": contract, "OUTPUT": output}
    done = subprocess.run(
        # As GitHub runs `shell: bash`.
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", GATE["run"]],
        env=os.environ | given,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_action_judges(runner: Path) -> None:
    report_run(runner / "good run")
    report_run(runner / "bad", over=["layers.1.act"])
    code, said = gate("good run", "bf16")
    assert code == 0, said
    assert (runner / "output").read_text() == "status=pass\nexit-code=0\n"
    assert "## rlk-align: PASS" in (runner / "summary.md").read_text()
    code, said = gate("bad", output="else where")
    assert code == 1, said
    assert "\n::error file=engine/layers.py,line=12," in said
    assert (runner / "output").read_text().endswith("status=fail\nexit-code=1\n")
    assert (runner / "summary.md").read_text().count("## rlk-align: ") == 2
    names = ["comment.md", "junit.xml", "verdict.json"]
    for folder in ("rlk-align", "else where"):
        assert sorted(p.name for p in (runner / folder).iterdir()) == names


@pytest.mark.parametrize("run", ["--help", "$(touch stolen)", "`touch stolen`; touch stolen"])
def test_an_input_is_no_script_and_no_flag(runner: Path, run: str) -> None:
    code, said = gate(run, contract=run)
    assert code == 2, said
    assert (runner / "output").read_text() == "status=error\nexit-code=2\n"
    assert not (runner / "stolen").exists()


def test_the_script_judges(runner: Path) -> None:
    report_run(runner / "bad", over=["layers.1.act"])
    shutil.copy(FOLDER / "gate.sh", runner)
    done = subprocess.run(["bash", "gate.sh", "bad", "--contract", "bf16"], capture_output=True)
    assert done.returncode == 1, done.stderr
    assert int(ElementTree.parse("reports/junit.xml").getroot().get("failures", "0"))


def test_the_page_names_what_is_there() -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", page)
    assert {"ci/gate.yml", "ci/compare.yml", "ci/gate.sh"} <= set(links)
    for link in links:
        assert (ROOT / "docs" / link).exists(), link
    assert all(f"`{name}`" in page for name in ACTION["inputs"])


def test_the_action_and_the_page_install_the_base_wheel_and_name_no_other_package() -> None:
    step = STEPS["Install rlk-align"]["run"]
    assert re.findall(r'/pip" install (.*)', step) == ['--quiet "$GITHUB_ACTION_PATH"']
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    torch = "torch --index-url https://download.pytorch.org/whl/cpu"
    wanted = ["rlk-align", torch, "'rlk-align[engines]'"]
    assert re.findall(r"^pip install (.*)", page, re.MULTILINE) == wanted
    workflow = (FOLDER / "compare.yml").read_text(encoding="utf-8")
    assert re.findall(r"pip install (.*)", workflow) == wanted[1:]
