"""Plans for tests: made anew at each call, for devices that are not there."""

from rlk_kernels.device import DeviceFacts
from rlk_kernels.losses.linear_grpo import plan as linear_grpo
from rlk_kernels.matmul import plan as matmul
from rlk_kernels.matmul import product
from rlk_kernels.matmul.accumulate import plan as accumulate
from rlk_kernels.ops.attention import backward as attention_backward
from rlk_kernels.ops.attention import forward as attention
from rlk_kernels.ops.linear_logp import launch as linear_logp_launch
from rlk_kernels.ops.linear_logp import plan as linear_logp

H200 = DeviceFacts(
    interpreted=False, processors=132, tma=True, overlaps=True, gluon=True, cuda=True
)
CACHED = {
    attention: ("shape_cache",),
    attention_backward: ("shape_cache",),
    product: ("shape_cache",),
    matmul: ("plan_product", "plan_epilogue"),
    accumulate: ("plan_accumulate",),
    linear_logp_launch: ("shape_cache",),
    linear_logp: ("plan_forward", "plan_backward", "plan_epilogue"),
    linear_grpo: ("plan_loss",),
}


def uncached(monkeypatch) -> None:
    """A test may change what plans are made from, at any time."""
    for module, names in CACHED.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
