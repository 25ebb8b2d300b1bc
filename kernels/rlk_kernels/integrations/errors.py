"""The error of the integrations."""

from rlk_kernels.errors import KernelError


class NotSupported(KernelError, ValueError):
    """A model or a setting has no kernel, and would run without one silently."""
