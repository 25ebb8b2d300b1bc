"""The start of a kernel that may overlap the end of its predecessor (`DeviceFacts.overlaps`)."""

import triton
import triton.language as tl


@triton.jit
def begin_overlapped(OVERLAP: tl.constexpr):
    """Wait for all writes of the predecessor, and allow the successor to start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
