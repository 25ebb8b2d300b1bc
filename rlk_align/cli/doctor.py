"""`rlk-align doctor`: what is installed, what each engine can do here, what to install."""

import importlib.metadata
import os
import platform
import shutil

from rich.console import Console

from rlk_align.engines.process.versions import holders, versions
from rlk_align.engines.registry import ENGINES, engine_info
from rlk_align.engines.tested import TESTED, untested
from rlk_align.model.families import FAMILIES


def doctor() -> None:
    """Show what each engine can do on this machine."""
    console = Console(highlight=False)
    for name, value in _machine().items():
        console.print(f"{name:<12}{value}", soft_wrap=True)
    console.print(f"{'families':<12}{', '.join(FAMILIES)}")
    console.print()
    for name in ENGINES:
        here, todo = _engine(name)
        console.print(f"{name:<12}{here}", soft_wrap=True)
        if todo:
            console.print(f"{'':<12}to do: {todo}", soft_wrap=True)
    for warning in _warnings():
        console.print(f"[yellow]warning[/yellow] {warning}", soft_wrap=True)


def _machine() -> dict[str, str]:
    import torch

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": f"CUDA {torch.version.cuda}: {', '.join(names)}" if cuda else "CPU only",
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "disk": f"{shutil.disk_usage('.').free / 1e9:.0f} GB free here",
    }


def _engine(name: str) -> tuple[str, str]:
    info = engine_info(name)
    if not info.installed:
        return "not installed", info.install
    can = "samples and scores" if info.samples else "scores"
    return f"{_version(info.package)}, ready: {can}", ""


def _version(package: str) -> str:
    top = package.partition(".")[0]
    names = holders().get(top, [top])
    return ", ".join(f"{n} {importlib.metadata.version(n)}" for n in dict.fromkeys(names))


def _warnings() -> list[str]:
    import torch

    warnings = untested(versions(TESTED))
    beside = []
    if "+cpu" in torch.__version__:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            if "+cpu" not in version:
                beside.append(name)
    if beside:
        warnings.append(
            f"{', '.join(beside)}: built for another torch than the CPU build here, which breaks "
            f"`import transformers`: pip uninstall {' '.join(beside)}"
        )
    return warnings
