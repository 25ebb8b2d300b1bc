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
from operator_cases import CASES, differentiable

for name, case in CASES.items():
    leaves = {where: x.clone().requires_grad_() for where, x in case.leaves().items()}
    outputs = differentiable(case.run(leaves if case.gradient else {}))
    assert bool(outputs) == case.gradient, name
    if outputs:
        ups = [torch.ones_like(x) for x in outputs]
        grads = torch.autograd.grad(outputs, list(leaves.values()), ups, allow_unused=True)
        assert all(bool(x.isfinite().all()) for x in grads if x is not None), name
        lacking = {where for where, x in zip(leaves, grads) if x is None}
        lacking -= {"inv_freq", "scaling", "scales"}
        constants = "loss" in name or name == "route_corrected"  # old log-probs, a correction
        assert grads[0] is not None and (constants or not lacking), (name, lacking)
assert {backend for _, backend in rk.backend_calls()} == {"torch"}
assert rk.warm_up("cpu")
assert "triton" not in sys.modules
print(*sorted({name for name, _ in rk.backend_calls()}))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": f"{ROOT / 'kernels'}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_every_operator_runs_forward_and_backward():
    done = python(BLOCKED + EVERY_OPERATOR)
    assert done.returncode == 0, done.stderr
    forward = {"attention", "combine_experts", "embedding", "group_by_expert", "grouped_linear"}
    forward |= {"grouped_swiglu", "linear", "linear_grpo_loss", "linear_logp", "logp", "norm_rope"}
    forward |= {"load_balancing_loss", "paged_attention", "rms_norm", "rope", "route"}
    forward |= {"route_corrected", "router_z_loss", "softcap", "sum_slots", "swiglu"}
    forward |= {
        "norm_add_norm",
        "write_kv_cache",
        "clamped_swiglu",
        "activation",
        "layer_norm",
        "position_scale",
    }
    forward |= {
        "sample",
        "linear_sample",
        "kept_tokens",
        "cached_causal_conv1d",
        "cached_gated_delta_rule",
        "lora_shrink",
        "lora_expand",
    }
    with_backward = {"attention", "combine_experts", "embedding", "linear_logp", "logp", "rms_norm"}
    with_backward |= {"route", "route_corrected", "softcap", "swiglu", "clamped_swiglu"}
    with_backward |= {"activation", "layer_norm", "latent_attention"}
    forward |= {"latent_attention", "paged_latent_attention", "head_linear"}
    forward |= {"add_lora_backward"}
    delta_net = {"causal_conv1d", "delta_gates", "gated_delta_rule", "gated_rms_norm"}
    forward, with_backward = forward | delta_net, with_backward | delta_net
    assert set(done.stdout.split()) == forward | {f"{name}_backward" for name in with_backward}


def test_an_import_of_triton_is_noticed():
    done = python(BLOCKED + "import triton")
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
