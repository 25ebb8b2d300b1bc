"""Faults of state-space models (Mamba-2)."""

from rlk_align.selftest.faults.fault import Fault, Strength

_ENGINES = ("hf", "vllm")
_SCAN, _NORM = ("layers.1.scan",), ("layers.1.mamba_norm",)

STATE_SPACES = {
    "scan-not-reset": Fault(
        _SCAN,
        "a sequence begins with the state of the previous one, as across a packed boundary",
        "delta_net:not_reset",
        engines=_ENGINES,
        needs="variant",
    ),
    "scan-stale": Fault(
        _SCAN,
        "a sequence begins with the state that another request left",
        "delta_net:stale",
        engines=_ENGINES,
        needs="variant",
    ),
    "scan-loses-token": Fault(
        _SCAN,
        "the second part of a sequence begins with a state that lacks a token",
        "delta_net:boundary_loses_a_token",
        engines=_ENGINES,
        needs="variant",
    ),
    "scan-padding": Fault(
        _SCAN,
        "rows of padding decay the state",
        "delta_net:padding_decays",
        Strength("rows of padding", 3.0, (1.0, 3.0, 10.0)),
        engines=_ENGINES,
        needs="variant",
    ),
    "dt-bias-dropped": Fault(
        ("layers.1.dt",),
        "the bias of dt is left out",
        "state_space:left_out",
        engines=_ENGINES,
        needs="variant",
        also_at=_SCAN,
    ),
    "a-bf16": Fault(
        ("layers.1.dt_a",),
        "A is rounded to bf16",
        "state_space:rounded_to_bf16",
        engines=_ENGINES,
        needs="variant",
    ),
    "norm-before-gate": Fault(
        _NORM,
        "the output is normed before it is multiplied by the gate",
        "state_space:norm_before_gate",
        engines=_ENGINES,
        needs="variant",
    ),
    "norm-by-group": Fault(
        _NORM,
        "each half of the features is normed alone",
        "state_space:norm_by_group",
        engines=_ENGINES,
        needs="variant",
    ),
}
