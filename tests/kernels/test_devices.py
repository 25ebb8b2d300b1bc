"""Every tensor of every operator is looked at before a kernel is launched by addresses."""

from collections.abc import Callable
from typing import Any

import pytest
import rlk_kernels as rk
import torch

LONG, INT = torch.int64, torch.int32


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def zeros(*shape: int, dtype: torch.dtype = LONG) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


X, W, IDS, CU = rand(4, 8), rand(6, 8), zeros(4), torch.tensor([0, 4], dtype=INT)
Q, K = rand(4, 2, 8), rand(4, 1, 8)
PAGED = (Q, rand(3, 4, 1, 8), rand(3, 4, 1, 8), zeros(1, 3, dtype=INT), torch.full((1,), 4).int())
SINKS = {"sinks": rand(2)}
PER_TOKEN = rand(1, 4), torch.ones(1), torch.ones(1, 4)
CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "linear": (rk.linear, (X, W, rand(6)), {}),
    "linear, out": (rk.linear, (X, W), {"out": rand(4, 6)}),
    "linear, main_grad": (rk.linear, (X, W), {"main_grad": rand(6, 8)}),
    "rms_norm": (rk.rms_norm, (X, rand(8)), {"eps": 1e-6, "residual": X.clone()}),
    "rope": (rk.rope, (Q, K, IDS), {"inv_freq": rand(4), "scaling": rand(1)}),
    "norm_rope": (
        rk.norm_rope, (Q, K, rand(8), rand(8), IDS),
        {"inv_freq": rand(4), "scaling": rand(1), "eps": 1e-6},
    ),
    "swiglu": (rk.swiglu, (X, X.clone()), {}),
    "embedding": (rk.embedding, (IDS, W), {}),
    "write_kv_cache": (rk.write_kv_cache, (K, K.clone(), *PAGED[1:3], IDS), {}),
    "attention": (rk.attention, (Q, K, K.clone(), CU, CU.clone()), SINKS),
    "paged_attention": (
        rk.paged_attention, PAGED, {"cu_seqlens_q": CU, "out": torch.empty_like(Q), **SINKS}
    ),
    "paged_schedule": (rk.paged_schedule, PAGED, {"cu_seqlens_q": CU}),
    "logp": (rk.logp, (X, IDS), {"token_ids": zeros(4, 2)}),
    "linear_logp": (rk.linear_logp, (X, W, IDS), {"bias": rand(6), "token_ids": zeros(4, 2)}),
    "linear_grpo_loss": (
        rk.linear_grpo_loss, (X[None], W, IDS[None], *PER_TOKEN),
        {"ref_logp": rand(1, 4), "bias": rand(6)},
    ),
    "linear_grpo_loss, packed": (
        rk.linear_grpo_loss, (X, W, IDS, rand(4), rand(4), torch.ones(4)), {"cu_seqlens": CU}
    ),
}  # fmt: skip
CASES = [
    (name, which)
    for name, (_, tensors, options) in CALLS.items()
    for which in (*range(len(tensors)), *(k for k, x in options.items() if torch.is_tensor(x)))
]


def run(name: str, which: object = None) -> object:
    """The call, with one of its tensors on another device."""
    operator, tensors, options = CALLS[name]
    moved = [x.to("meta") if i == which else x for i, x in enumerate(tensors)]
    with torch.no_grad():
        return operator(
            *moved, **{k: x.to("meta") if k == which else x for k, x in options.items()}
        )


@pytest.mark.parametrize("name", CALLS)
def test_on_one_device_each_runs(name: str) -> None:
    run(name)


@pytest.mark.parametrize(("name", "which"), CASES)
def test_a_tensor_on_another_device_is_refused(name: str, which: object) -> None:
    with pytest.raises(rk.UnsupportedDevice, match="meta"):
        run(name, which)
