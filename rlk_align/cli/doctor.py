"""`rlk-align doctor`: what is installed, what each engine can do here, what to install."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil

from rich.console import Console

from rlk_align.engines.process.versions import holders, versions
from rlk_align.engines.registry import ENGINES, engine_info
from rlk_align.engines.tested import TESTED, untested
from rlk_align.errors import INSTALL_ENGINES
from rlk_align.model.families import FAMILIES
from rlk_align.text import line


def doctor() -> None:
    """Show what each engine can do on this machine."""
    console = Console(highlight=False, soft_wrap=True)
    for name, value in _machine().items():
        console.print(line(f"{name:<12}{value}"))
    console.print(line(f"{'families':<12}{', '.join(FAMILIES)}"))
    console.print()
    for name in ENGINES:
        here, todo = _engine(name)
        console.print(line(f"{name:<12}{here}"))
        if todo:
            console.print(line(f"{'':<12}to do: {todo}"))
    for warning in _warnings():
        console.print(line("warning ", "yellow") + line(warning))


def _machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **_torch(),
        "disk": f"{shutil.disk_usage('.').free / 1e9:.0f} GB free here",
    }


def _torch() -> dict[str, str]:
    """The versions of torch and CUDA, and the devices torch can compute on."""
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
    return f"{_version(info.package)}, ready: {can}", ""


def _version(package: str) -> str:
    top = package.partition(".")[0]
    names = holders().get(top, [top])
    return ", ".join(f"{n} {importlib.metadata.version(n)}" for n in dict.fromkeys(names))


def _warnings() -> list[str]:
    warnings = untested(versions(TESTED))
    beside = []
    if _has_torch() and "+cpu" in importlib.metadata.version("torch"):
        for name in ("torchvision", "torchaudio", "torchcodec"):
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            if "+cpu" not in version:
                beside.append(name)
    if beside:
        warnings.append(
            f"{', '.join(beside)}: not built for this CPU build of torch, which breaks `import "
            f"transformers`: pip uninstall {' '.join(beside)}"
        )
    return warnings
