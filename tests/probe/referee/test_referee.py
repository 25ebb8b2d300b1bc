"""The referee on traces of tiny real checkpoints, healthy and with each fault."""

import functools
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from synthetic import Values, all_cells, compared, keep_all, seal, write_trace
from tiny import BATCH, CONFIGS, Array, Engine, Fault, checkpoint, live_weights

from rlk_align.judge.contract import STATISTICS
from rlk_align.judge.verdict import Verdict, judge_by, over_budget
from rlk_align.model.edges import EDGES, passes_for
from rlk_align.model.shape import read_shape
from rlk_align.probe.referee import referee as module
from rlk_align.probe.referee.referee import referee
from rlk_align.probe.referee.settings import sliding_window
from rlk_align.results import Comparison, RefereedUnit
from rlk_align.trace.reader import Trace

FIRST = ("prefill_vs_train",)
SIDES = ("rollout", "train")
KEPT = tempfile.TemporaryDirectory(prefix="rlk-tiny-")
"""A folder that exists as long as the tests run."""


@functools.cache
def model(family: str, changes: str = "{}") -> Path:
    folder = Path(tempfile.mkdtemp(dir=KEPT.name))
    return checkpoint(folder, family, **json.loads(changes))


@functools.cache
def healthy(family: str, norm_twice: bool = False, tp: int = 1) -> Values:
    return Engine(model(family), tp, norm_twice).values()


@functools.cache
def healthy_trace(family: str, norm_twice: bool = False) -> Trace:
    folder = Path(tempfile.mkdtemp(dir=KEPT.name))
    return trace(folder / "trace", healthy(family, norm_twice), family)


def trace(
    folder: Path, values: Values, family: str, of: Path | None = None, **options: Any
) -> Trace:
    of = of or model(family)
    shape = read_shape(model(family))
    record = {"model": str(of), "shape": shape, "attributes": {"temperature": 1.0}}
    record |= options.pop("record", {})
    sites = Engine(model(family)).sites
    options = {"batch": BATCH, "sites": sites, "controls": ("untapped",)} | options
    options = {"weights": live_weights(model(family))} | options
    return write_trace(folder, values, record=record, **options)


def refereed(
    rollout: Trace,
    train: Trace,
    judged: Sequence[str] = FIRST,
    contract: str = "bf16",
    allowed: Sequence[str] = ("attributes",),
) -> Verdict:
    comparison = compared(rollout, train, judged, allowed)
    units = referee(comparison, rollout, train, lambda *_: None)
    return judge_by(comparison.model_copy(update={"referee": units}), contract)


def verdict_of(
    folder: Path, rollout: Values, train: Values, family: str = "qwen3", **options: Any
) -> Verdict:
    sides = {"rollout": rollout, "train": train}
    traces = [trace(folder / s, v, family, **options) for s, v in sides.items()]
    return refereed(*traces)


def named(verdict: Verdict) -> list[tuple[str, str | None]]:
    (edge, *_) = verdict.comparison.edges
    return [(o.unit.site, o.side) for o in over_budget(verdict, edge)]


def units(verdict: Verdict) -> dict[tuple[str, str], RefereedUnit]:
    return {(u.side, u.site): u for u in verdict.comparison.referee}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_healthy_pair_is_within_its_budgets(tmp_path: Path, family: str) -> None:
    rollout, train = healthy(family), healthy(family, norm_twice=True)
    verdict = verdict_of(tmp_path, rollout, train, family)
    assert named(verdict) == []
    by_site = units(verdict)
    assert len(by_site) == 2 * len(Engine(model(family)).sites)
    for (side, site), unit in by_site.items():
        assert unit.errors is not None, (side, site, unit.reason)
        most = 2.0 if site.endswith("norm") and side == "train" else 1.2
        # Half of a llama's head is not rotated here, and so not rounded. A bias allows a rounding
        # of the product before it. Attention rounds only its output here, but its unit allows more.
        least = {"embed": 0.0, "logprob": 0.2}.get(site, 0.3 if site.endswith(".attn") else 0.6)
        assert least <= unit.errors.rms <= most, (side, site, unit.errors)
    differing = {s.site for s in verdict.comparison.edges[0].sites if s.differ}
    checked = {c.site for c in verdict.checks if c.side}
    assert len(differing) > 0.9 * len(by_site) / 2
    assert checked == differing, "what is equal on both sides is not judged"


