"""Processes that start warm: forked from one that has already imported what they need.

Importing torch, transformers, vLLM or megatron-core takes longer than most of what the tests do
with them. A process started here is one of its own, with its own exit code, signals, session,
environment and files; what it leaves out is the start of the interpreter and those imports.

    python warm.py FOLDER      the server: a socket FOLDER/KIND.sock for each kind of process

A kind's first request makes the server fork and import what KINDS names; each request forks once
more. The server ends when its standard input does.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import captures

COMMAND = "rlk_align.cli.main"
WORKER = "rlk_align.engines.worker"
_FILES = ("pyarrow.dataset", "numpy.ma", "safetensors.torch", "safetensors.numpy")
_TOKENIZER = (
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "transformers.tokenization_utils_sentencepiece",
)
_MODELS = ("qwen3", "llama", "qwen2", "mistral")
_ROPE = (
    "transformers.modeling_rope_utils",
    *(f"transformers.models.{m}.configuration_{m}" for m in _MODELS),
)
_KERNELS = "rlk_align.engines.patch"
_HF = (
    "rlk_align.engines.hf.fsdp",
    "rlk_align.engines.hf.taps",
    *(f"transformers.models.{m}.modeling_{m}" for m in _MODELS),
    "torch.distributed.run",
)
KINDS = {
    "light": (COMMAND,),
    # without rlk_align itself
    "tests": ("pytest", "torch", "pydantic", "packaging.version", *_FILES),
    "command": (
        COMMAND,
        "rlk_align.cli.finish",
        "rlk_align.pipeline",
        *_ROPE,
        *_TOKENIZER,
        *_FILES,
    ),
    "hf": (WORKER, *_HF, _KERNELS, *_TOKENIZER, *_FILES),
    "megatron": (
        WORKER,
        "rlk_align.engines.megatron.engine",
        "megatron.core.models.gpt.gpt_layer_specs",
        "torch.distributed.run",
        _KERNELS,
        *_TOKENIZER,
        *_FILES,
    ),
    "deepspeed": (
        WORKER,
        *_HF,
        "rlk_align.engines.deepspeed.engine",
        _KERNELS,
        *_TOKENIZER,
        *_FILES,
    ),
    "vllm": (
        WORKER,
        "rlk_align.engines.vllm.engine",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.entrypoints.launchers.cli_args",
        *(f"vllm.model_executor.models.{m}" for m in _MODELS),
        _KERNELS,
        "rlk_kernels.integrations.vllm.registry",
        *_TOKENIZER,
        *_FILES,
    ),
}
"""What each kind of process has imported."""
FOLDER = "RLK_TEST_WARM"
"""The environment variable that names the server's folder."""


class WarmProcess:
    """A started process, with the part of Popen that its users need."""

    def __init__(self, connection: socket.socket) -> None:
        self.returncode: int | None = None
        self._connection = connection
        said = connection.recv(64)
        assert said, "the warm process did not start"
        self.pid = int(said)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            said = self._connection.recv(64)
            # The process that watches it is gone only where the whole server was killed.
            self.returncode = int(said) if said else -signal.SIGKILL
            self._connection.close()
        return self.returncode


def start(
    kind: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    output: IO[Any],
    errors: IO[Any],
    cwd: Path | None = None,
    passed: Sequence[int] = (),
) -> WarmProcess:
    """Starts `python WORDS` in a session of its own.

    `words`: `-m MODULE ARGUMENTS`, the module with a `main`, `-c CODE ARGUMENTS` or `FILE
    ARGUMENTS`; `passed`: file descriptors that it gets under the same numbers.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(Path(os.environ[FOLDER]) / f"{kind}.sock"))
    request = {
        "words": list(words),
        "environment": dict(environment),
        "cwd": str(cwd or Path.cwd()),
        "passed": list(passed),
    }
    # The request goes through a file, because a message has a largest size.
    with tempfile.TemporaryFile() as file, open(os.devnull, "rb") as nothing:
        file.write(json.dumps(request).encode())
        file.flush()
        files = [file, nothing, output, errors]
        socket.send_fds(connection, [b"start"], [*(f.fileno() for f in files), *passed])
    return WarmProcess(connection)


def start_worker(
    real: Callable[..., subprocess.Popen],
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[Any],
) -> subprocess.Popen | WarmProcess:
    """Stands in for `supervise.start_process`, which is passed as `real`."""
    if command[0] != sys.executable:
        return real(command, environment, output)
    job = json.loads(Path(command[-1]).read_text(encoding="utf-8"))
    name = job["engine"]["name"]
    return start(name if name in KINDS else "hf", command[1:], environment, output, output)


def _prepare(kind: str) -> None:
    """Makes the processes warm that a warm process starts, and computes what never changes."""
    if kind == "command":
        from rlk_align.capture import capture, supervise
        from rlk_align.engines.process.versions import holders

        holders()
        supervise.start_process = partial(start_worker, supervise.start_process)
        capture.run_worker = partial(captures.run_worker, capture.run_worker)
    elif kind in ("hf", "megatron", "deepspeed"):
        _start_ranks_of_torchrun(kind)
        if kind != "megatron":
            _make_table_of_renamed_weights()
        if kind == "deepspeed":
            os.environ["DS_ACCELERATOR"] = "cpu"
            importlib.import_module("deepspeed")
            # Its first optimizer imports this, and with it torch's compiler.
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    elif kind == "vllm":
        _start_ranks_of_vllm()
        _ask_of_models_in_place()
        _put_kernels_of_cpus_in_place()


def _start_ranks_of_torchrun(kind: str) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start_rank(handler: Any, command: Sequence[str], environment: dict[str, str]) -> Any:
        output, errors = handler._stdout or sys.stdout, handler._stderr or sys.stderr
        return start(kind, command[2:], environment, output, errors)

    subprocess_handler.SubprocessHandler._popen = start_rank


def _start_ranks_of_vllm() -> None:
    """vLLM spawns them through multiprocessing."""
    from multiprocessing import popen_spawn_posix, util

    spawn, poll = util.spawnv_passfds, popen_spawn_posix.Popen.poll
    started: dict[int, WarmProcess] = {}

    def spawn_warm(path: str, words: list[str], passed: Sequence[int]) -> int:
        code = words.index("-c")
        if "spawn_main" not in words[code + 1]:
            return spawn(path, words, passed)
        process = start("vllm", words[code:], os.environ, sys.stdout, sys.stderr, passed=passed)
        started[process.pid] = process
        return process.pid

    def poll_warm(popen: Any, flag: int = os.WNOHANG) -> int | None:
        if popen.pid not in started:
            return poll(popen, flag)
        process = started[popen.pid]
        popen.returncode = process.poll() if flag else process.wait()
        return popen.returncode

    util.spawnv_passfds, popen_spawn_posix.Popen.poll = spawn_warm, poll_warm


def _ask_of_models_in_place() -> None:
    """vLLM asks what a model's class can do in a process that starts cold, once a machine."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: ask()


