"""Contracts that are wrong as such: each finding has a contract that it finds, and a mended one."""

import dataclasses
import math
from datetime import date

import numpy as np
import pytest
from comparisons import contract

from rlk_align.compare.metrics import edge_metrics
from rlk_align.data import data_path
from rlk_align.judge.lint import _largest, lint, sequence_ess
from rlk_align.judge.load import built_in, open_contract
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites

MAX = {"metric": "max_abs_dlogp", "fail": 0.06}
DAY = date(2026, 5, 1)


def said(*limits: dict, **head: object) -> list[str]:
    return [f"{f.entry}: {f.text}" for f in lint(contract(*limits, **head), DAY)]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (({"metric": "k3", "fail": 0.05}, MAX), "k3 is at most 0.00184"),
        (({"metric": "mean_abs_dlogp", "fail": 0.06}, MAX), "mean_abs_dlogp is at most 0.06"),
        (({"metric": "clip_fraction", "fail": 0}, MAX), "clip_fraction is at most 0"),
        (({"metric": "ratio_mean_error", "fail": 0.1}, MAX), "ratio_mean_error is at most 0.0618"),
        (({"metric": "token_mult_prob_error", "fail": 1.1}, MAX), "is at most 1.06"),
        (({"metric": "clip_fraction", "fail": 1}, MAX | {"fail": 0.5}), "never above 1"),
        ((MAX | {"fail": 0.1}, MAX), "l1 is tighter"),
        ((MAX, {"metric": "bit_mismatches", "fail": 0}), "equal bits (l1)"),
    ],
)
def test_a_limit_that_can_never_fire(limits: tuple[dict, dict], text: str) -> None:
    found = said(*limits)
    assert len(found) == 1
    assert found[0].startswith("l0: ")
    assert text in found[0]


@pytest.mark.parametrize(
    "limits",
    [
        ({"metric": "k3", "fail": 0.001}, MAX),
        ({"metric": "mean_abs_dlogp", "fail": 0.05}, MAX),
        ({"metric": "clip_fraction", "fail": 0}, MAX | {"fail": 0.2}),
        ({"metric": "k3", "fail": 0.05}, MAX | {"edges": ["decode_vs_train"]}),
        (MAX | {"edges": ["decode_vs_train"]}, MAX | {"fail": 0.1}),
        ({"metric": "bit_mismatches", "fail": 0},),
    ],
)
def test_a_limit_that_can_fire(limits: tuple[dict, ...]) -> None:
    assert said(*limits) == []


def test_no_metric_is_above_what_the_largest_shift_allows() -> None:
    draw = np.random.default_rng(2)
    for most in (0.01, 0.2, 2.0):
        delta = draw.uniform(-most, most, 500)
        delta[:2] = most, -most
        for shift in (delta, np.full(50, most), np.full(50, -most)):
            metrics = edge_metrics(np.zeros(len(shift)), shift)
            for metric in ("k3", "ratio_mean_error", "token_mult_prob_error", "clip_fraction"):
                assert getattr(metrics, metric) <= _largest(metric, most) * (1 + 1e-12)


def test_a_quantile_of_few_tokens() -> None:
    p99 = {"metric": "p99_abs_dlogp", "fail": 0.01}
    assert "min_tokens = 100" in said(p99, MAX)[0]
    assert said(p99 | {"min_tokens": 100}, MAX) == []
    assert said(p99, MAX, min_tokens=100) == []
    p999 = {"metric": "p999_abs_dlogp", "fail": 0.01, "min_tokens": 1000}
    (found,) = said(p99 | {"min_tokens": 1000}, p999, MAX)
    assert "p99 is never above p99.9" in found
    # Below 1,000 tokens it is the only one of the two that is held.
    assert said(p99 | {"min_tokens": 100}, p999, MAX) == []


def test_limits_below_the_noise() -> None:
    assert "healthy pairs were measured at 0.08" in said(MAX | {"healthy": 0.08})[0]
    assert said(MAX | {"healthy": 0.05}) == []
    assert "max_noise" in said(MAX, max_noise=0.1)[0]
    assert said(MAX, max_noise=0.01) == []


def test_budgets_that_no_engine_can_keep() -> None:
    bf16 = open_contract("bf16")

    def with_norms(**changes: float) -> list[str]:
        budgets = [
            b.model_copy(update=changes) if b.id == "rounding-norms" else b for b in bf16.budgets
        ]
        findings = lint(bf16.model_copy(update={"budgets": budgets}), DAY)
        return [f.text for f in findings if f.entry == "rounding-norms"]

    assert with_norms() == []
    assert "rounded once, has 1" in with_norms(rms=0.9)[0]
    assert "row_rms" in with_norms(row_rms=2.0)[0]


def test_an_expired_waiver() -> None:
    gone = {"limit": "l0", "owner": "ada", "reason": "r", "expires": date(2026, 4, 30)}
    assert "expired on 2026-04-30" in said(MAX, waivers=[gone])[0]
    assert said(MAX, waivers=[gone | {"expires": DAY}]) == []


