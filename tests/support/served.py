"""A server that records itself, and clients that send it requests."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from command import INTERPRETERS

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    # Has the paths with which a loop controls the server.
    "VLLM_SERVER_DEV_MODE": "1",
}
CACHE = 100_000_000
HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests/record"
"""The folder of the plugins that plant faults."""


def plugin_folder(folder: Path, *faults: str, group: str = "vllm.general_plugins") -> Path:
    """A folder with the metadata of a package that has the recorder's entry points, which may be
    newer than the installed ones. `faults`: further plugins of the group, as `module:function`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = []
    for of, points in project["entry-points"].items():
        targets = (*points.values(), *(faults if of == group else ()))
        lines += [f"[{of}]", *(f"served_{i} = {each}" for i, each in enumerate(targets))]
    info = folder / "rlk_record_served-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlk-record-served\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return folder


class Server:
    """An OpenAI server of vLLM in processes of its own, which a test starts and ends."""

    names = "VLLM"
    """The beginning of the names of its processes that compute."""

    def __init__(
        self, model: str, plugin: Path, log: Path, words: Sequence[str], **environment: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [*self.command(model), "--host", "127.0.0.1", "--port", str(self.port), *words]
        path = os.pathsep.join(
            [
                *map(str, (ROOT, ROOT / "kernels", plugin, FAULTS, HERE)),
                os.environ.get("PYTHONPATH", ""),
            ]
        )
        self.log = log
        # Through a pipe, because a test limits the size of files that these processes write.
        self._process = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._keep_log, daemon=True)
        self._reader.start()

    def command(self, model: str) -> list[str]:
        """What starts it, without an address."""
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--served-model-name", "m", "--max-model-len", "1024"),
            *("--gpu-memory-utilization", "0.01", "--kv-cache-memory-bytes", str(CACHE)),
        ]

    def _keep_log(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("wb") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float = 1200) -> None:
        """Waits until it serves."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self._process.poll() is None, self.said()[-6000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
            except OSError:
                time.sleep(1)
            else:
                return
        raise AssertionError(f"no server within {seconds} s: {self.said()[-6000:]}")

    def ended(self, seconds: float = 300) -> int:
        """Waits until it has ended; returns its exit code."""
        return self._process.wait(seconds)

    def post(self, ids: Sequence[int], name: str, **settings: Any) -> dict[str, Any]:
        """The choice that a completion returns."""
        body = {"model": "m", "prompt": list(ids), "temperature": 1.0, "return_token_ids": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | settings).encode(),
            {"Content-Type": "application/json", "X-Request-Id": name},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())["choices"][0]

    def call(self, path: str, **settings: Any) -> None:
        """Calls one of the paths with which a loop controls the server."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(settings).encode() if settings else b"",
            {"Content-Type": "application/json"} if settings else {},
        )
        urllib.request.urlopen(request, timeout=300).close()

    def together(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sends requests at the same time; returns their choices in order."""
        answers: dict[int, dict[str, Any]] = {}

        def send(number: int, request: dict[str, Any]) -> None:
            answers[number] = self.post(**request)

        threads = [threading.Thread(target=send, args=pair) for pair in enumerate(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == len(requests), self.said()[-6000:]
        return [answers[number] for number in range(len(requests))]

    @property
    def processes(self) -> list[psutil.Process]:
        """Those of the engine: its core and its workers."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in children if process.name().startswith(self.names)]

    def limit_files(self, size: int) -> None:
        """Makes writes beyond a size of a file fail in the processes of the engine."""
        for process in self.processes:
            process.rlimit(psutil.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def kill_core(self) -> None:
        core = next(process for process in self.processes if "EngineCore" in process.name())
        core.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends it as an operator does, and then whatever is left of it."""
        if self._process.poll() is not None:
            return
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for child in psutil.wait_procs(children, timeout=20)[1]:
            child.kill()
        self._reader.join(20)


class SGLangServer(Server):
    """A server of SGLang; it takes and returns token ids."""

    names = "sglang::schedul"

    def command(self, model: str) -> list[str]:
        return [
            *(str(INTERPRETERS["sglang"]), str(FAULTS / "sglang_server.py"), "--device", "cpu"),
            *("--model-path", model, "--skip-tokenizer-init", "--skip-server-warmup"),
            *("--context-length", "1024", "--max-total-tokens", "16384"),
            *("--attention-backend", "torch_native", "--grammar-backend", "none"),
        ]

    def post(self, ids: Sequence[int], name: str, **settings: Any) -> dict[str, Any]:
        """The answer to a request. `logprobs`: whether its log-probs are asked for; other settings
        are those of its sampling."""
        asked = settings.pop("logprobs", None) is not None
        sampling = {"temperature": 1.0} | settings
        body = {"input_ids": list(ids), "rid": name, "return_logprob": asked}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            json.dumps(body | {"sampling_params": sampling}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())


def wait_for(path: Path, seconds: float = 300) -> Path:
    """Waits until a file or a folder exists."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} is missing"
        time.sleep(0.2)
    return path
