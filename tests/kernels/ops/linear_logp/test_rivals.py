"""The rivals' own test cases for this operator pass on ours (the large ones: tests/gpu)."""

import pytest
import rlk_kernels as rk
import torch
from rival_cases import CCE, CCE_SHAPES, LIGER, LIGER_LARGE, cut_cross_entropy, liger, verl


def ours(hidden, weight, target, bias, temperature, softcap):
    return rk.linear_logp(
        hidden, weight, target, bias=bias, temperature=temperature, softcap=softcap,
        return_entropy=True,
    )  # fmt: skip


def coarse(hidden, weight, target, bias, temperature, softcap):
    """The control group: operands rounded to 8 bits of significand or fewer."""
    rounded = [(x * 16).round() / 16 + (x - x.detach()) for x in (hidden, weight)]
    return ours(*rounded, target, bias, temperature, softcap)


@pytest.mark.parametrize("spec", LIGER)
def test_ligers(spec):
    assert liger(ours, spec, "cpu")
    assert not liger(coarse, spec, "cpu")


def test_ligers_bf16_case_at_an_eighth_of_its_size():
    """It expects logits rounded to bf16; exact ones are too far from its reference."""

    def run(short):
        def call(hidden, weight, target, bias, temperature, softcap):
            return rk.linear_logp(
                hidden, weight, target, temperature=temperature, return_entropy=True,
                logit_dtype=hidden.dtype if short else torch.float32,
            )  # fmt: skip

        return call

    _, h, v, *rest = LIGER_LARGE[0]
    assert liger(run(True), (65, h, v // 16, *rest), "cpu")
    assert not liger(run(False), (65, h, v // 16, *rest), "cpu")


@pytest.mark.parametrize(("dtype", "limit"), CCE)
@pytest.mark.parametrize("shape", CCE_SHAPES[1:])
def test_cut_cross_entropys(shape, dtype, limit):
    for softcap, bias in ((None, False), (20.0, True)):
        assert cut_cross_entropy(ours, shape, dtype, limit, softcap, bias, "cpu")
    assert not cut_cross_entropy(coarse, shape, torch.float32, 1e-5, None, False, "cpu")


def test_verls_at_a_fiftieth_of_its_size():
    assert verl(ours, (41, 256, 1521), "cpu")
    assert not verl(coarse, (41, 256, 1521), "cpu")
