"""Faults of sparse layers."""

from rlk_align.selftest.faults.fault import Fault

ROUTING = {
    "router-bf16": Fault(
        ("layers.2.router",),
        "the product of a float32 router is computed in bf16",
        "linear:bf16_product",
        both="dtype=float32",
    ),
    "expert-flipped": Fault(
        ("layers.2.experts",),
        "every fifth row's last expert is the one that its router likes least",
        "sparse:least_liked",
        kind="sparse",
    ),
    "expert-tie": Fault(
        ("layers.2.experts",),
        "of experts whose logits tie the other is chosen",
        "sparse:other_of_ties",
        kind="sparse",
        expected="rounding",
        needs="ties",
    ),
    "expert-weights-unnormalised": Fault(
        ("layers.2.routing_weights",),
        "the weights of a row's experts do not add up to 1",
        "sparse:over_all_experts",
        kind="sparse",
    ),
    "expert-weight-early": Fault(
        ("layers.2.act", "layers.2.moe_out"),
        "an expert's weight multiplies its gate, before the activation, and not its row",
        "sparse:weighed_before_activation",
        engines=("hf:experts=grouped_mm",),
        both="experts=grouped_mm",
        kind="sparse",
    ),
    "expert-token-dropped": Fault(
        ("layers.2.moe_out",),
        "every seventh row is dropped, as by experts that are full",
        "sparse:every_seventh_dropped",
    ),
    "expert-missing": Fault(
        ("layers.2.moe_out",),
        "one expert's rows are missing from the sums, as where its rank adds nothing",
        "sparse:one_left_out",
        kind="sparse",
    ),
    "shared-gate-left-out": Fault(
        ("layers.2.moe_out",),
        "the shared expert's row is added without its gate",
        "sparse:shared_gate_left_out",
        kind="sparse",
        needs="variant",
        operator="moe_out_gated",
    ),
    "experts-shuffled": Fault(
        ("layers.2.gate_proj", "layers.2.up_proj"),
        "two experts have each other's weights, as after a sync in another order",
        "sparse:first_two_swapped",
        kind="sparse",
        expected="precheck",
        mismatch="layers.2.experts.0.gate_proj",
    ),
}
