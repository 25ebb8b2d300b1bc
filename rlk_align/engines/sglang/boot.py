"""What SGLang needs before it is imported: on a CPU the choice of its CPU engine, and stand-ins for
two packages that it imports and does not call there."""

import os

from rlk_align.engines.common.stand_ins import TORCHVISION, stand_in
from rlk_align.engines.sglang.info import SGLANG

_PARTS = {
    "torchvision": TORCHVISION,
    "sgl_kernel": ("kvcacheio", "mamba"),
}
"""Stand-in -> the modules in it that SGLang imports."""


def prepare(device: str, raw: bool, ranks: int = 1) -> tuple[str, ...]:
    """Sets up this process for `import sglang` on a device, and returns the names of the stand-ins.

    `raw`: whether log-probs of sampled tokens are those of the raw distribution; `ranks`: the
    number of tensor-parallel ranks.

    PyPI's torchvision is built for CUDA and cannot be loaded beside a CPU build of torch, and the
    kernels for CPUs, `sgl_kernel`, are not on PyPI: without them SGLang computes with torch.
    """
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1" if raw else "0"
    if device != "cpu":
        return ()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang binds each rank to its own NUMA node, and a small machine has too few.
    cores = os.cpu_count() or 1
    bound = "|".join(str(rank % cores) for rank in range(ranks))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound if ranks > 1 else "all")
    return stand_in({name: _PARTS[name] for name in SGLANG.stand_ins})
