"""What the integrations raise."""

from rlk_kernels.errors import KernelError


class NotServed(KernelError, ValueError):
    """A model or a setting has no kernel here, and would silently run without one."""