def test_partial_sums_of_ranks_are_no_fault(tmp_path: Path) -> None:
    rollout, train = healthy("llama"), healthy("llama", norm_twice=True, tp=2)
    one = trace(tmp_path / "one", rollout, "llama")
    two = trace(tmp_path / "two", train, "llama", record={"options": {"tp": 2}})
    assert named(refereed(one, two)) == []
    told = trace(tmp_path / "told", train, "llama")
    # `o_proj` has a bias, which allows one more rounding.
    assert named(refereed(one, told)) == [(f"layers.{i}.down_proj", "train") for i in (0, 1)]
    # With the kernels, ranks do not add up rounded parts, so the fault is named, too.
    with_kernels = {"tp": 2, "kernels": "rlk"}
    summed = trace(tmp_path / "summed", train, "llama", record={"options": with_kernels})
    assert named(refereed(one, summed)) == named(refereed(one, told))
    left = with_kernels | {"except": "down_proj+o_proj"}
    assert (
        named(refereed(one, trace(tmp_path / "l", train, "llama", record={"options": left}))) == []
    )


def scaled(by: float, where: Any = ...) -> Fault:
    def fault(exact: Array, _: Mapping[str, Array]) -> Array:
        exact = exact.copy()
        exact[:, where] *= by
        return exact

    return fault


def shifted(by: float, feature: int) -> Fault:
    def fault(exact: Array, _: Mapping[str, Array]) -> Array:
        exact = exact.copy()
        exact[:, feature] += by
        return exact

    return fault


def stale(exact: Array, _: Mapping[str, Array]) -> Array:
    """One row is a copy of the row before it."""
    exact = exact.copy()
    exact[7] = exact[6]
    return exact


def of_other_rows(exact: Array, _: Mapping[str, Array]) -> Array:
    """Each row is the exact next one."""
    return np.roll(exact, -1, axis=0)


def placed(value: float) -> Fault:
    def fault(exact: Array, _: Mapping[str, Array]) -> Array:
        exact = exact.copy()
        exact[5, 3 % exact.shape[1]] = value
        return exact

    return fault


def wrong_token(exact: Array, seen: Mapping[str, Array]) -> Array:
    """One id has the embedding of another id of the batch."""
    ids = seen["ids"]
    table = Engine(model("qwen3")).weights["embed_tokens.weight"]
    return table[np.where(ids == BATCH.samples[0].ids[20], BATCH.samples[0].ids[2], ids)]


def position_off(exact: Array, seen: Mapping[str, Array]) -> Array:
    return Engine(model("qwen3"))._turned(seen["layers.1.k_norm"], ahead=1)


def no_mask(_: Array, seen: Mapping[str, Array]) -> Array:
    """Every row attends to itself only."""
    values = seen["layers.0.v_proj"].reshape(-1, 2, 16)
    return np.repeat(values, 2, axis=1).reshape(len(values), -1)


def temperature(exact: Array, seen: Mapping[str, Array]) -> Array:
    scores = seen["logits"] / 1.1
    total = np.log(np.exp(scores).sum(axis=1))
    return (scores[np.arange(len(scores)), np.roll(seen["ids"], -1)] - total)[:, None]


def twice(_: Array, seen: Mapping[str, Array]) -> Array:
    return seen["layers.0.attn_residual"] + 2 * seen["layers.0.down_proj"]