def _put_kernels_of_cpus_in_place() -> None:
    """vLLM searches every loaded module for what they replace, once a process."""
    from vllm.platforms import current_platform

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are deprecated
        current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda platform: None)


def _make_table_of_renamed_weights() -> None:
    """transformers builds this table from thousands of patterns at a process's first model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")


class Server:
    """The process `python warm.py FOLDER`, which lives as long as pytest."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="rlk-warm-")
        # PASSIVE, as the worker's own start has it: libraries read it when they are loaded.
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        os.environ[FOLDER] = self.folder.name

    def end(self) -> None:
        self.process.communicate()
        self.folder.cleanup()


def _wait_for_kinds(folder: Path) -> tuple[str, socket.socket]:
    """Returns in a process of its own for each kind, at its first request."""
    listeners = {}
    for kind in KINDS:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / f"{kind}.sock"))
        listener.listen(16)
        listeners[listener] = kind
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([sys.stdin, *listeners], [], [])
        if sys.stdin in ready:
            while _reaped(0):
                pass
            os._exit(0)
        for listener in ready:
            if os.fork() == 0:
                for other in listeners.keys() - {listener}:
                    other.close()
                return listeners[listener], listener
            listener.close()
            del listeners[listener]


def _reaped(options: int = os.WNOHANG) -> bool:
    """Reaps one ended child, so that its time counts as its parent's. Returns False without one."""
    try:
        return os.waitpid(-1, options)[0] > 0
    except ChildProcessError:
        return False


def _wait_for_requests(listener: socket.socket) -> dict[str, Any]:
    """Returns in a process of its own for each request."""
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [], 1.0)
        while _reaped():
            pass
        if sys.stdin in ready:
            while _reaped(0):
                pass
            os._exit(0)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _accepted(connection)
        connection.close()


def _accepted(connection: socket.socket) -> dict[str, Any]:
    """Returns in the process that was asked for; this one watches it, and ends."""
    _, files, _, _ = socket.recv_fds(connection, 16, 64)
    with open(files.pop(0), "rb") as file:
        file.seek(0)
        request = json.load(file)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.send(str(os.getpid()).encode())
        connection.close()
        _give(files, [0, 1, 2, *request["passed"]])
        return request
    for opened in files:
        os.close(opened)
    watched = os.pidfd_open(pid)
    while watched not in select.select([watched, connection], [], [])[0]:
        # It does not outlive who asked for it.
        os.kill(pid, signal.SIGKILL)
        select.select([watched], [], [])
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _give(files: list[int], numbers: list[int]) -> None:
    """Moves open files to these numbers."""
    above = max(numbers + files) + 1
    high = [fcntl.fcntl(f, fcntl.F_DUPFD, above) for f in files]
    for f in files:
        os.close(f)
    for f, number in zip(high, numbers, strict=True):
        os.dup2(f, number)
        os.close(f)


def _run(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    (how, what, *arguments) = request["words"]
    path = [*filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = [request["cwd"], *path]
    sys.orig_argv = [sys.executable, *request["words"]]
    if any((Path(p) / "sitecustomize.py").is_file() for p in path):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if how == "-c":
        sys.argv = ["-c", *arguments]
        exec(what, {"__name__": "__main__"})
        return
    if how != "-m":
        sys.argv = [how, what, *arguments]
        runpy.run_path(how, run_name="__main__")
        return
    module = importlib.import_module(what)
    sys.argv = [str(module.__file__), *arguments]
    # A process that spawns others tells them what the main module is.
    sys.modules["__main__"] = module
    module.main()


def _leave(code: int) -> None:
    """Ends this process as the interpreter does, without freeing memory, which would copy shared
    pages. Returns if the output cannot be flushed."""
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def main() -> None:
    """The server, and every process that it forks."""
    kind, listener = _wait_for_kinds(Path(sys.argv[1]))
    # A started process must not find the modules of this folder.
    sys.path.remove(str(Path(__file__).parent))
    if kind == "vllm":
        # As its engine sets it, before vLLM is imported.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    gc.disable()  # what imports make is no garbage
    for name in KINDS[kind]:
        importlib.import_module(name)
    _prepare(kind)
    # Forked processes share these objects: the collector must not touch them.
    gc.freeze()
    gc.enable()
    try:
        _run(_wait_for_requests(listener))
    except SystemExit as end:
        if isinstance(end.code, int):
            _leave(end.code)
        raise
    _leave(0)


if __name__ == "__main__":
    main()