def test_sequences_keep_their_effective_sample_size() -> None:
    k3 = {"metric": "k3", "fail": 1e-4}
    long = {"tokens": 10_000, "ess": 0.5}
    assert "10,000 tokens keep an effective sample size of 0.14" in said(k3, MAX, sequences=long)[0]
    assert said(k3, MAX, sequences=long | {"tokens": 1000}) == []
    assert math.isnan(sequence_ess(contract(MAX), 10))


def test_sequence_ess_is_that_of_drawn_sequences() -> None:
    draw = np.random.default_rng(3)
    sigma, tokens = 0.02, 512
    delta = draw.normal(-(sigma**2) / 2, sigma, (40_000, tokens)).sum(axis=1)
    ratio = np.exp(delta)
    drawn = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    k3 = {"metric": "k3", "fail": sigma**2 / 2}
    assert sequence_ess(contract(k3), tokens) == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize("name", sorted(set(built_in()) - {"ws1"}))
def test_built_in_contracts_are_coherent(name: str) -> None:
    assert lint(open_contract(name), DAY) == []


def test_the_kl_gate_of_ws1_is_vacuous() -> None:
    found = {f.entry for f in lint(open_contract("ws1"), DAY)}
    assert {"kl-bf16", "kl-fp32", "kl-fp16"} <= found


@pytest.mark.parametrize("pattern", ["layers.*.q_prj", "q_proj", "layers.0.logits", "layers.attn"])
def test_a_waiver_of_sites_that_no_model_has(pattern: str) -> None:
    waiver = {"limit": "l0", "owner": "ada", "reason": "r", "expires": DAY}
    (found,) = said(MAX, waivers=[waiver | {"sites": ["layers.*.q_proj", pattern]}])
    assert found.startswith(f"l0: {pattern} is not a site of any model; operators are embed, ")
    for known in ("layers.*.q_proj", "layers.1?.attn", "logits", "*_norm", "layers.0.*"):
        assert said(MAX, waivers=[waiver | {"sites": [known]}]) == []


def test_a_limit_of_sites_that_no_model_has() -> None:
    differ = {"metric": "rows_differ", "fail": 0, "sites": ["layers.*.mpl_norm"]}
    assert "layers.*.mpl_norm is not a site" in said(MAX, differ)[0]
    assert said(MAX, differ | {"sites": ["layers.*.mlp_norm"]}) == []


def test_sites_are_those_of_the_model() -> None:
    shape = read_shape(data_path("model"))
    sites = model_sites(shape)
    sparse = read_shape(data_path("model").parent / "sparse")
    shared = dataclasses.replace(sparse, model_type="glm4_moe", shared_intermediate=1)
    gated = dataclasses.replace(shared, model_type="qwen2_moe")
    after = dataclasses.replace(shape, model_type="gemma3_text")
    hybrid = dataclasses.replace(after, model_type="qwen3_5_text", delta_layers=(0, 1))
    latent = dataclasses.replace(shared, model_type="deepseek_v3", latent=64, query_latent=48)
    normed = dataclasses.replace(after, model_type="gemma4_text")
    scanned = dataclasses.replace(hybrid, model_type="granitemoehybrid")
    beside = dataclasses.replace(scanned, model_type="falcon_h1", scan_norm=False)
    others = (sparse, shared, gated, after, hybrid, scanned, beside, latent, normed)
    sites += [s for other in others for s in model_sites(other)]
    assert {s.op for s in sites} == {operator.site for operator in OPERATORS.values()}
    assert {s.op for s in sites if s.layer is None} == {
        operator.site for operator in OPERATORS.values() if operator.part is None
    }


def test_operators_of_which_nothing_is_said() -> None:
    bf16 = open_contract("bf16")
    alone = ("rounding-attention", "rounding-latents", "rounding-delta-rule")
    some = [b for b in bf16.budgets if b.id not in alone]
    assert lint(bf16, DAY) == []
    assert [f.text for f in lint(bf16.model_copy(update={"budgets": some}), DAY)] == [
        f"it limits operators in bfloat16, and has no limit for {op}: add a budget of the class "
        f"{of_class}"
        for op, of_class in (
            ("attn", "attention"),
            ("latent_attn", "attention"),
            ("delta", "recurrence"),
            ("scan", "recurrence"),
        )
    ]


def test_a_limit_of_the_largest_change_forestalls_no_limit_of_noise() -> None:
    """|Δ| is divided by 1 − p, which may be small."""
    noise = {"metric": "noise_c", "fail": 0.09}
    excess = {"metric": "excess", "fail": 400.0, "floor": 0.01}
    bias = {"metric": "ratio_bias", "fail": 0.5}
    found = lint(contract({"metric": "max_abs_dlogp", "fail": 0.1}, noise, excess, bias))
    assert [(f.entry, "never fire" in f.text) for f in found] == [("l3", True)]
