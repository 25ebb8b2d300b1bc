"""Sparse layers in float64, against sums written out from the definition."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from rlk_align.model.families import ModelShape
from rlk_align.model.sites import model_sites
from rlk_align.probe.referee.experts import ExpertReference, as_recorded, beyond_choice

SHAPE = ModelShape(
    **{"model_type": "qwen3_moe", "layers": 1, "hidden": 6, "heads": 2, "kv_heads": 1},
    **{"head_dim": 4, "intermediate": 8, "vocab": 9, "context": 8, "dtype": "float32"},
    **{"sparse_layers": (0,), "experts": 4, "top_k": 2, "expert_intermediate": 5},
    norm_topk=True,
)
SITES = {s.name: s for s in model_sites(SHAPE)}
GENERATOR = torch.Generator().manual_seed(2)
WEIGHTS = {
    f"layers.0.experts.{e}.{op}": torch.randn(size, generator=GENERATOR, dtype=torch.float64)
    for e in range(4)
    for op, size in (("gate_proj", (5, 6)), ("up_proj", (5, 6)), ("down_proj", (6, 5)))
}
X = torch.randn(7, 6, generator=GENERATOR, dtype=torch.float64)
LOGITS = torch.randn(7, 4, generator=GENERATOR, dtype=torch.float64)
CHOSEN = LOGITS.topk(2).indices.sort(dim=1).values


def layer() -> dict[str, torch.Tensor]:
    """Every value of the layer, token by token."""
    values: dict[str, list[torch.Tensor]] = {}
    for x, logits, chosen in zip(X, LOGITS, CHOSEN, strict=True):
        p = logits.softmax(0)
        shares = p[chosen] / p[chosen].sum()
        row: dict[str, list[torch.Tensor]] = {}
        for e in chosen.tolist():
            w = {op: WEIGHTS[f"layers.0.experts.{e}.{op}"] for op in ("gate_proj", "up_proj")}
            gate, up = (w[op] @ x for op in ("gate_proj", "up_proj"))
            act = gate / (1 + (-gate).exp()) * up
            down = WEIGHTS[f"layers.0.experts.{e}.down_proj"] @ act
            named = {"gate_proj": gate, "up_proj": up, "act": act, "down_proj": down}
            for op, value in named.items():
                row.setdefault(op, []).append(value)
        total = sum(s * d for s, d in zip(shares, row["down_proj"], strict=True))
        for op, parts in row.items():
            values.setdefault(op, []).append(torch.cat(parts))
        values.setdefault("routing_weights", []).append(shares)
        values.setdefault("moe_out", []).append(torch.as_tensor(total))
    known = {op: torch.stack(rows) for op, rows in values.items()}
    return known | {"mlp_norm": X, "router": LOGITS, "experts": CHOSEN.double()}


VALUES = layer()


def exact(op: str, unexposed: Mapping[str, str] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    site = as_recorded(SITES[f"layers.0.{op}"], SITES, unexposed or {})
    inputs = [VALUES[name.rpartition(".")[2]] for name in site.inputs]
    return ExpertReference(SHAPE, "float32", WEIGHTS.__getitem__).exact(site, inputs)


@pytest.mark.parametrize("op", ["routing_weights", "gate_proj", "up_proj", "down_proj", "moe_out"])
def test_each_operator_is_the_definition(op: str) -> None:
    out, variance = exact(op)
    torch.testing.assert_close(out, VALUES[op], rtol=1e-12, atol=1e-12)
    assert out.shape == variance.shape
    assert (variance > 0).all()


INNER = [f"layers.0.{op}" for op in ("gate_proj", "up_proj", "act", "down_proj")]


@pytest.mark.parametrize("hidden", [INNER, INNER[2:]])
def test_a_sum_of_rows_that_are_not_shown_follows_from_what_is(hidden: list[str]) -> None:
    unexposed = dict.fromkeys(hidden, "fused")
    out, variance = exact("moe_out", unexposed)
    torch.testing.assert_close(out, VALUES["moe_out"], rtol=1e-12, atol=1e-12)
    # More is rounded on the way.
    assert (variance > exact("moe_out")[1]).all()
    site = as_recorded(SITES["layers.0.moe_out"], SITES, unexposed)
    seen = ("mlp_norm",) if hidden is INNER else ("gate_proj", "up_proj")
    assert [n.rpartition(".")[2] for n in site.inputs] == [*seen, "routing_weights", "experts"]


def test_the_variance_is_that_of_rounded_steps() -> None:
    """By rounding what Megatron rounds, 400 times with other inputs."""
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    reference = ExpertReference(shape, "bfloat16", WEIGHTS.__getitem__)
    site = as_recorded(SITES["layers.0.moe_out"], SITES, dict.fromkeys(INNER[2:], "fused"))
    generator = torch.Generator().manual_seed(5)
    n = 400
    gate, up = (torch.randn(n, 10, generator=generator).bfloat16().double() for _ in range(2))
    shares = torch.rand(n, 2, generator=generator).bfloat16().double()
    chosen = torch.tensor([[0, 3]]).repeat(n, 1)
    out, extra = reference.exact(site, [gate, up, shares, chosen.double()])
    g, u = (x.reshape(n, 2, 5) for x in (gate, up))
    act = (g * g.sigmoid()).bfloat16().double() * u
    act = (act.bfloat16().double() * shares[..., None]).bfloat16().double()
    rows = [act[:, s] @ WEIGHTS[f"layers.0.experts.{e}.down_proj"].T for s, e in ((0, 0), (1, 3))]
    got = (rows[0].bfloat16() + rows[1].bfloat16()).double()
    ratio = ((got - out).square().sum() / extra.sum()).sqrt()
    assert 0.5 < ratio < 1.3


def test_what_exceeds_a_choice() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1).double()
    chosen = torch.tensor([[0, 1], [0, 3], [1, 1], [0, 4]])
    beyond = beyond_choice(logits, chosen)
    assert beyond.shape == (4, 1)
    # An id that is there twice, or none of an expert, is beyond everything.
    assert beyond.flatten().tolist() == [0.0, 2.0, float("inf"), float("inf")]


def test_a_shape_of_sites_is_that_of_values() -> None:
    for op, value in VALUES.items():
        assert SITES[f"layers.0.{op}"].features == value.shape[1]
