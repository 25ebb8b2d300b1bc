"""Faults of gated delta nets."""

from rlk_align.selftest.faults.fault import Fault, Strength

_ENGINES = ("hf", "vllm")
_DELTA, _CONV = ("layers.1.delta",), ("layers.1.conv",)

DELTA_NETS = {
    "conv-late": Fault(
        _CONV,
        "the convolution's rows are those of the token before",
        "delta_net:one_token_late",
        engines=_ENGINES,
        needs="variant",
    ),
    "conv-not-reset": Fault(
        _CONV,
        "the convolution sees the previous sequence across a boundary",
        "delta_net:window_of_another",
        engines=_ENGINES,
        needs="variant",
    ),
    "delta-not-reset": Fault(
        _DELTA,
        "a sequence begins with the state of the previous one, as across a packed boundary",
        "delta_net:not_reset",
        engines=_ENGINES,
        needs="variant",
    ),
    "delta-stale": Fault(
        _DELTA,
        "a sequence begins with the state that another request left",
        "delta_net:stale",
        engines=_ENGINES,
        needs="variant",
    ),
    "delta-loses-token": Fault(
        _DELTA,
        "the second part of a sequence begins with a state that lacks a token",
        "delta_net:boundary_loses_a_token",
        engines=_ENGINES,
        needs="variant",
    ),
    "delta-padding": Fault(
        _DELTA,
        "rows of padding decay the state",
        "delta_net:padding_decays",
        Strength("rows of padding", 3.0, (1.0, 3.0, 10.0)),
        engines=_ENGINES,
        needs="variant",
    ),
    "delta-sums-bf16": Fault(
        _DELTA,
        "the sums of the logarithms of decays are kept in bf16",
        "delta_net:sums_in_bf16",
        engines=_ENGINES,
        needs="variant",
    ),
    "decay-a-bf16": Fault(
        ("layers.1.decay",),
        "exp(A_log) is rounded to bf16, as Megatron-core computes it",
        "state_space:rounded_to_bf16",
        engines=_ENGINES,
        not_beside_kernels=dict.fromkeys(
            _ENGINES, "the kernels round A_log to the model's dtype themselves"
        ),
        needs="variant",
    ),
    "delta-decay-bf16": Fault(
        _DELTA,
        "the decays exp(g) are rounded to bf16",
        "delta_net:decays_in_bf16",
        engines=_ENGINES,
        needs="variant",
        expected="rounding",
    ),
    "delta-state-bf16": Fault(
        _DELTA,
        "the state is kept in bf16 between steps of decode",
        "delta_net:state_in_bf16",
        engines=_ENGINES,
        needs="variant",
        expected="rounding",
        decode=True,
    ),
    "delta-restored-fp8": Fault(
        _DELTA,
        "a prefill goes on from a cached prefix or an earlier chunk with a state kept in fp8",
        "delta_net:restored_from_fp8",
        engines=("vllm:max_num_batched_tokens=64,max_num_seqs=2",),
        needs="variant",
    ),
    "gate-before-norm": Fault(
        ("layers.1.gated_norm",),
        "the gate is multiplied before the norm",
        "delta_net:gate_before_norm",
        engines=_ENGINES,
        needs="variant",
    ),
}
