"""The bits of every public operator are the recorded ones (portable backend, any CPU).

A change of bits is an event: `record("torch", measure("cpu", False))`
of digest_suite.py records new ones, and the CHANGELOG says which operator changed and why.
"""

import digest_suite
import rlk_kernels as rk
import torch


def test_the_bits_are_the_recorded_ones(monkeypatch):
    monkeypatch.setenv("RLK_BACKEND", "torch")
    expected = digest_suite.recorded("torch")
    assert len(expected) > 80
    assert digest_suite.differences(digest_suite.measure("cpu", False), expected) == []


def test_every_public_operator_is_in_the_set():
    operators = {"attention", "embedding", "linear", "linear_grpo_loss", "linear_logp", "logp"}
    operators |= {"paged_attention", "rms_norm", "rope", "swiglu", "write_kv_cache"}
    operators |= {"route_corrected"}
    # those of a sparse layer are one case
    sparse = {"combine_experts", "group_by_expert", "grouped_linear", "load_balancing_loss"}
    sparse |= {"route", "router_z_loss"}
    inside = {name.partition("-")[0] for name in digest_suite.recorded("torch")}
    assert operators | {"experts"} == inside
    about = {"backend_calls", "last_backend", "paged_schedule", "reset_backend_calls"}
    about |= {"warm_up", "warm_up_experts", "warm_up_paged_attention"}
    errors = {n for n in rk.__all__ if isinstance(getattr(rk, n), type)}
    # a result among those of linear_grpo_loss, and the bits of rms_norm and rope (test_norm_rope)
    elsewhere = {"group_advantages", "norm_rope"}
    # the bits of grouped_linear and swiglu (ops/experts/test_operators.py)
    elsewhere |= {"grouped_swiglu"}
    # the bits of linear_logp, and terms in float64 (losses/test_policy.py)
    elsewhere |= {"policy_loss", "linear_policy_loss", "dpo_loss"}
    assert set(rk.__all__) - about - errors == operators | sparse | elsewhere


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
