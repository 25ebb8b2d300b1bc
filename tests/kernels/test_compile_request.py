"""How other processes are told which kernels they compile."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton.language as tl
from rlk_kernels import private_api
from rlk_kernels.compile_request import from_text, to_text
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def test_text_holds_what_a_kernel_is_made_from() -> None:
    target = GPUTarget("cuda", 90, 32)
    values = (
        {"x": "*bf16", "grid": ("i32", "constexpr")},
        {(2,): None, (3,): 1e-6, (4,): True, (5,): tl.bfloat16},
        [["tt.divisibility", 16]],
        target,
        ASTSource,
    )
    assert from_text(to_text(*values)) == list(values)
    [constant] = from_text(to_text(tl.constexpr(7)))
    assert type(constant) is tl.constexpr
    assert constant.value == 7


@pytest.mark.parametrize("value", [object(), Path("/"), print, lambda: 0, {1, 2}])
def test_what_cannot_be_written_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be written"):
        to_text(value)


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": ["os", "system"]}]',
        '[{"instance": [["subprocess", "Popen"], "ls"]}]',
        '[{"x": 1}]',
    ],
)
def test_no_other_name_is_read(text: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        from_text(text)


def test_a_function_of_another_form_is_left_to_its_thread() -> None:
    assert private_api.asked_to_compile(len) is None
    assert private_api.asked_to_compile(lambda: 0) is None
