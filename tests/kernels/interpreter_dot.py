"""Triton's CPU interpreter for tests: a dot that adds front to back, as a tensor core does, a
language that is patched once a launch, types that are looked up once, and overflow that is noticed.

The interpreter hands `tl.dot` to NumPy's BLAS, where the bits of a row depend on its place in the
tile, and which returns garbage for bf16. That is a property of the interpreter, not of a kernel;
with it in place the interpreter could not show batch invariance. This dot adds the products of an
element one by one in fp32; those of fp32 numbers by multiply-adds, as `tl.fma` has them.

A reduction by a kernel's own function it makes element by element in Python: here it combines whole
slices, front to back as well, which is the same numbers.

It also patches all of `triton.language` again for each call of one jitted function by another,
though the launch has patched it: a quarter of the time of these tests. And it makes a table of all
dtypes for each array, a tuple of its shape for each tensor, and a name for each type of a block:
a type's name says all that these follow from. And it computes whether each operation on whole
numbers overflows, by ten others, and tells nobody. All of that was more than half of what is left.
Of what is left after that, a third was four calls for one of a function of the language, looks for
constants in what is none, and sizes of arrays that NumPy has just made.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _float32(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = _float32(a), _float32(b)
    total = d.data.astype(np.float32)
    if a.dtype.scalar == tl.float32:  # without a tensor core, by multiply-adds
        sums = TensorHandle(total, d.dtype.scalar)
        for k in range(left.shape[-1]):
            column, row = left[:, k : k + 1], right[k : k + 1, :]
            pair = (TensorHandle(x, a.dtype.scalar) for x in (column, row))
            sums = self.create_fma(*pair, sums)
        return sums
    products = np.empty_like(total)
    for k in range(left.shape[-1]):
        np.multiply(left[:, k : k + 1], right[k : k + 1, :], out=products)
        total += products
    return TensorHandle(total, d.dtype.scalar)


def patched_once(patch_lang):
    """`patch_lang` that does nothing where this launch has patched what `fn` sees."""
    patched: set[int] = set()

    def patch(fn):
        languages = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core}
        if patched and languages <= patched:
            return None  # the call of one jitted function by another: nobody restores it
        scope, first = patch_lang(fn), not patched
        patched.update(languages)
        if first:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch


def by_slices(generic_reduce):
    """`generic_reduce` along one axis, which combines all elements of a slice at once."""

    def reduce(self, inputs):
        if self.axis is None or self.keep_dims or inputs[0].handle.data.ndim < 2:
            return generic_reduce(self, inputs)
        slices = zip(*(np.moveaxis(x.handle.data, self.axis, 0) for x in inputs), strict=True)
        total = None
        for values in slices:
            here = [self.to_tensor(a, x.dtype) for a, x in zip(values, inputs, strict=True)]
            if total is not None:
                combined = self.combine_fn.fn(*total, *here)
                parts = combined if isinstance(combined, tuple | tl.tuple) else (combined,)
                pairs = zip(parts, inputs, strict=True)
                here = [self.to_tensor(part.handle.data, x.dtype) for part, x in pairs]
            total = here
        return total

    return reduce


def by_name(np_dtype):
    """`_get_np_dtype`, asked once for each type."""
    known: dict[str, Any] = {}

    def find(tt_dtype):
        if tt_dtype.name not in known:
            known[tt_dtype.name] = np_dtype(tt_dtype)
        return known[tt_dtype.name]

    return find


def shaped_once(init):
    """`tensor.__init__`, whose shape and size are made once for each type."""
    known: dict[str, dict[str, Any]] = {}

    def make(self, handle, type):
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = {"numel": self.numel, "shape": self.shape}
        self.__dict__.update(known[type.name])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return make


def named_once(init):
    """`block_type.__init__`, whose name is made once for each element type and shape."""
    known: dict[tuple, dict[str, Any]] = {}

    def make(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = {k: v for k, v in vars(self).items() if k != "element_ty"}
        self.element_ty = element_ty
        self.__dict__.update(known[key])

    return make


def called_directly(obj, name, member, builder, scope):
    """`_patch_attr`, without the wrapper that asks whether `_semantic` is passed."""
    function = getattr(member, "__wrapped__", member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def unwrapped_where_wrapped(unwrap):
    """`_unwrap_if_constexpr`, which looks three times at a tensor or a number."""
    plain = (tl.tensor, int, float, bool, str, tl.dtype, type(None))

    def find(o):
        return o if type(o) in plain else unwrap(o)

    return find


def of_one_name(equal):
    """`dtype.__eq__`, which is asked mostly of a type itself."""
    return lambda self, other: self is other or equal(self, other)


WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def overflow_at_once(check):
    """`binary_op_sanitize_overflow_impl` in NumPy, which asserts what that only computes."""

    def look(self, lhs, rhs, binary_op):
        a, b = lhs.handle.data, rhs.handle.data
        if not self.builder.options.sanitize_overflow or a.dtype.kind not in "iu":
            return check(self, lhs, rhs, binary_op)
        if a.dtype.itemsize < 8:
            exact = WIDE[binary_op.__name__](a.astype(np.int64), b.astype(np.int64))
            limits = np.iinfo(a.dtype)
            fits = limits.min <= exact.min() and exact.max() <= limits.max
            assert fits, f"{a.dtype} overflow detected for operation {binary_op.__name__}"

    return look


def broadcast_where_shapes_differ(broadcast):
    """`broadcast_impl_value`, which looks long at two operands of one shape and returns them."""

    def look(self, lhs, rhs):
        alike = lhs.type.is_block() == rhs.type.is_block()
        if alike and lhs.handle.data.shape == rhs.handle.data.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return look


def typed_once(computation_type):
    """`computation_type_impl`, asked once for each pair of types."""
    known: dict[tuple, Any] = {}

    def find(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    return find


def install() -> None:
    InterpreterBuilder.create_dot = create_dot
    TensorHandle.__post_init__ = lambda handle: None
    interpreter.ReduceOps.generic_reduce = by_slices(interpreter.ReduceOps.generic_reduce)
    interpreter._patch_attr = called_directly
    tl.core._unwrap_if_constexpr = unwrapped_where_wrapped(tl.core._unwrap_if_constexpr)
    tl.dtype.__eq__ = of_one_name(tl.dtype.__eq__)
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    tl.tensor.__init__ = shaped_once(tl.tensor.__init__)
    tl.block_type.__init__ = named_once(tl.block_type.__init__)
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_sanitize_overflow_impl
    semantic.binary_op_sanitize_overflow_impl = overflow_at_once(check)
    semantic.broadcast_impl_value = broadcast_where_shapes_differ(semantic.broadcast_impl_value)
    semantic.computation_type_impl = typed_once(semantic.computation_type_impl)
