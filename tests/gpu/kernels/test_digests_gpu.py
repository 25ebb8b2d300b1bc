"""The bits of every public operator on an H200 are the recorded ones.

Parts, for as many processes: most of the time goes into compiling.
"""

import digest_suite
import pytest
import torch

PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_the_bits_are_the_recorded_ones(part):
    name = torch.cuda.get_device_name()
    if "H200" not in name:
        pytest.skip(f"the digests were recorded on an H200; this is {name}")
    digests = digest_suite.measure("cuda", True, part, PARTS)
    assert digests
    recorded = digest_suite.recorded("triton")
    expected = {name: recorded.get(name, {}) for name in digests}
    assert digest_suite.differences(digests, expected) == []
