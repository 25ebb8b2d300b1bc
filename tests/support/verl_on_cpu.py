"""verl without an accelerator: VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_on_cpu, by which
verl is told of platforms that it does not bring. Only tests use it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import verl.utils.import_utils
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY = 8 << 30


def nothing(*_: Any, **__: Any) -> int:
    return 0


DEVICE = SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
    get_device_name=lambda *_: "cpu", mem_get_info=lambda *_: (MEMORY, 2 * MEMORY),
    get_device_properties=lambda *_: SimpleNamespace(name="cpu", total_memory=2 * MEMORY),
    memory_stats=lambda *_: {}, manual_seed=torch.manual_seed, manual_seed_all=torch.manual_seed,
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect"), nothing),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "reset_peak_memory_stats"), nothing),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), nothing),
)  # fmt: skip
"""Instead of torch.cuda."""


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # what verl moves models and tensors to

    def device_count(self) -> int:
        return 1

    set_device = synchronize = empty_cache = set_allocator_settings = nothing
    profiler_start = profiler_stop = nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def get_device_capability(self, *_: Any) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, _message: str) -> Any:
        return nullcontext()

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


# verl asks for a backend of the CPU and for one of the device, which torch refuses for one device.
join = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, *args: Any, **more: Any) -> None:
    join("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **more)


torch.distributed.init_process_group = init_process_group

# verl 0.9.1 imports a class that TRL 1.16 no longer has, wherever TRL is installed.
verl.utils.import_utils.is_trl_available = lambda: False
