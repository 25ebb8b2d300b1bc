"""Versions of torch and Triton to come may lack the private names that the fast paths use: the
kernels are imported all the same, compute the same bits, and say which fast path is off."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from rlk_kernels import private_api

RUN = """
import contextlib, hashlib, importlib.machinery, json, os, sys, traceback
import torch
import torch._dynamo

NAMES = json.loads(sys.argv[1])

def hidden(name):
    *path, last = name.split(".")[1:]
    owner = torch
    for part in path:
        owner = getattr(owner, part)
    return owner, last

def digest(*tensors):
    data = b"".join(t.detach().numpy().tobytes() for t in tensors)
    return hashlib.sha256(data).hexdigest()

def computed():
    import rlk_kernels as rk
    from rlk_kernels import private_api
    torch.manual_seed(0)
    x = torch.randn(5, 32, requires_grad=True)
    w = torch.randn(32, requires_grad=True)
    v = torch.randn(50, 32, requires_grad=True)
    ids = torch.tensor([1, 2, 3, 4, 5])
    y = rk.rms_norm(x, w, 1e-6)
    logp = rk.linear_logp(y, v, ids)
    logp.sum().backward()
    with torch.no_grad():
        again = rk.linear_logp(rk.rms_norm(x, w, 1e-6), v, ids)
    refused = 0
    for transform in (
        lambda: torch.func.grad(lambda z: rk.rms_norm(z, w.detach(), 1e-6).sum())(x.detach()),
        lambda: torch.func.jvp(
            lambda z: rk.rms_norm(z, w.detach(), 1e-6), (x.detach(),), (x.detach(),)
        ),
    ):
        try:
            transform()
        except Exception:
            refused += 1
    bits = digest(y, logp, again, x.grad, w.grad, v.grad)
    return {"bits": bits, "refused": refused, "paths": private_api.fast_paths()}

@contextlib.contextmanager
def without(names):
    kept = []
    for name in names:
        owner, last = hidden(name)
        if hasattr(owner, last):  # torch's builds without CUDA lack some
            kept.append((owner, last, getattr(owner, last)))
            delattr(owner, last)
    yield
    for owner, last, value in kept:
        setattr(owner, last, value)

class Finder:
    # The names are gone for the module that looks for them: torch needs some of them itself.
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        if name != "rlk_kernels.private_api":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def hiding(module):
            with without(self.names):
                execute(module)
        spec.loader.exec_module = hiding
        return spec

# What takes long is imported before the forks: what the kernels import, and what a transform does.
torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))
for names in NAMES:
    reader, writer = os.pipe()
    if os.fork() == 0:
        sys.meta_path.insert(0, Finder(names))
        try:
            said = computed()
        except BaseException:
            said = {"error": traceback.format_exc()}
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        print(file.read(), flush=True)
    os.wait()
"""
DISPATCH = (
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.TransformType",
    "torch._C._len_torch_dispatch_stack",
    "torch.autograd.forward_ad._current_level",
)
"""What a call past torch's dispatch needs."""
ALLOCATION = "torch._C._dynamo.guards"
DEVICE = ("torch._C._cuda_getDevice", "torch._C._cuda_getCurrentRawStream")
EVERY = (*DISPATCH, ALLOCATION, *DEVICE)
CASES = {"none": [], "every name": [*EVERY], **{name: [name] for name in EVERY}}


@pytest.fixture(scope="module")
def said() -> dict[str, dict]:
    """Case -> what the kernels compute and say where its names are gone."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([*CASES.values()])],
        env=os.environ | {"RLK_BACKEND": "torch", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CASES), done.stderr
    return dict(zip(CASES, answers, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if case != "none"])
def test_without_a_name_the_same_is_computed_and_the_fast_path_is_off(
    said: dict[str, dict], case: str
) -> None:
    found, usual = said[case], said["none"]
    for answer in (found, usual):
        assert "error" not in answer, answer["error"]
    assert found["bits"] == usual["bits"]
    assert found["refused"] == usual["refused"] == 2, "transforms are refused, by torch or by us"
    assert usual["paths"]["direct dispatch"] == "on"
    off = {path for path, state in found["paths"].items() if state.startswith("off (torch ")}
    for path, names in (
        ("direct dispatch", DISPATCH),
        ("direct allocation", (ALLOCATION,)),
        ("device query", DEVICE),
    ):  # fmt: skip
        gone = {*names} & {*CASES[case]}
        assert path in off or not gone
        assert all(name in found["paths"][path] for name in gone)
    if not {*DISPATCH} & {*CASES[case]}:
        assert found["paths"]["direct dispatch"] == "on"


def test_without_its_hooks_every_launch_is_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    private_api._launch_hooks.cache_clear()
    assert private_api._launch_hooks() is not None
    monkeypatch.setattr(triton, "knobs", SimpleNamespace())
    private_api._launch_hooks.cache_clear()
    try:
        assert private_api.profiled()
        off = "no triton.knobs.runtime.launch_enter_hook"
        assert off in private_api.fast_paths()["replay"]
        monkeypatch.setattr(private_api, "triton_version", lambda: "3.6.0")
        assert off in private_api.fast_paths()["direct launch"]
    finally:
        private_api._launch_hooks.cache_clear()


def test_without_tritons_parts_compiling_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    with ThreadPoolExecutor(1) as threads, private_api.compiling_in(threads):
        private_api.stop_submitting()
    cache = private_api.disk_cache("digest")
    cache.put(b"binary", "kernel.cubin", binary=True)
    assert cache.get_file("kernel.cubin") is None
