"""Every launch decision is that of the launches recorded in plans.jsonl, made for devices that are
not there.

A line is [device, kind, what is planned from, what was launched], recorded from the launch code
before there were plans (8ba9bd7) at the shapes of kernels/bench/shapes.py, odd ones, and gradients;
those of products again when the model of their tiles' times was made (`tile_costs.py`):

    PYTHONPATH=kernels:tests/kernels python tests/kernels/matmul/test_plan.py
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planning import H200
from rlk_kernels.matmul import plan
from rlk_kernels.matmul.accumulate import plan as accumulate

DEVICES = {
    "h200": H200,
    "h200 without gluon": replace(H200, gluon=False, cuda=False),
    "ampere": replace(H200, gluon=False, cuda=False, tma=False, overlaps=False),
}
RECORDED = [
    json.loads(line) for line in Path(__file__).with_name("plans.jsonl").read_text().splitlines()
]


def segments_of(planned, k):
    """How many segments, and their steps."""
    length = planned.segment or k
    return [planned.last_segment // length + 1, length // planned.tile.k]


def product(device, m, n, k, dtype, out_dtype, *layout):
    dtype, out_dtype = getattr(torch, dtype), getattr(torch, out_dtype)
    shape = plan.ProductShape(m, n, k, dtype, out_dtype, *layout)
    x = plan.plan_product(shape, device, True)
    t = x.tile
    facts = [x.kernel, x.programs, t.m, t.n, t.k, t.group]
    if x.kernel == "hopper_split":
        return facts + segments_of(x, k)
    facts += [x.stages, x.overlap]
    if x.kernel == "hopper":
        return facts
    facts += [t.warps, x.segment, x.last_segment]
    if x.kernel == "pointer":
        return facts
    return [*facts, x.tma_store, x.wide, t.subtile, t.flatten, t.swap, t.tail]


def epilogue(device, t, v, k, dtype, logit_dtype, readable, kind, writable):
    dtype, logit_dtype = getattr(torch, dtype), getattr(torch, logit_dtype)
    shape = plan.LogitsShape(t, v, k, dtype, logit_dtype, readable)
    x = plan.plan_epilogue(shape, kind, writable, device, True)
    tile = x.tile
    tiles = -(-t // tile.m) * -(-v // tile.n)
    programs = tiles if x.kernel == "pointer" else min(tiles, x.processors)
    facts = [x.kernel, programs, tile.m, tile.n, tile.k, tile.group, x.permuted]
    if x.kernel == "hopper":
        return facts + segments_of(x, k)
    facts += [x.segment, x.last_segment]
    facts += [tile.flatten, x.tma_store] if x.kernel == "tma" else []
    return [*facts, tile.warps, tile.stages]


def accumulated(device, *slices):
    slices = tuple(
        accumulate.Slice(*x[:4], getattr(torch, x[4]), getattr(torch, x[5]), *x[6:]) for x in slices
    )
    x = accumulate.plan_accumulate(slices, device, True)
    single = x.slices[0]
    if x.shared:
        assert all(one.kernel == "hopper" for one in x.slices)
        assert x.shared.order == tuple(range(len(slices)))
        widths = [one.width for one in x.slices]
        shared = x.shared
        return ["hopper", shared.programs, widths, shared.everyone, shared.heavy, shared.ahead]
    tile = single.tile
    facts = [single.kernel, single.programs, tile.m, tile.n, tile.k, tile.group, tile.warps]
    return [*facts, tile.stages] if single.kernel == "tma" else facts


KINDS = {"product": product, "epilogue": epilogue, "accumulate": accumulated}


def wrong() -> list:
    """Recorded launches that are planned otherwise."""
    return [
        [*line, facts]
        for line in RECORDED
        if (facts := KINDS[line[1]](DEVICES[line[0]], *line[2])) != line[3]
    ]


def test_plans_are_the_recorded_launches():
    assert not wrong()


def test_the_record_holds_every_kernel():
    counts = Counter((line[1], line[3][0]) for line in RECORDED)
    kernels = {"product": plan.MatmulPlan, "epilogue": plan.EpiloguePlan}
    for kind, made in kernels.items():
        known = made.__annotations__["kernel"].__args__
        assert {kernel for k, kernel in counts if k == kind} == set(known)
    assert {kernel for k, kernel in counts if k == "accumulate"} == {"hopper", "tma", "pointer"}
    assert min(counts.values()) >= 10


@pytest.mark.parametrize("change", ["stages", "overlap", "segment", "programs"])
def test_another_decision_is_noticed(change, monkeypatch):
    make = plan.plan_product
    monkeypatch.setattr(
        plan,
        "plan_product",
        lambda *a: replace(make(*a), **{change: getattr(make(*a), change) + 1}),
    )
    assert wrong()


def record_products() -> None:
    """Write plans.jsonl with the products as they are planned now."""
    for line in RECORDED:
        if line[1] == "product":
            line[3] = product(DEVICES[line[0]], *line[2])
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in RECORDED)
    Path(__file__).with_name("plans.jsonl").write_text(text)


if __name__ == "__main__":
    record_products()