def swapped(_: Array, seen: Mapping[str, Array]) -> Array:
    up = seen["layers.1.up_proj"]
    return up / (1 + np.exp(-up)) * seen["layers.1.gate_proj"]


FAULTS: dict[str, tuple[str, Fault]] = {
    "a token's embedding is another's": ("embed", wrong_token),
    "a norm scaled": ("layers.0.attn_norm", scaled(1.01)),
    "a norm's row is stale": ("layers.1.mlp_norm", stale),
    "a projection scaled": ("layers.0.q_proj", scaled(1.02)),
    "a projection's row is stale": ("layers.0.k_proj", stale),
    "a feature shifted": ("layers.1.v_proj", shifted(0.1, 11)),
    "a channel of the norm of q": ("layers.1.q_norm", scaled(1.1, slice(3, None, 16))),
    "one entry of the norm of k": ("layers.0.k_norm", placed(30.0)),
    "rope of other rows": ("layers.0.q_rope", of_other_rows),
    "rope a position ahead": ("layers.1.k_rope", position_off),
    "attention without a past": ("layers.0.attn", no_mask),
    "a head of attention": ("layers.1.attn", scaled(0.9, slice(16, 32))),
    "attention's row is stale": ("layers.1.attn", stale),
    "attention's output": ("layers.1.o_proj", scaled(0.0)),
    "a residual scaled": ("layers.1.attn_residual", scaled(1.02)),
    "a residual added twice": ("layers.0.mlp_residual", twice),
    "NaN in a product": ("layers.0.gate_proj", placed(math.nan)),
    "infinity in a product": ("layers.1.up_proj", placed(math.inf)),
    "gate and up swapped": ("layers.1.act", swapped),
    "down scaled": ("layers.0.down_proj", scaled(0.98)),
    "final norm scaled": ("final_norm", scaled(1.02)),
    "logits scaled": ("logits", scaled(1.02)),
    "temperature": ("logprob", temperature),
}


@pytest.mark.parametrize(("name", "side"), [*zip(FAULTS, itertools.cycle(SIDES), strict=False)])
def test_a_planted_fault_is_named_on_its_side(tmp_path: Path, name: str, side: str) -> None:
    site, fault = FAULTS[name]
    twice_on_train = side == "rollout"
    faulty = Engine(model("qwen3"), norm_twice=not twice_on_train).values({site: fault})
    of = trace(tmp_path / "faulty", faulty, "qwen3")
    clean = healthy_trace("qwen3", norm_twice=twice_on_train)
    verdict = refereed(of, clean) if side == "rollout" else refereed(clean, of)
    found = named(verdict)
    assert found[:1] == [(site, side)]
    # After a NaN all values are NaN: the limit `finite` reports them, and no operator is named.
    rest = [] if "NaN" in name or "infinity" in name else found[1:]
    assert rest == []
    assert any(c.site == site and c.side == side for c in verdict.breaches)


def test_both_sides_may_be_off(tmp_path: Path) -> None:
    rollout = Engine(model("qwen3")).values({"layers.0.q_proj": scaled(1.02)})
    train = Engine(model("qwen3"), norm_twice=True).values({"layers.0.q_proj": scaled(0.98)})
    assert named(verdict_of(tmp_path, rollout, train)) == [("layers.0.q_proj", "both")]


def test_two_faults_in_two_places_are_both_named(tmp_path: Path) -> None:
    rollout = Engine(model("qwen3")).values({"layers.1.act": swapped})
    train = Engine(model("qwen3"), norm_twice=True).values({"layers.0.attn": no_mask})
    wanted = [("layers.0.attn", "train"), ("layers.1.act", "rollout")]
    assert named(verdict_of(tmp_path, rollout, train)) == wanted


def test_the_same_fault_on_both_sides_is_measured_and_not_judged(tmp_path: Path) -> None:
    values = Engine(model("qwen3")).values({"layers.0.q_proj": scaled(1.02)})
    verdict = verdict_of(tmp_path, values, values)
    assert named(verdict) == []
    assert not [c for c in verdict.checks if c.side]
    assert units(verdict)["train", "layers.0.q_proj"].errors.rms > 5


