"""The bits of every public operator are the recorded ones (portable backend, any CPU).

A change of bits is an event: `record("torch", measure("cpu", False))`
of digest_suite.py records new ones, and the CHANGELOG says which operator changed and why.
"""

import digest_suite
import torch
from operator_cases import OPERATORS


def test_the_bits_are_the_recorded_ones(monkeypatch):
    monkeypatch.setenv("RLK_BACKEND", "torch")
    expected = digest_suite.recorded("torch")
    assert len(expected) > 80
    assert digest_suite.differences(digest_suite.measure("cpu", False), expected) == []


def test_every_public_operator_is_in_the_set():
    # One case holds the operators of a sparse layer.
    sparse = {"combine_experts", "group_by_expert", "grouped_linear", "load_balancing_loss"}
    sparse |= {"route", "router_z_loss"}
    # And one those of a gated delta net; what a cache continues is held to it by its own tests.
    delta_net = {"causal_conv1d", "delta_gates", "gated_delta_rule", "gated_rms_norm"}
    delta_net |= {"cached_causal_conv1d", "cached_gated_delta_rule"}
    # The halves of add_lora have those of the whole.
    halves = {"lora_shrink", "lora_expand"}
    # The digests of `sample` have the kept tokens.
    sampled = {"kept_tokens"}
    # Other tests hold these to the operators that have digests (test_norm_rope.py,
    # test_norm_add_norm.py, test_head_linear.py, ops/experts/test_operators.py,
    # ops/test_logits_softcap.py), or to float64 (losses/test_policy.py, ops/test_portable.py).
    elsewhere = {"group_advantages", "norm_rope", "paged_schedule", "grouped_swiglu", "softcap"}
    elsewhere |= {"norm_add_norm", "head_linear"}
    elsewhere |= {"clamped_swiglu", "activation", "layer_norm", "position_scale"}
    elsewhere |= {"paged_latent_attention"}  # one case holds it and latent_attention
    elsewhere |= {"policy_loss", "linear_policy_loss", "dpo_loss"}
    inside = {name.partition("-")[0] for name in digest_suite.recorded("torch")}
    assert (
        inside - {"experts", "delta_net"}
        == OPERATORS - sparse - delta_net - halves - sampled - elsewhere
    )


def test_one_bit_is_seen():
    x = torch.ones(3, 4)
    y = x.clone()
    y.view(torch.int32)[2, 3] ^= 1
    assert digest_suite.digest(x) != digest_suite.digest(y)
    assert digest_suite.digest(x) != digest_suite.digest(x.reshape(4, 3))
    digests = {"linear": {"out": "1", "d_x": "2"}}
    assert digest_suite.differences(digests, {"linear": {"out": "1", "d_x": "3"}}) == [
        "linear: d_x"
    ]
    assert digest_suite.differences({}, digests) == ["linear: d_x", "linear: out"]
