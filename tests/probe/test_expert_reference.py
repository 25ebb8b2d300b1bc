"""Sparse layers in float64, compared with sums that follow the definition."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from rlk_align.judge.load import load_contract
from rlk_align.model.families import FAMILIES
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.probe.referee.experts import ExpertReference, as_recorded
from rlk_align.probe.referee.rounding import ErrorSums, rounding_variance
from rlk_align.results import RoundingErrors

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
    out, extra, _ = ExpertReference(SHAPE, "float32", WEIGHTS.__getitem__).exact(site, inputs)
    return out, extra


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
    # There are more roundings.
    assert (variance > exact("moe_out")[1]).all()
    site = as_recorded(SITES["layers.0.moe_out"], SITES, unexposed)
    seen = ("mlp_norm",) if hidden is INNER else ("gate_proj", "up_proj")
    assert [n.rpartition(".")[2] for n in site.inputs] == [*seen, "routing_weights", "experts"]


BIASED = dataclasses.replace(SHAPE, model_type="gpt_oss", swiglu_alpha=1.702, swiglu_limit=2.0)
OF_BIASED = {s.name: s for s in model_sites(BIASED)}
WITH_BIASES = WEIGHTS | {
    f"{name}.bias": torch.randn(len(weight), generator=GENERATOR, dtype=torch.float64)
    for name, weight in WEIGHTS.items()
}


@pytest.mark.parametrize("hidden", [[], INNER])
def test_biases_and_a_clamp(hidden: list[str]) -> None:
    """With rows that are shown, and without, the sum is that of the definition."""
    shares = LOGITS.gather(1, CHOSEN).softmax(1)
    values: dict[str, list[torch.Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for x, chosen in zip(X, CHOSEN, strict=True):
        gate, up = (
            torch.stack([WITH_BIASES[f"{n}.{op}"] @ x + WITH_BIASES[f"{n}.{op}.bias"] for n in of])
            for of in [[f"layers.0.experts.{e}" for e in chosen.tolist()]]
            for op in ("gate_proj", "up_proj")
        )
        g, u = gate.clamp(max=2), up.clamp(-2, 2)
        act = (u + 1) * g * torch.sigmoid(1.702 * g)
        down = [
            WITH_BIASES[f"layers.0.experts.{e}.down_proj"] @ row
            + WITH_BIASES[f"layers.0.experts.{e}.down_proj.bias"]
            for e, row in zip(chosen.tolist(), act, strict=True)
        ]
        for op, rows in (("gate_proj", gate), ("up_proj", up), ("down_proj", torch.stack(down))):
            values[op].append(rows.flatten())
    known = {op: torch.stack(rows) for op, rows in values.items()}
    known |= {"mlp_norm": X, "routing_weights": shares, "experts": CHOSEN.double()}
    biased = [op for op in FAMILIES["gpt_oss"].biases if op.startswith("expert")]
    reference = ExpertReference(
        BIASED, "float32", WITH_BIASES.__getitem__, biased=[*biased, "q_proj"]
    )
    ops = ("moe_out",) if hidden else ("gate_proj", "up_proj", "moe_out")
    for op in ops:
        site = as_recorded(OF_BIASED[f"layers.0.{op}"], OF_BIASED, dict.fromkeys(hidden, "fused"))
        out, *_ = reference.exact(site, [known[n.rpartition(".")[2]] for n in site.inputs])
        expected = known.get(op)
        if expected is None:
            expected = (known["down_proj"].unflatten(1, (2, -1)) * shares[..., None]).sum(1)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_the_variance_is_that_of_rounded_steps() -> None:
    """The variance of Megatron's roundings over 400 inputs."""
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    reference = ExpertReference(shape, "bfloat16", WEIGHTS.__getitem__)
    site = as_recorded(SITES["layers.0.moe_out"], SITES, dict.fromkeys(INNER[2:], "fused"))
    generator = torch.Generator().manual_seed(5)
    n = 400
    gate, up = (torch.randn(n, 10, generator=generator).bfloat16().double() for _ in range(2))
    shares = torch.rand(n, 2, generator=generator).bfloat16().double()
    chosen = torch.tensor([[0, 3]]).repeat(n, 1)
    out, extra, _ = reference.exact(site, [gate, up, shares, chosen.double()])
    g, u = (x.reshape(n, 2, 5) for x in (gate, up))
    act = (g * g.sigmoid()).bfloat16().double() * u
    act = (act.bfloat16().double() * shares[..., None]).bfloat16().double()
    rows = [act[:, s] @ WEIGHTS[f"layers.0.experts.{e}.down_proj"].T for s, e in ((0, 0), (1, 3))]
    got = (rows[0].bfloat16() + rows[1].bfloat16()).double()
    ratio = ((got - out).square().sum() / extra.sum()).sqrt()
    assert 0.5 < ratio < 1.3


