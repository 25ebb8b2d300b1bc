"""What the integrations raise."""

from rlk_kernels.errors import KernelError


class NotServed(KernelError, ValueError):
    """An engine's model or setting has no kernel here, and would silently run without one."""