def test_a_pass_with_the_same_bits_is_not_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = healthy("qwen3")
    rollout = trace(tmp_path / "a", values, "qwen3", passes=passes_for(EDGES, "rollout"))
    train = trace(tmp_path / "b", healthy("qwen3", norm_twice=True), "qwen3")
    calls: list[tuple[str, str]] = []
    once = module.Walk._sums

    def counted(self: Any, site: Any, of: Any, *rest: Any) -> Any:
        calls.append((of.side, of.name))
        return once(self, site, of, *rest)

    monkeypatch.setattr(module.Walk, "_sums", counted)
    found = refereed(rollout, train, EDGES).comparison.referee
    assert set(calls) == {("rollout", "decode"), ("train", "prefill")}
    monkeypatch.setattr(module.RecordedPass, "same", lambda *_: False)
    again = refereed(rollout, train, EDGES).comparison.referee
    assert again == found
    assert {u.passname for u in found if u.side == "rollout"} == {"decode", "prefill"}


def test_a_decode_that_differs_in_one_row_is_recomputed(tmp_path: Path) -> None:
    values = healthy("qwen3")
    spoilt = {k: v.clone() for k, v in values.items()}
    row = all_cells(BATCH).index((0, 12))
    spoilt["layers.0.v_proj"][row] *= 1.5
    decode = trace(tmp_path / "d", spoilt, "qwen3", passes=("decode",))
    whole = trace(tmp_path / "a", values, "qwen3", passes=("decode", "prefill"))
    shutil.rmtree(whole.folder / "decode")
    shutil.copytree(decode.folder / "decode", whole.folder / "decode")
    seal(whole.folder)
    train = trace(tmp_path / "b", healthy("qwen3", norm_twice=True), "qwen3")
    verdict = refereed(Trace(whole.folder), train, EDGES)
    off = {
        e.name: [(o.unit.site, o.side) for o in over_budget(verdict, e)]
        for e in verdict.comparison.edges
    }
    assert off["prefill_vs_train"] == []
    assert off["decode_vs_prefill"] == [("layers.0.v_proj", "rollout")]
    # Attention did not read the changed row, so it is named, too, on the edge where it differs.
    both = [("layers.0.v_proj", "rollout"), ("layers.0.attn", "rollout")]
    assert off["decode_vs_train"] == both


def reasons(verdict: Verdict, side: str = "train") -> dict[str, str]:
    return {u.site: u.reason for u in verdict.comparison.referee if u.side == side and u.reason}


def pair(tmp_path: Path, family: str = "qwen3", **train: Any) -> Verdict:
    """A healthy pair whose training side is recorded with these options."""
    other = train.pop("values", healthy(family, norm_twice=True))
    return refereed(healthy_trace(family), trace(tmp_path / "b", other, family, **train))


def every(verdict: Verdict, text: str) -> None:
    why = reasons(verdict)
    assert len(why) == len(verdict.comparison.referee) / 2
    assert all(text in reason for reason in why.values()), why
    assert not [c for c in verdict.checks if c.side == "train"]
    assert [c for c in verdict.checks if c.side == "rollout"]
    (note,) = [n for n in verdict.notes if "float64" in n]
    assert text in note
    assert "from train prefill embed on" in note


def test_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    every(pair(tmp_path, of=tmp_path / "gone"), "no model at")


@pytest.mark.parametrize("harm", ["json", "no weights", "weights"])
def test_a_checkpoint_that_cannot_be_read(tmp_path: Path, harm: str) -> None:
    folder = checkpoint(tmp_path / "model", "qwen3")
    if harm == "json":
        (folder / "config.json").write_text("{")
    elif harm == "weights":
        (folder / "model.safetensors").write_bytes(b"12345678 nothing")
    else:
        (folder / "model.safetensors").unlink()
    every(pair(tmp_path, of=folder), "the checkpoint cannot be read")


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "qwen3", quantization_config={"bits": 8})
    every(pair(tmp_path, of=folder), "its weights are quantised")