def test_a_shape_of_sites_is_that_of_values() -> None:
    for op, value in VALUES.items():
        assert SITES[f"layers.0.{op}"].features == value.shape[1]


CORRECTED = dataclasses.replace(
    SHAPE, model_type="glm4_moe", weight_scale=2.5, shared_intermediate=5, groups=2, top_groups=1
)
CORRECTION = torch.tensor([0.9, -0.4, 0.1, 0.3])
BY_NAME = {s.name: s for s in model_sites(CORRECTED)}


def corrected(op: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    site = as_recorded(BY_NAME[f"layers.0.{op}"], BY_NAME, {})
    weights = WEIGHTS | {"layers.0.experts": CORRECTION}
    out, extra, _ = ExpertReference(CORRECTED, "float32", weights.__getitem__).exact(site, inputs)
    return out, extra


def test_weights_are_of_scores_without_their_correction() -> None:
    chosen = CHOSEN.double()
    out, _ = corrected("routing_weights", LOGITS, chosen)
    for got, logits, ids in zip(out, LOGITS, CHOSEN, strict=True):
        scores = 1 / (1 + (-logits[ids]).exp())
        torch.testing.assert_close(got, 2.5 * scores / scores.sum(), rtol=1e-12, atol=0)


def test_the_row_of_the_shared_experts_is_added() -> None:
    shared = torch.randn(7, 6, generator=GENERATOR, dtype=torch.float64)
    inputs = [VALUES[op] for op in ("down_proj", "routing_weights", "experts")]
    out, variance = corrected("moe_out", *inputs, shared)
    torch.testing.assert_close(out, VALUES["moe_out"] + shared, rtol=1e-12, atol=1e-12)
    assert (variance > exact("moe_out")[1]).all()


def test_shares_that_ranks_add_up_are_rounded_by_each() -> None:
    """The variance of the roundings of vLLM's ranks, including the shared experts' parts."""
    ranks, n, generator = 2, 400, torch.Generator().manual_seed(7)
    down = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    weights = WEIGHTS | {"layers.0.shared_down_proj": down}
    shape = dataclasses.replace(CORRECTED, dtype="bfloat16")
    unexposed = dict.fromkeys([*INNER, "layers.0.shared_down_proj"], "added up")
    site = as_recorded(BY_NAME["layers.0.moe_out"], BY_NAME, unexposed)
    x, shared_act = (torch.randn(n, f, generator=generator).bfloat16().double() for f in (6, 5))
    shares = torch.rand(n, 2, generator=generator).bfloat16().double()
    chosen = torch.tensor([[0, 3]]).repeat(n, 1)
    named = {"mlp_norm": x, "routing_weights": shares, "experts": chosen.double()}
    named["shared_act"] = shared_act
    inputs = [named[name.rpartition(".")[2]] for name in site.inputs]

    def once(value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().double()

    acts = []
    for e in (0, 3):
        gate, up = (
            once(x @ WEIGHTS[f"layers.0.experts.{e}.{op}"].T) for op in ("gate_proj", "up_proj")
        )
        acts.append(once(gate * gate.sigmoid() * up))
    parts = []
    for own in torch.arange(5).chunk(ranks):
        rows = [
            once(act[:, own] @ WEIGHTS[f"layers.0.experts.{e}.down_proj"][:, own].T)
            for e, act in zip((0, 3), acts, strict=True)
        ]
        routed = once(rows[0] * shares[:, :1] + rows[1] * shares[:, 1:])
        parts.append(once(routed + once(shared_act[:, own] @ down[:, own].T)))
    got = once(parts[0] + parts[1])
    out, extra, _ = ExpertReference(shape, "bfloat16", weights.__getitem__, ranks).exact(
        site, inputs
    )
    alone, less, _ = ExpertReference(shape, "bfloat16", weights.__getitem__).exact(site, inputs)
    torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)
    error = (got - out).square().sum()
    assert 0.5 < (error / extra.sum()).sqrt() < 1.3
    assert extra.sum() > 1.2 * less.sum()


def errors_of_sums(ranks: int, gains: float, shared: bool) -> RoundingErrors:
    """Of what vLLM computes in float32, product by product, from inputs whose large values come
    from products that agree in sign. `gains`: by how much a row is off as a whole; `shared`:
    whether the referee is told what a row's features share."""
    rows, hidden, inner, generator = 300, 64, 24, torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).float().double()

    first = {op: random(inner, hidden) for op in ("gate_proj", "up_proj")}
    weights = {f"layers.0.experts.{e}.{op}": w for op, w in first.items() for e in (0, 1)}
    down = random(hidden, inner)
    weights |= {f"layers.0.experts.{e}.down_proj": down for e in (0, 1)}
    along = random(rows, 1) * first["gate_proj"][:1] + random(rows, 1) * first["up_proj"][:1]
    x = (random(rows, hidden) + along).float()
    shape = dataclasses.replace(SHAPE, hidden=hidden, expert_intermediate=inner)
    sites = {s.name: s for s in model_sites(shape)}
    site = as_recorded(sites["layers.0.moe_out"], sites, dict.fromkeys(INNER, "fused"))
    chosen, shares = torch.tensor([[0, 1]]).repeat(rows, 1), torch.full((rows, 2), 0.5)
    inputs = [x.double(), shares.double(), chosen.double()]
    gate, up = (torch.zeros(rows, inner) for _ in first)
    for k in range(hidden):
        gate += x[:, k : k + 1] * first["gate_proj"][:, k].float()
        up += x[:, k : k + 1] * first["up_proj"][:, k].float()
    act = torch.nn.functional.silu(gate) * up
    # Both experts are the same, so the sum is their row.
    parts = [act[:, i] @ down.float()[:, i].T for i in torch.arange(inner).chunk(ranks)]
    got = sum(parts[1:], parts[0]).double() * (1 + gains * torch.randn(rows, 1).sign())
    reference = ExpertReference(shape, "float32", weights.__getitem__, ranks)
    out, extra, of_rows = reference.exact(site, inputs)
    sums = ErrorSums(hidden, 1, "float32", torch.device("cpu"))
    variance = rounding_variance(out, "float32") + extra
    sums.add(got, out, variance, (of_rows * shared)[:, None], np.arange(rows))
    return sums.errors(RowIndex(TokenBatch((Sample("a", (1,) * rows),))))


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_are_off_as_a_whole_by_sums_before_the_activation(ranks: int) -> None:
    """One rounded value before down's product moves all features of a row. A gain of rows beyond
    that is an error."""
    budget = load_contract("fp32", "float32").budget("moe_out", "reduction")
    assert budget is not None
    healthy = errors_of_sums(ranks, 0.0, shared=True)
    assert 0.5 < healthy.rms < 1.3
    assert healthy.row_gain < budget.row_gain / 3
    assert errors_of_sums(ranks, 0.0, shared=False).row_gain > 10 * (healthy.row_gain + 0.01)
    assert errors_of_sums(ranks, 1e-6, shared=True).row_gain > budget.row_gain


def test_a_choice_is_held_against_the_corrected_scores() -> None:
    weights = {"layers.0.experts": CORRECTION}
    reference = ExpertReference(CORRECTED, "float32", weights.__getitem__)
    logits = torch.zeros(3, 4, dtype=torch.float64)
    # Scores 1.4, 0.1 and 0.6, 0.8: the first group is the better by 0.1.
    chosen = torch.tensor([[0, 1], [2, 3], [0, 3]])
    beyond = reference.beyond(BY_NAME["layers.0.experts"], logits, chosen)
    expected = torch.tensor([[0.0], [0.1], [torch.inf]], dtype=torch.float64)
    torch.testing.assert_close(beyond, expected, rtol=0, atol=1e-6)
