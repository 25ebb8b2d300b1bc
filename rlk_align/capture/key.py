"""The key of a capture: a digest of everything that affects its contents."""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.process.interpreter import examine
from rlk_align.engines.process.versions import versions
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import ToolError
from rlk_align.model.adapter import adapter_paths
from rlk_align.model.checkpoint import fingerprint_files
from rlk_align.trace.run import fingerprint
from rlk_align.version import __version__

PACKAGE = Path(__file__).parents[1]
"""The folder of our own sources."""

SHARED_SOURCES = ("engines/*.py", "engines/common", "engines/process", "trace", "model")
"""The sources that every adapter builds on, below the package."""


ENVIRONMENT = (
    *("ATEN_", "CUBLAS_", "CUDNN_", "DNNL_", "MKL_", "NCCL_", "NVIDIA_TF32", "NVTE_", "OMP_NUM_"),
    *("DS_", "ONEDNN_", "PYTORCH_", "RLK_BACKEND", "TORCH", "TRITON_", "VLLM_"),
)
"""Prefixes of the environment variables that affect what torch and the engines compute."""


def capture_key(request: CaptureRequest, spec: EngineSpec, model: Path, tokens: Path | None) -> str:
    """The key of a capture. `spec`: in canonical form; `tokens`: the sequences to score."""
    patch, lora = spec.option("patch"), spec.option("lora")
    return fingerprint(
        __version__,
        str(spec.computed),
        surroundings(spec),
        fingerprint_files(model),
        [path and fingerprint_files(Path(path).expanduser()) for path in adapter_paths(lora)]
        if lora
        else None,
        [request.prompts.suffix, request.prompts.read_bytes().hex()],
        tokens.read_bytes().hex() if tokens else [request.max_new_tokens, request.seed],
        [request.trace.budget, request.trace.layers, request.trace.sites],
        request.modules,
        _patch_sources(str(patch).partition(":")[0]) if patch else None,
    )


def surroundings(spec: EngineSpec) -> list[object]:
    """Everything on this machine that affects an engine's numbers: packages, devices, our own
    sources, and environment variables."""
    return [
        engine_versions(spec),
        _device(spec),
        adapter_digest(spec),
        {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)},
    ]


def adapter_digest(spec: EngineSpec) -> str:
    """A digest of the sources of the adapter and of everything that it builds on."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_adapter_sources(spec)):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _adapter_sources(spec: EngineSpec) -> Iterator[Path]:
    for pattern in SHARED_SOURCES:
        yield from PACKAGE.glob(pattern if pattern.endswith(".py") else f"{pattern}/*.py")
    if spec.option("kernels") != "off":
        yield from _kernel_sources()
    if spec.option("fault") is not None:
        yield from PACKAGE.glob("selftest/*/*.py")
    name = spec.info.target.partition(":")[0]
    module = importlib.util.find_spec(name)
    if module is None or module.origin is None:
        raise ToolError(f"engine {spec.name!r}: {spec.info.target} has no source")
    source = Path(module.origin)
    for other in spec.info.builds_on:
        yield from PACKAGE.glob(f"engines/{other}/*.py")
    # A top-level module may be beside files that do not belong to the engine.
    yield from source.parent.glob("*.py") if "." in name else [source]


def _kernel_sources() -> Iterator[Path]:
    module = importlib.util.find_spec("rlk_kernels")
    assert module is not None
    assert module.origin is not None
    folder = Path(module.origin).parent
    yield from folder.rglob("*.py")
    yield from folder.rglob("*.cu")


def engine_versions(spec: EngineSpec) -> dict[str, str]:
    """The versions of the packages that affect the numbers, in the engine's interpreter.

    Raises BadOption or MissingDependency for an interpreter that cannot run the engine.
    """
    module = spec.info.package.partition(".")[0]
    python = spec.option("python")
    if python is not None:
        return examine(str(python), module, spec.info.worker_needs)
    lora = spec.info.lora_package if spec.option("lora") is not None else ""
    return versions(["torch", "transformers"], [name for name in (module, lora) if name])


def _device(spec: EngineSpec) -> list[str]:
    """The devices that the engine computes on: the processor, and the GPUs unless device=cpu."""
    import torch

    processor = [platform.machine(), _processor(), torch.backends.cpu.get_cpu_capability()]
    if spec.device == "cpu":
        return processor
    return [*processor, os.environ.get("CUDA_VISIBLE_DEVICES", "all"), *_gpus()]


def _processor() -> str:
    """The processor's name; outside Linux, what Python's platform module knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpus() -> list[str]:
    """The names of the GPUs by the driver's tool: CUDA must not be initialised here."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.split("\n") if done.returncode == 0 else []


def _patch_sources(module: str) -> str:
    """A digest of a patch's module and of the modules beside it, which it may import. For a module
    without a source the digest is different each time."""
    relative = Path(*module.split("."))
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for base in (Path.cwd(), *map(Path, filter(None, listed)), *map(Path, sys.path)):
        if (base / relative / "__init__.py").is_file():
            sources = (base / relative).rglob("*.py")
        elif (base / relative).with_suffix(".py").is_file():
            sources = (base / relative).parent.glob("*.py")
        else:
            continue
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(sources):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()
    return uuid.uuid4().hex
