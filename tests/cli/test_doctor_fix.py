"""`doctor --fix`: packages that a CPU build of torch cannot load are found and uninstalled."""

import subprocess
import sys
from pathlib import Path

import pytest
from command import Cli

from rlk_align.cli import doctor
from rlk_align.errors import ToolError

Record = dict[str, str]
HEALTHY = {"torchvision": "0.28.0+cpu", "torchaudio": "2.11.0+cpu"}
BROKEN = {"torch": "2.13.0+cpu", **HEALTHY, "torchcodec": "0.17.0"}


def installed(folder: Path, versions: Record) -> str:
    """A folder for the import path where these distributions are installed."""
    for name, version in versions.items():
        record = folder / f"{name}-{version}.dist-info"
        record.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (record / "METADATA").write_text(metadata)
    return str(folder)


@pytest.mark.parametrize(
    ("versions", "broken"),
    [
        (BROKEN, ["torchcodec"]),
        (BROKEN | {"torchvision": "0.28.0"}, ["torchcodec", "torchvision"]),
        ({"torch": "2.13.0+cpu", **HEALTHY}, []),
        (BROKEN | {"torch": "2.13.0+cu130"}, []),
    ],
)
def test_builds_for_another_torch_are_found(
    cli: Cli, tmp_path: Path, versions: Record, broken: list[str]
) -> None:
    out = cli("doctor", env={"PYTHONPATH": installed(tmp_path / "fake", versions)}).out
    warned = [line for line in out.splitlines() if "doctor --fix" in line]
    assert len(warned) == bool(broken)
    assert not broken or warned[0].startswith(f"warning {', '.join(broken)}: not built for")


def test_they_are_uninstalled_from_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(doctor, "_built_for_another_torch", lambda: ["torchcodec"])
    doctor.doctor(fix=True)
    assert asked == [[sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "torchcodec"]]
    doctor.doctor()
    assert len(asked) == 1


def test_a_pip_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(doctor, "_built_for_another_torch", lambda: ["torchcodec"])
    with pytest.raises(ToolError, match="could not uninstall torchcodec"):
        doctor.doctor(fix=True)
