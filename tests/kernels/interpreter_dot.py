"""A dot for Triton's CPU interpreter that adds front to back, as a tensor core does.

The interpreter hands `tl.dot` to NumPy's BLAS, where the bits of a row depend on its place in the
tile, and which returns garbage for bf16. That is a property of the interpreter, not of a kernel;
with it in place the interpreter could not show batch invariance. This dot adds the products of an
element one by one in fp32.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _float32(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = _float32(a), _float32(b)
    total = d.data.astype(np.float32)
    for k in range(left.shape[-1]):
        total = total + left[:, k : k + 1] * right[k : k + 1, :]
    return TensorHandle(total, d.dtype.scalar)


def install() -> None:
    InterpreterBuilder.create_dot = create_dot
