"""A parameter has one digest, on a GPU by a kernel and on a CPU by torch, and a GPU is waited for
once."""

import pytest
import torch

from rlk_align.trace.digest import digest_parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_gpus_digests_are_those_of_a_cpu(dtype):
    made = torch.Generator().manual_seed(0)
    shapes = [(1024, 3072), (1024,), (128,), (1024, 3072), (33, 7), (2, 3, 5), (4001, 1024)]
    named = [(f"{i}", torch.randn(s, generator=made).to(dtype)) for i, s in enumerate(shapes)]
    named[0][1][5, 6] = -0.0
    there = [(name, weight.cuda()) for name, weight in named]
    behind = torch.zeros(1 + 33 * 7, dtype=dtype, device="cuda")
    behind[1:] = there[4][1].flatten()
    expected = digest_parameters(named)
    assert digest_parameters(there) == expected
    assert digest_parameters([("4", behind[1:].view(33, 7))])["4"] == expected["4"]
    there[3][1].view(torch.uint8)[1023, 3071] ^= 1
    found = digest_parameters(there)
    assert [name for name in expected if found[name] != expected[name]] == ["3"]