def test_tensors_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    def harm(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(20)

    why = reasons(pair(tmp_path, of=stored(tmp_path / "model", harm)))
    assert why.keys() == {"layers.0.q_proj", "final_norm"}
    assert "has no model.layers.0.self_attn.q_proj.weight" in why["layers.0.q_proj"]
    assert "[20] instead of [40]" in why["final_norm"]


def stored(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The tiny model with changed tensors."""
    folder = checkpoint(folder, "qwen3")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_checkpoint_that_was_replaced_since(tmp_path: Path) -> None:
    """The changes of another training step are not called a fault of the engine."""

    def step(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("layers.1.self_attn.o_proj", "layers.0.post_attention_layernorm"):
            tensors[f"model.{name}.weight"] *= 1.03

    verdict = pair(tmp_path, of=stored(tmp_path / "model", step))
    assert named(verdict) == []
    why = reasons(verdict)
    assert why.keys() == {"layers.1.o_proj", "layers.0.mlp_norm"}
    assert "the layers.1.o_proj in its engine differs from the checkpoint" in why["layers.1.o_proj"]
    (note,) = [n for n in verdict.notes if "float64" in n]
    assert "the layers.0.mlp_norm in its engine differs from the checkpoint" in note


def test_a_weight_of_the_engines_own_is_not_held_against_the_checkpoints(tmp_path: Path) -> None:
    """A patch may change a weight; the operators with this weight are then different ones."""
    own = live_weights(model("qwen3"))
    own["layers.0.up_proj"] = own["layers.0.up_proj"] * 1.02
    own["lm_head"] = own["lm_head"] * 1.02
    del own["layers.1.down_proj"]
    faults = {s: scaled(1.02) for s in ("layers.0.up_proj", "layers.1.down_proj", "logits")}
    values = Engine(model("qwen3"), norm_twice=True).values(faults)
    other = trace(tmp_path / "b", values, "qwen3", weights=own)
    verdict = refereed(healthy_trace("qwen3"), other, allowed=("attributes", "weights"))
    assert reasons(verdict).keys() == {"layers.0.up_proj", "layers.1.down_proj", "logits"}
    assert reasons(verdict)["layers.1.down_proj"] == "its engine showed no layers.1.down_proj"
    assert "the lm_head in its engine differs" in reasons(verdict)["logits"]
    # The sides differ by too much, but it is unknown which one is off.
    assert {side for _, side in named(verdict)} <= {None}


def test_a_master_copy_in_another_dtype_is_the_same_weight(tmp_path: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, value in tensors.items():
            finer = 1 + 1e-3 * torch.rand(value.shape, generator=generator)
            tensors[name] = value.float() * finer

    wide = stored(tmp_path / "model", widen)
    values = Engine(rounded_copy(tmp_path / "bf16", wide), norm_twice=True).values()
    master, rounded = live_weights(wide), live_weights(tmp_path / "bf16")
    for number, weights in enumerate((master, rounded)):
        alone = trace(tmp_path / str(number), values, "qwen3", of=wide, weights=weights)
        verdict = refereed(healthy_trace("qwen3"), alone, allowed=("attributes", "weights"))
        assert (reasons(verdict), named(verdict)) == ({}, [])


def rounded_copy(folder: Path, of: Path) -> Path:
    """A checkpoint in bfloat16."""
    shutil.copytree(of, folder)
    tensors = {n: t.bfloat16() for n, t in load_file(of / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "sites", "text"),
    [
        ({"hidden_act": "swish9"}, {"act"}, "hidden_act=swish9 has no formula"),
        (
            {"rms_norm_eps": None},
            {"attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm"},
            "no rms_norm_eps",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, {"q_rope", "k_rope"}, "its rotary embedding"),
    ],
)
def test_what_no_formula_covers(
    tmp_path: Path, changes: dict[str, Any], sites: set[str], text: str
) -> None:
    why = reasons(pair(tmp_path, of=checkpoint(tmp_path / "model", "qwen3", **changes)))
    assert {name.rpartition(".")[2] for name in why} == sites
    assert all(text in reason for reason in why.values())


def test_log_probs_within_top_p_are_not_refereed(tmp_path: Path) -> None:
    verdict = pair(tmp_path, record={"attributes": {"top_p": 0.9}})
    assert reasons(verdict) == {"logprob": "its log-probs are of the tokens within top_p"}


def test_a_temperature_is_the_sides_own(tmp_path: Path) -> None:
    values = healthy("qwen3", norm_twice=True) | {
        "logprob": Engine(model("qwen3"), norm_twice=True).values({"logprob": temperature})[
            "logprob"
        ]
    }
    assert named(pair(tmp_path, values=values, record={"attributes": {"temperature": 1.1}})) == []


def test_sites_that_an_engine_does_not_show(tmp_path: Path) -> None:
    hidden = {"layers.0.attn": None, "layers.1.gate_proj": None}
    said = dict.fromkeys(hidden, "fused")
    why = reasons(pair(tmp_path, without=hidden, unexposed=said))
    assert why == {
        **{name: f"{name}: fused" for name in hidden},
        "layers.0.o_proj": "layers.0.attn: fused",
        "layers.1.act": "layers.1.gate_proj: fused",
    }
    assert "was not recorded" in reasons(pair(tmp_path / "2", without=hidden))["layers.0.attn"]


def test_rows_whose_values_were_not_kept(tmp_path: Path) -> None:
    def keep(site: str, sample: Array, position: Array) -> Array:
        if site == "layers.1.down_proj":
            return np.zeros(len(sample), dtype=bool)
        if site == "layers.1.k_rope":
            return (sample != 0) | (position != 3)
        return sample != 1

    verdict = pair(tmp_path, keep=lambda *a: keep(*a) | (a[0] == "logprob"))
    assert named(verdict) == []
    by_site = units(verdict)
    nothing = "no row has finite inputs that were all kept"
    assert reasons(verdict) == dict.fromkeys(
        ("layers.1.down_proj", "layers.1.mlp_residual"), nothing
    )
    lengths = [len(s.ids) - 1 for s in BATCH.samples]
    kept = sum(lengths) - lengths[1]
    assert by_site["train", "layers.1.q_norm"].rows == kept
    assert by_site["train", "layers.1.k_rope"].rows == kept - 1
    # Attention needs every key up to its row, and sample 0 has three of them.
    assert by_site["train", "layers.1.attn"].rows == kept - lengths[0] + 3
    assert by_site["rollout", "layers.1.attn"].rows == sum(lengths)


def test_a_fault_is_named_by_the_rows_that_a_small_budget_keeps(tmp_path: Path) -> None:
    """Few rows were recorded, and attention's keys and values only for one sequence."""
    rows = [(0, p) for p in (3, 8, 15, 22, 30)] + [(3, 12), (4, 20)]

    def keep(site: str, sample: Array, position: Array) -> Array:
        drawn = np.array([c in rows for c in zip(sample, position, strict=True)], dtype=bool)
        read = (sample == 0) & (site.endswith("k_rope") or site.endswith("v_proj"))
        return drawn | read | (site == "logprob")

    faulty = Engine(model("qwen3"), norm_twice=True).values({"layers.1.attn": scaled(0.95)})
    for number, (values, named_here) in enumerate(
        [(healthy("qwen3", norm_twice=True), []), (faulty, [("layers.1.attn", "train")])]
    ):
        folder = tmp_path / str(number)
        verdict = verdict_of(folder, healthy("qwen3"), values, keep=keep)
        assert named(verdict) == named_here
        by_site = units(verdict)
        assert by_site["train", "layers.1.attn"].rows == 5
        assert by_site["train", "layers.1.q_norm"].rows == 7


def test_no_values_at_all(tmp_path: Path) -> None:
    verdict = pair(tmp_path, keep=lambda site, s, p: keep_all(site, s, p) & (site == "logprob"))
    left = {u.site for u in verdict.comparison.referee if u.side == "train" and u.errors}
    assert left == set()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_reads_a_nan_is_not_judged_by_it(tmp_path: Path, bad: float) -> None:
    values = {k: v.clone() for k, v in healthy("qwen3", norm_twice=True).items()}
    row = all_cells(BATCH).index((0, 5))
    values["layers.1.v_proj"][row, 2] = bad
    verdict = pair(tmp_path, values=values)
    assert named(verdict)[0] == ("layers.1.v_proj", "train")
    found, rows = units(verdict), len(all_cells(BATCH)) - len(BATCH.samples)
    assert math.isinf(found["train", "layers.1.v_proj"].errors.rms)
    assert found["train", "layers.1.v_proj"].rows == rows
    assert found["train", "layers.1.attn"].rows == rows - (len(BATCH.samples[0].ids) - 1 - 5)
    assert found["train", "layers.1.attn"].errors.rms < 1.2


def test_a_stopped_comparison_is_not_refereed(tmp_path: Path) -> None:
    one = trace(tmp_path / "a", healthy("qwen3"), "qwen3")
    two = trace(tmp_path / "b", healthy("qwen3"), "qwen3", weights={"embed": torch.zeros(16, 8)})
    comparison: Comparison = compared(one, two)
    assert comparison.stopped
    assert referee(comparison, one, two, lambda *_: None) == []


@pytest.mark.parametrize("entries", [1000, 1 << 20])
def test_blocks_of_any_size_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    usual = pair(tmp_path / "usual", "qwen2").comparison.referee
    for name in ("CPU_ELEMENTS", "PRODUCT_ELEMENTS"):
        monkeypatch.setattr(module, name, entries)
    monkeypatch.setattr("rlk_align.probe.referee.reference.WEIGHT_ELEMENTS", entries)
    monkeypatch.setattr("rlk_align.probe.referee.recorded._MOST_CACHED_ENTRIES", entries)
    for a, b in zip(usual, pair(tmp_path / "small", "qwen2").comparison.referee, strict=True):
        assert (a.rows, a.reason) == (b.rows, b.reason)
        for name in STATISTICS:
            assert abs(getattr(a.errors, name) - getattr(b.errors, name)) < 1e-9, (a.site, name)


WINDOWS = [
    ("mistral", {"sliding_window": 5}, [5, 5]),
    ("mistral", {"sliding_window": None}, [None, None]),
    ("mistral", {}, [4096, 4096]),
    ("llama", {"sliding_window": 5}, [None, None]),
    ("qwen2", {"sliding_window": 5}, [None, None]),
    ("qwen3", {"sliding_window": 5, "use_sliding_window": False}, [None, None]),
    ("qwen3", {"sliding_window": 5, "use_sliding_window": True}, [None, None]),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, [None, 5]),
    (
        "qwen2",
        {
            **{"sliding_window": 5, "use_sliding_window": True},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [5, None],
    ),
]


@pytest.mark.parametrize(("family", "given", "windows"), WINDOWS)
def test_windows_are_those_of_transformers(
    tmp_path: Path, family: str, given: dict[str, Any], windows: list[int | None]
) -> None:
    folder = checkpoint(tmp_path / "m", family)
    config = tiny.SIZES | {"model_type": family} | given
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_shape(folder)
    assert [sliding_window(config, shape, i) for i in range(2)] == windows
    if family == "llama":
        return
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(folder)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 2
    sliding = [theirs.sliding_window if k == "sliding_attention" else None for k in kinds]
    assert sliding == windows
