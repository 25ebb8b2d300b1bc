"""Without Triton: the package is imported, every operator runs portably, and errors say why not."""

import subprocess
import sys
from pathlib import Path

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels import backend

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Blocked())
"""
EVERY_OPERATOR = """
import torch
import rlk_kernels as rk

def rand(*shape):
    return torch.randn(*shape, requires_grad=True)

x, w, gain, table, q = rand(4, 8), rand(6, 8), rand(8), rand(9, 8), rand(4, 2, 8)
ids, cu = torch.tensor([0, 3, 5, 1]), torch.tensor([0, 4])
outs = [
    rk.linear(x, w, rand(6)),
    *rk.rms_norm(x, gain, 1e-6, residual=rand(4, 8)),
    *rk.rope(q, q, ids, theta=1e4),
    rk.swiglu(x, rand(4, 8)),
    rk.embedding(ids, table),
    rk.logp(rk.linear(x, w), ids),
    rk.attention(q, q, q, cu, cu),
    *rk.linear_logp(x, w, ids, return_lse=True, return_entropy=True),
    rk.linear_grpo_loss(x[None], w, ids[None], None, torch.ones(1), torch.ones(1, 4))[0],
]
sum(y.float().sum() for y in outs).backward()
assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all())
           for leaf in (x, w, gain, table, q))
rk.group_advantages(torch.ones(4), 2)
cache = q.detach()[None]
rk.paged_attention(q.detach(), cache, cache, torch.zeros(1, 1).int(), torch.tensor([4]),
                   cu_seqlens_q=cu)
ran = {name for name, _ in rk.backend_calls()}
assert {backend for _, backend in rk.backend_calls()} == {"torch"}
assert rk.warm_up("cpu")
assert "triton" not in sys.modules
print(*sorted(ran))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_every_operator_runs_forward_and_backward():
    done = python(BLOCKED + EVERY_OPERATOR)
    assert done.returncode == 0, done.stderr
    forward = {"attention", "embedding", "linear", "linear_grpo_loss", "linear_logp", "logp"}
    forward |= {"paged_attention", "rms_norm", "rope", "swiglu"}
    with_backward = {"attention", "embedding", "linear_logp", "logp", "rms_norm", "swiglu"}
    assert set(done.stdout.split()) == forward | {f"{name}_backward" for name in with_backward}


def test_an_import_of_triton_is_noticed():
    done = python(BLOCKED + "import rlk_kernels.matmul.kernels")
    assert done.returncode
    assert "No module named 'triton'" in done.stderr


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    monkeypatch.delenv("RLK_BACKEND", raising=False)
    backend._warn_of_no_triton.cache_clear()
    yield
    backend._warn_of_no_triton.cache_clear()


@pytest.mark.usefixtures("no_triton")
def test_asking_for_triton_says_that_it_is_not_installed_and_how_to_get_it():
    with pytest.raises(
        rk.UnsupportedDevice, match=r"not installed.*pip install 'triton>=3.6,<3.10'"
    ):
        rk.linear(torch.zeros(2, 4), torch.zeros(3, 4), backend="triton")


@pytest.mark.usefixtures("no_triton")
def test_a_gpu_falls_back_to_torch_and_says_so_once(monkeypatch, recwarn):
    monkeypatch.setattr(backend, "runs_triton", lambda device: True)
    for _ in range(3):
        rk.linear(torch.zeros(2, 4), torch.zeros(3, 4))
    assert rk.last_backend("linear") == "torch"
    [said] = [x for x in recwarn if x.category is RuntimeWarning]
    assert "pip install 'triton>=3.6,<3.10'" in str(said.message)
