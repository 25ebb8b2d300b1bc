"""The errors of rlk_kernels. Every class derives from `KernelError` and from the built-in that a
caller would expect, so that `except ValueError` works.

KernelError
├── UnknownBackend      (ValueError)    a backend name that does not exist
├── UnsupportedDevice   (RuntimeError)  the requested backend cannot run here, or several devices
├── KernelFailed        (RuntimeError)  a kernel cannot be compiled or launched
├── RankMissing         (RuntimeError)  a rank did not join a collective in time
├── UnsupportedDtype    (TypeError)     the operator does not support a dtype, or a mix of dtypes
└── UnsupportedShape    (ValueError)    shapes do not fit together, or are out of range

Strides never raise: an operator reads any strides, or copies first if its docstring says so.
"""


class KernelError(Exception):
    """Root of the tree."""


class UnknownBackend(KernelError, ValueError):
    """The backend name is neither "triton" nor "torch"."""


class UnsupportedDevice(KernelError, RuntimeError):
    """The requested backend cannot run on the tensors' device, or they are on several."""


class KernelFailed(KernelError, RuntimeError):
    """A kernel in CUDA C++ cannot be compiled or launched, because of a fault in this package, its
    installation, or an earlier kernel."""


class RankMissing(KernelError, RuntimeError):
    """A rank did not join a collective within the time limit: it has ended or runs other code."""


class UnsupportedDtype(KernelError, TypeError):
    """The operator does not support this dtype, or these dtypes together."""


class UnsupportedShape(KernelError, ValueError):
    """Shapes do not fit together, or are out of the operator's range."""
