"""The values that a pass keeps: within the budget and the disk, and the same on both sides."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from synthetic import BATCH, SHAPE, SITES, all_cells, wanted_cells

from rlk_align.engines.process import plan
from rlk_align.engines.process.job import Job
from rlk_align.engines.process.plan import KEEP_LOGPROBS, KeepRule, plan_capture
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, TraceNotWritten
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.sites import check_selection

GIB = 1 << 30


class Usage(NamedTuple):
    free: int


def job(tmp_path: Path, **changes: object) -> Job:
    settings = {
        "engine": EngineSpec("hf"),
        "model": tmp_path,
        "folder": tmp_path,
        "key": "k",
        "prompts": tmp_path / "p.jsonl",
        "tokens": None,
        "passes": ("prefill", "prefill.untapped", "prefill.repeat"),
        "max_new_tokens": 4,
        "seed": 0,
        "budget": GIB,
        "layers": None,
        "sites": (),
    }
    return Job(**settings | changes)


@pytest.fixture(autouse=True)
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: Usage(GIB))


LONG = TokenBatch(tuple(Sample(f"p{i}", (1,) * 30, (2,) * (10 + i)) for i in range(40)))


def keep_values(job: Job, batch: TokenBatch = LONG, dtype: str = "bfloat16") -> KeepRule:
    return plan_capture(job, SITES, batch, dtype).keep


def kept(rule, site: str, batch: TokenBatch = LONG) -> set[tuple[int, int]]:
    cells = all_cells(batch)
    sample, position = np.array(cells).T
    mask = rule(site, sample, position)
    assert mask.dtype == bool
    assert mask.shape == (len(cells),)
    return {cell for cell, keep in zip(cells, mask.tolist(), strict=True) if keep}


def value_bytes(batch: TokenBatch, item: int) -> int:
    """The size of all values of a pass, counted row by row."""
    return sum(len(wanted_cells(s, False, batch)) * s.features * item for s in SITES)


def test_everything_is_kept_where_it_fits(tmp_path: Path) -> None:
    exact = value_bytes(BATCH, 2)
    rule = keep_values(job(tmp_path, budget=exact), BATCH)
    for site in SITES:
        assert kept(rule, site.name, BATCH) == set(all_cells(BATCH))
    rule = keep_values(job(tmp_path, budget=exact // 2), BATCH)
    assert kept(rule, "embed", BATCH) != set(all_cells(BATCH))


def kept_bytes(rule: KeepRule, item: int) -> int:
    """The size of the values that a pass over LONG keeps, without log-probs."""
    cells = {s: set(wanted_cells(s, False, LONG)) for s in SITES if s.op != "logprob"}
    return sum(s.features * item * len(kept(rule, s.name) & c) for s, c in cells.items())


def rows_read_before(rule: KeepRule, batch: TokenBatch = LONG) -> set[tuple[int, int]]:
    """The rows whose keys and values are also kept at every earlier position."""
    both = kept(rule, "layers.0.k_rope", batch) & kept(rule, "layers.0.v_proj", batch)
    return {(s, p) for s, p in both if {(s, i) for i in range(p)} <= both}


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_a_share_of_the_rows_is_kept_where_it_does_not_fit(
    tmp_path: Path, dtype: str, item: int, share: float
) -> None:
    budget = int(value_bytes(LONG, item) * share)
    rule = keep_values(job(tmp_path, budget=budget), dtype=dtype)
    rows = len(all_cells(LONG))
    found = len(kept(rule, "layers.0.act"))
    # Binomial, five standard deviations.
    assert abs(found - rule.share * rows) < 5 * (share * (1 - share) * rows) ** 0.5
    assert kept(rule, "layers.0.act") == kept(rule, "embed") == kept(rule, "logits")
    assert kept(rule, "logprob") == set(all_cells(LONG))
    chance = 5 * (share * (1 - share) / rows) ** 0.5 * value_bytes(LONG, item)
    # A row that is drawn may be one whose keys and values are kept anyway.
    assert 0.8 * budget - chance < kept_bytes(rule, item) < budget + chance


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_keys_and_values_of_whole_sequences_are_kept(tmp_path: Path, share: float) -> None:
    """Attention could not be recomputed from rows that are drawn one by one."""
    budget = int(value_bytes(LONG, 2) * share)
    rule = keep_values(job(tmp_path, budget=budget))
    assert kept(rule, "layers.0.k_rope") == kept(rule, "layers.1.v_proj")
    drawn, whole = kept(rule, "layers.0.q_rope"), rows_read_before(rule)
    of_sequences = sum(s.features for s in SITES if s.op in ("k_rope", "v_proj")) * 2
    least = 0.25 * budget / of_sequences
    assert min(least, len(all_cells(LONG))) - 50 <= len(whole)
    assert len(drawn & whole) >= 0.5 * len(drawn) * len(whole) / len(all_cells(LONG))
    cut = [n for n, s in zip(rule.prefixes, LONG.samples, strict=True) if 0 < n < len(s.ids)]
    assert len(cut) <= 1


def test_the_budget_is_shared_by_the_observed_passes(tmp_path: Path) -> None:
    budget = value_bytes(LONG, 2)
    one = keep_values(job(tmp_path, budget=budget))
    both = job(tmp_path, budget=budget, passes=("decode", "decode.repeat", "prefill"))
    two = keep_values(both)
    assert kept(one, "embed") == set(all_cells(LONG))
    rows = len(all_cells(LONG))
    assert abs(kept_bytes(two, 2) / budget - 0.45) < 0.05 + 5 * 0.5 / rows**0.5


def test_smaller_budgets_keep_subsets(tmp_path: Path) -> None:
    full = value_bytes(LONG, 2)
    rules = [keep_values(job(tmp_path, budget=full // d)) for d in (2, 3, 10, 1)]
    half, third, tenth, whole = (kept(rule, "layers.1.attn") for rule in rules)
    assert tenth < third < half < whole


def test_both_sides_keep_the_same_rows(tmp_path: Path) -> None:
    """The rule depends only on (sample, position), not on the order, the chunk, or the side."""
    budget = value_bytes(LONG, 2) // 3
    rollout = keep_values(job(tmp_path, budget=budget))
    train = keep_values(
        job(tmp_path, budget=budget, tokens=tmp_path / "t", seed=5, engine=EngineSpec("vllm"))
    )
    assert kept(rollout, "embed") == kept(train, "embed")
    cells = all_cells(LONG)[::-1]
    sample, position = np.array(cells).T
    backwards = rollout("embed", sample, position)
    one_by_one = [bool(rollout("embed", np.array([s]), np.array([p]))[0]) for s, p in cells[:50]]
    assert {c for c, k in zip(cells, backwards.tolist(), strict=True) if k} == kept(train, "embed")
    assert one_by_one == backwards[:50].tolist()


def test_both_sides_of_unlike_precision_keep_rows_in_common(tmp_path: Path) -> None:
    budget = value_bytes(LONG, 2) // 2
    low = keep_values(job(tmp_path, budget=budget))
    high = keep_values(job(tmp_path, budget=budget), dtype="float32")
    assert kept(high, "embed") < kept(low, "embed")


def test_rows_of_every_sample_and_position_are_kept(tmp_path: Path) -> None:
    budget = value_bytes(LONG, 2) // 3
    rows = kept(keep_values(job(tmp_path, budget=budget)), "embed")
    assert {s for s, _ in rows} == set(range(40))
    assert {p for _, p in rows} >= set(range(40))


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ((0, 0), {0, None}),
        ((1, 1), {1, None}),
        ((0, 1), {0, 1, None}),
        ((1, 7), {1, None}),
    ],
)
def test_layers_are_selected(tmp_path: Path, layers: tuple[int, int], wanted: set) -> None:
    rule = keep_values(job(tmp_path, layers=layers), BATCH)
    for site in SITES:
        everything = set(all_cells(BATCH))
        assert kept(rule, site.name, BATCH) == (everything if site.layer in wanted else set())


def test_sites_and_operators_are_selected(tmp_path: Path) -> None:
    rule = keep_values(job(tmp_path, sites=("attn", "layers.1.act", "embed")), BATCH)
    names = {s.name for s in SITES if kept(rule, s.name, BATCH)}
    # Log-probs are always kept: no metric can be had without them.
    assert names == {"layers.0.attn", "layers.1.attn", "layers.1.act", "embed", "logprob"}


def test_layers_and_sites_are_both_asked(tmp_path: Path) -> None:
    rule = keep_values(job(tmp_path, layers=(1, 1), sites=("attn", "final_norm")), BATCH)
    names = {s.name for s in SITES if kept(rule, s.name, BATCH)}
    assert names == {"layers.1.attn", "final_norm", "logprob"}


def test_a_selection_is_given_the_whole_budget(tmp_path: Path) -> None:
    rows = len(all_cells(LONG))
    budget = rows * SHAPE.hidden * 2
    rule = keep_values(job(tmp_path, sites=("embed",), budget=budget))
    assert kept(rule, "embed") == set(all_cells(LONG))


def test_a_control_pass_keeps_log_probs() -> None:
    assert kept(KEEP_LOGPROBS, "logprob") == set(all_cells(LONG))
    assert kept(KEEP_LOGPROBS, "logits") == kept(KEEP_LOGPROBS, "embed") == set()


def test_a_small_disk_is_refused_before_the_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = value_bytes(LONG, 2)
    # The pass and its repetition have digests of everything, the un-tapped one of log-probs.
    counts = {s.op: len(wanted_cells(s, False, LONG)) for s in SITES}
    once = sum(len(wanted_cells(s, False, LONG)) for s in SITES)
    rows = plan._ROW_BYTES * (2 * once + counts["logprob"])
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: Usage(rows + values // 2))
    with pytest.raises(TraceNotWritten, match=str(tmp_path)) as error:
        keep_values(job(tmp_path))
    assert "--trace-budget" in error.value.fix
    # A smaller budget leaves the digests, which fit.
    keep_values(job(tmp_path, budget=values // 10))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: Usage(10))
    with pytest.raises(TraceNotWritten):
        keep_values(job(tmp_path, budget=1))


def test_the_estimate_counts_tokens_that_are_still_to_be_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = TokenBatch(tuple(Sample(s.prompt_id, s.prompt_ids) for s in LONG.samples))
    sampled = prompts.with_responses([[0] * 500] * 40)
    needed = value_bytes(sampled, 2)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _path: Usage(needed // 2))
    decode = job(tmp_path, passes=("decode",), max_new_tokens=500)
    with pytest.raises(TraceNotWritten):
        keep_values(decode, prompts)
    keep_values(decode.model_copy(update={"max_new_tokens": 1}), prompts)


def test_a_selection_names_sites_or_operators() -> None:
    check_selection((), SITES)
    check_selection(("attn", "layers.1.attn", "embed"), SITES)
    for bad in ("layers.2.attn", "q_norm", "Attn", "layers.1", ""):
        with pytest.raises(BadOption) as error:
            check_selection(("attn", bad), SITES)
        assert repr(bad) in error.value.message
        assert "gate_proj" in error.value.fix
