"""An H200 that is not there: the launch code runs as on one, and its kernels are compiled.

Tensors have shapes and strides and no memory (torch's meta device), and say that they are on a GPU.
Triton is told to compile for sm_90a, and a launch ends where its kernel is compiled. So signatures,
constants, tiles and options are what the launch code makes of them, whatever it is. What reads a
tensor's values cannot run here, except `torch.equal`, which is true.
"""

import contextlib
import io
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from rlk_kernels import cuda, nvrtc
from rlk_kernels.errors import KernelFailed
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

GPU = torch.device("cuda", 0)
PROCESSORS = 132


class _OnGPU(torch.Tensor):
    """A tensor of torch's meta device that says it is on GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return GPU

    def data_ptr(self):
        return self.storage_offset() * self.element_size()  # as aligned as allocated memory


PLAIN = (int, float, str, torch.dtype, torch.device, torch.Size, type(None))


def _as(kind: type, tree):
    def one(x):
        return x.as_subclass(kind) if x.is_meta else x

    if isinstance(tree, PLAIN):  # most of what torch is asked for
        return tree
    return one(tree) if isinstance(tree, torch.Tensor) else tree_map_only(torch.Tensor, one, tree)


def _on_meta(x):
    if isinstance(x, str | torch.device) and str(x).startswith("cuda"):
        return "meta"
    return x


class _Functions(TorchFunctionMode):
    """What is made on GPU is made on the meta device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.equal:
            return True
        args = [_on_meta(x) for x in args]
        kwargs = {name: _on_meta(x) for name, x in (kwargs or {}).items()}
        return _as(_OnGPU, func(*args, **kwargs))


class _Operators(TorchDispatchMode):
    """Custom operators run as on a GPU; for tensors of the meta device torch would ask for shapes
    alone."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "rlk":
            return func(*_as(torch.Tensor, args), **_as(torch.Tensor, kwargs))
        with torch._C._EnableTorchFunction(), _Functions(), self:
            return OPDEFS[func._schema.name]._init_fn(*_as(_OnGPU, args), **_as(_OnGPU, kwargs))


class _Driver:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One variant of a kernel."""

    kernel: str
    call: str
    """The first that launched it."""
    gluon: bool
    seconds: float
    error: str = ""
    """Why it does not compile; the numbers are 0 then."""
    registers: int = 0
    spills: int = 0
    """Bytes that ptxas stores to local memory and loads, for want of registers."""
    shared: int = 0
    """Bytes of shared memory that Triton takes."""
    wgmma: int = 0
    """wgmma.mma_async instructions in the PTX of Triton's."""
    narrow: bool = False
    """Whether it has a product of fewer than the 64 rows that wgmma takes."""
    serialized: bool = False
    """Whether ptxas makes each of them wait for the one before it, and says so."""
    ptx: str = field(default="", repr=False)
    summed: tuple[str, ...] = field(default=(), repr=False)
    """How threads hold each tile that a reduction takes: shape, type and layout. The order of a sum
    follows from that."""
    unused_barriers: int = 0
    """Barriers that are set up and not used."""


def _message(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"


def _said(log: str) -> dict[str, int | bool]:
    """By ptxas."""
    return {
        "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "serialized": "Potential Performance Loss" in log,
    }


def _narrow(ttgir: str) -> bool:
    return any(int(rows) < 64 for rows in re.findall(r"tt\.dot .*? : tensor<(\d+)x", ttgir))


def _summed(ttgir: str) -> tuple[str, ...]:
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    tiles = re.findall(r'"tt\.reduce"\(.*?\}\) : \(tensor<(\w+), (#\w+)>', ttgir, re.DOTALL)
    return tuple(f"{tile} {layouts[layout]}" for tile, layout in tiles)


def _unused_barriers(ttgir: str) -> int:
    """Barriers that are set up, and neither waited for nor given to a group of warps. Their memory
    is a tile's too."""
    slots = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    begun = {slots.get(x, x) for x in re.findall(r"init_barrier (%\w+)", ttgir)}
    used = {slots.get(x, x) for x in re.findall(r"wait_barrier (%\w+)", ttgir)}
    for given in re.findall(r"warp_specialize\((.*?)\)", ttgir):
        used |= set(re.findall(r"%\w+", given))
    return len(begun - used)


@dataclass
class Launches:
    """What was launched, and compiled for that."""

    compiled: list[Compiled] = field(default_factory=list)
    call: str = ""
    """The one that runs."""
    compiling: bool = True
    """False: launches do nothing."""
    once: bool = False
    """True: so does a launch of a kernel that there was, also of another variant."""
    kernels: set[str] = field(default_factory=set)
    """Those that there were."""
    sources: set[nvrtc.Source] = field(default_factory=set)
    """Those of kernels in CUDA C++ that there were."""

    def launch_cuda(self, seen: dict, source: nvrtc.Source, *_) -> None:
        """Instead of `cuda.launch`."""
        name = f"{source.entry}.cu"
        if not self.compiling or source in self.sources or (self.once and name in self.kernels):
            return
        self.kernels.add(name)
        self.sources.add(source)
        start = time.process_time()
        told = source._replace(options=(*source.options, "--ptxas-options=-v"))
        record = {"kernel": name, "call": self.call, "gluon": False}
        try:
            _, log = nvrtc.compile_source(told)
        except KernelFailed as error:
            failed = Compiled(**record, seconds=time.process_time() - start, error=_message(error))
            self.compiled.append(failed)
            return
        self.compiled.append(
            Compiled(**record, **_said(log), seconds=time.process_time() - start, ptx=source.text)
        )

    def launch(self, run, kernel: JITFunction, arguments: tuple, options: dict) -> None:
        if not self.compiling or (self.once and kernel.__name__ in self.kernels):
            return
        self.kernels.add(kernel.__name__)
        log, start = io.StringIO(), time.process_time()
        record = {"kernel": kernel.__name__, "call": self.call, "gluon": kernel.is_gluon()}
        try:
            with contextlib.redirect_stdout(log):
                made = run(kernel, *arguments, **{**options, "warmup": True})
        except Exception as error:  # of any kind: the table names it
            failed = Compiled(**record, seconds=time.process_time() - start, error=_message(error))
            self.compiled.append(failed)
            return
        if not log.getvalue():  # a variant that there was
            return
        self.compiled.append(
            Compiled(
                **record,
                **_said(log.getvalue()),
                seconds=time.process_time() - start,
                shared=made.metadata.shared,
                wgmma=made.asm["ptx"].count("wgmma.mma_async"),
                narrow=_narrow(made.asm.get("ttgir", "")),
                ptx=made.asm["ptx"],
                summed=_summed(made.asm.get("ttgir", "")),
                unused_barriers=_unused_barriers(made.asm.get("ttgir", "")),
            )
        )


@contextlib.contextmanager
def h200() -> Iterator[Launches]:
    """While it lasts, tensors of device "cuda" are on the H200 that is not there."""
    launches, run = Launches(), JITFunction.run

    def launch(kernel, *arguments, **options):
        launches.launch(run, kernel, arguments, options)

    properties = SimpleNamespace(multi_processor_count=PROCESSORS, name="H200, not there")
    driver.set_active(_Driver())
    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(cuda, "launch", launches.launch_cuda),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
        mock.patch.object(triton.knobs.compilation, "always_compile", True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        # each launch is to be told of by itself
        mock.patch(
            "rlk_kernels.matmul.self_check.compiled_ahead",
            return_value=contextlib.nullcontext(False),
        ),
        _Functions(),
        _Operators(),
    ):
        yield launches
