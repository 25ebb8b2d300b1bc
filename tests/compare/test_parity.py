"""The precheck names the first span, parameter or attribute in which the sides differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import BATCH, SHAPE, all_cells, corrupt, draw, seal, write_trace, write_weights

from rlk_align.compare.parity import check_parity
from rlk_align.engines.common.attributes import per_layer
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.results import Mismatch
from rlk_align.trace.reader import Trace
from rlk_align.trace.records import load_record, save_record
from rlk_align.trace.schema import (
    BoundaryRecord,
    PassRecord,
    PositionRecord,
    TraceRecord,
    WrongBoundary,
    WrongPosition,
)

Make = Callable[..., Trace]
WEIGHTS = {"embed": torch.arange(12.0).reshape(3, 4), "final_norm": torch.ones(4)}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a trace without passes."""

    def trace(
        name: str,
        batch: TokenBatch = BATCH,
        weights: dict[str, torch.Tensor] = WEIGHTS,
        attributes: dict[str, Any] | None = None,
        prompt_ids: dict[str, list[int]] | None = None,
    ) -> Trace:
        folder = tmp_path / name
        folder.mkdir()
        batch.save(folder / "tokens.parquet")
        write_weights(folder, weights)
        ids = prompt_ids or {s.prompt_id: list(s.prompt_ids) for s in BATCH.samples}
        record = TraceRecord(
            key="k",
            engine="hf",
            version="1",
            options={},
            model="m",
            shape=SHAPE,
            dtype="bfloat16",
            environment={},
            attributes=attributes or {},
            prompt_ids=ids,
        )
        save_record(record, folder / "trace.json")
        (folder / "prompts.jsonl").write_text("")
        seal(folder)
        return Trace(folder)

    return trace


def test_equal_sides_have_no_mismatch(make: Make) -> None:
    attributes = {"rope_theta": 1e4, "sliding_window": None, "norm_eps": {"q": 1e-5}}
    assert check_parity(make("a", attributes=attributes), make("b", attributes=attributes)) == []


def with_ids(sample: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> TokenBatch:
    samples = list(BATCH.samples)
    samples[sample] = Sample(samples[sample].prompt_id, prompt, response)
    return TokenBatch(tuple(samples))


@pytest.mark.parametrize(
    ("other", "a", "b", "sample", "position"),
    [
        # A BOS token that one side alone puts in front.
        (with_ids(0, (0, 1, 2, 3), (4, 5, 6, 7)), [], [0], 0, 0),
        # One id for another.
        (with_ids(1, (1, 3), (2, 9, 15, 7, 6)), [8], [15], 1, 4),
        # The end is cut off.
        (with_ids(2, (5,), (5, 4, 3)), [2, 1, 0], [], 2, 4),
        # Two places: the first is named.
        (with_ids(0, (1, 9, 3), (4, 5, 6, 8)), [2], [9], 0, 1),
        # Two BOS tokens: the first of them is on both sides.
        (with_ids(0, (1, 1, 2, 3), (4, 5, 6, 7)), [], [1], 0, 1),
        # One token where the other side has two.
        (with_ids(1, (1, 3), (14, 8, 7, 6)), [2, 9], [14], 1, 2),
    ],
    ids=["BOS", "substituted", "truncated", "first of two", "double BOS", "merged"],
)
def test_the_first_span_of_other_ids_is_named(
    make: Make, other: TokenBatch, a: list, b: list, sample: int, position: int
) -> None:
    [mismatch] = check_parity(make("a"), make("b", batch=other))
    assert mismatch == Mismatch(
        kind="tokens",
        name=BATCH.samples[sample].prompt_id,
        rollout=a,
        train=b,
        sample=sample,
        position=position,
    )


def test_every_sample_with_other_ids_is_named(make: Make) -> None:
    other = TokenBatch(tuple(Sample(s.prompt_id, (9,), s.response_ids) for s in BATCH.samples))
    mismatches = check_parity(make("a"), make("b", batch=other))
    assert [m.sample for m in mismatches] == [0, 1, 2]


def test_another_number_of_samples_is_named(make: Make) -> None:
    fewer = TokenBatch(BATCH.samples[:2])
    for n, sides in enumerate(((BATCH, fewer), (fewer, BATCH))):
        a, b = (make(f"{n}{i}", batch=side) for i, side in enumerate(sides))
        [mismatch] = check_parity(a, b)
        assert (mismatch.kind, mismatch.name, mismatch.sample) == ("tokens", "c", 2)
        assert {mismatch.rollout, mismatch.train} == {"2 samples", "3 samples"}


def test_the_same_ids_split_otherwise_are_a_mismatch(make: Make) -> None:
    [mismatch] = check_parity(make("a"), make("b", batch=with_ids(0, (1, 2), (3, 4, 5, 6, 7))))
    assert (mismatch.kind, mismatch.sample) == ("tokens", 0)
    assert "split" in mismatch.rollout


def test_tokenizers_that_disagree_are_a_mismatch(make: Make) -> None:
    """Both scored the same ids, but the train side's own tokenizer would give others."""
    ids = {"a": [1, 2, 3], "b": [1, 7, 3], "c": [5]}
    [mismatch] = check_parity(make("a"), make("b", prompt_ids=ids))
    assert (mismatch.kind, mismatch.name) == ("tokens", "b")
    assert (mismatch.sample, mismatch.position) == (1, 1)
    assert (mismatch.rollout, mismatch.train) == ([], [7])


def test_a_prompt_that_only_one_side_knows_is_a_mismatch(make: Make) -> None:
    [mismatch] = check_parity(make("a"), make("b", prompt_ids={"a": [1, 2, 3], "c": [5]}))
    assert (mismatch.name, mismatch.rollout, mismatch.train) == ("b", [1, 3], [])


def test_a_missing_parameter_is_named(make: Make) -> None:
    fewer = {"embed": WEIGHTS["embed"]}
    mismatches = check_parity(make("a"), make("b", weights=fewer))
    assert [(m.kind, m.name, m.rollout, m.train) for m in mismatches] == [
        ("weights", "final_norm", "present", "absent")
    ]
    [mismatch] = check_parity(make("c", weights=fewer), make("d"))
    assert (mismatch.name, mismatch.rollout, mismatch.train) == ("final_norm", "absent", "present")


def test_one_changed_element_is_a_mismatch(make: Make) -> None:
    changed = {n: w.clone() for n, w in WEIGHTS.items()}
    changed["embed"][2, 3] += 1e-6
    [mismatch] = check_parity(make("a"), make("b", weights=changed))
    assert (mismatch.kind, mismatch.name) == ("weights", "embed")
    assert mismatch.rollout != mismatch.train
    assert "[3, 4]" in mismatch.rollout


def test_another_shape_of_the_same_values_is_a_mismatch(make: Make) -> None:
    flat = WEIGHTS | {"embed": WEIGHTS["embed"].reshape(4, 3)}
    [mismatch] = check_parity(make("a"), make("b", weights=flat))
    assert mismatch.name == "embed"
    assert "[4, 3]" in mismatch.train


def test_the_same_values_in_a_wider_dtype_are_the_same_weights(make: Make) -> None:
    low = {n: w.bfloat16() for n, w in WEIGHTS.items()}
    high = {n: w.float() for n, w in low.items()}
    assert check_parity(make("a", weights=low), make("b", weights=high)) == []


WINDOWS = per_layer("sliding_window", [None, 8, None])
ROPE_NAN = {"rope_theta": float("nan")}


@pytest.mark.parametrize(
    ("a", "b", "named"),
    [
        ({"rope_theta": 1e4, "x": 1}, {"rope_theta": 1e6, "x": 1}, [("rope_theta", 1e4, 1e6)]),
        (
            per_layer("activation", ["silu"] * 4),
            per_layer("activation", ["silu", "gelu", "silu", "silu"]),
            [("layers.1.activation", "silu", "gelu")],
        ),
        # An exception on the rollout side.
        (
            per_layer("head_dim", [4, 4, 8]),
            per_layer("head_dim", [4, 4, 4]),
            [("layers.2.head_dim", 8, 4)],
        ),
        # The commonest value is a summary: another one on each side is no difference by itself.
        (
            per_layer("norm_eps", [1e-5, 1e-5, 1e-6]),
            per_layer("norm_eps", [1e-5, 1e-6, 1e-6]),
            [("layers.1.norm_eps", 1e-5, 1e-6)],
        ),
        (WINDOWS, dict(reversed(WINDOWS.items())), []),
        ({"temperature": 1.0}, {}, [("temperature", 1.0, None)]),
        # The base of a rotary embedding with one pair cannot be told from its frequencies.
        (ROPE_NAN, ROPE_NAN, []),
    ],
    ids=["global", "one layer", "exception", "only layers", "same exceptions", "lacking", "NaN"],
)
def test_attributes_that_differ_are_named(
    make: Make, a: dict[str, Any], b: dict[str, Any], named: list[tuple]
) -> None:
    mismatches = check_parity(make("a", attributes=a), make("b", attributes=b))
    assert all(m.kind == "attributes" for m in mismatches)
    assert [(m.name, m.rollout, m.train) for m in mismatches] == named


def test_tokens_come_first_then_weights_then_attributes(make: Make) -> None:
    other = with_ids(1, (1, 3), (2, 9, 15, 7, 6))
    mismatches = check_parity(
        make("a", attributes={"x": 1}),
        make("b", batch=other, weights={}, attributes={"x": 2}),
    )
    assert [m.kind for m in mismatches] == ["tokens", "weights", "weights", "attributes"]


def with_pass(trace: Trace, name: str, position: int | None, boundary: int | None) -> Trace:
    """With a pass of nothing but what was measured: the first wrong row of each kind, if any."""
    turned = [WrongPosition(sample=1, position=p, effective=p + 3) for p in _given(position)]
    crossed = [WrongBoundary(sample=0, position=p, sees="other tokens") for p in _given(boundary)]
    (trace.folder / name).mkdir()
    record = PassRecord(
        sites={},
        files={},
        seconds=0.0,
        positions=PositionRecord(checked=9, wrong=len(turned), first=turned),
        boundaries=BoundaryRecord(checked=9, wrong=len(crossed), first=crossed),
    )
    save_record(record, trace.folder / name / "pass.json")
    seal(trace.folder)
    return Trace(trace.folder)


def _given(position: int | None) -> list[int]:
    return [] if position is None else [position]


def test_wrong_positions_and_boundaries_are_named_in_whichever_pass(make: Make) -> None:
    a, b = make("a"), make("b")
    a = with_pass(a, "decode", None, 0)
    a = with_pass(a, "prefill", 5, 0)
    b = with_pass(b, "prefill", None, None)
    found = {m.name: m for m in check_parity(a, b)}
    assert set(found) == {"position", "sequence_boundary"}
    position, boundary = found["position"], found["sequence_boundary"]
    assert (position.sample, position.position) == (1, 5)
    assert (position.rollout, position.train) == (8, 5)
    assert position.detail.startswith("rollout prefill: 1 of 9 rows")
    assert (boundary.rollout, boundary.train) == ("sees other tokens", "sees itself alone")
    assert boundary.detail.startswith("rollout decode")


@pytest.mark.parametrize("repeats", [True, False])
def test_boundaries_are_told_by_a_side_that_repeats_its_attention_alone(
    tmp_path: Path, repeats: bool
) -> None:
    """What drops values at random sees other values in each row, and its own neighbours alone."""
    values = draw()
    again = values if repeats else corrupt(values, "layers.0.attn", [(0, 0)])
    a = write_trace(tmp_path / "a", values)
    b = write_trace(tmp_path / "b", values, repeat=again)
    path = b.folder / "prefill" / "pass.json"
    crossed = [WrongBoundary(sample=0, position=0, sees="other tokens")]
    boundaries = BoundaryRecord(checked=9, wrong=1, first=crossed)
    record = load_record(PassRecord, path)
    path.unlink()
    save_record(record.model_copy(update={"boundaries": boundaries}), path)
    seal(b.folder)
    named = [m.name for m in check_parity(a, Trace(b.folder))]
    assert named == (["sequence_boundary"] if repeats else [])


@pytest.mark.parametrize("wrong", [1, 20])
@pytest.mark.parametrize(("sharp", "named"), [(30.0, []), (0.1, ["sequence_boundary"])])
def test_a_row_that_gives_itself_all_weight_crosses_no_boundary(
    tmp_path: Path, sharp: float, named: list[str], wrong: int
) -> None:
    """Rounding leaves nothing of the tokens before it; where it would, the row did not see them."""
    values = draw()
    position = torch.tensor([p for _, p in all_cells()])
    own = values["layers.0.v_proj"].reshape(-1, SHAPE.kv_heads, 1, SHAPE.head_dim)
    own = own.expand(-1, -1, SHAPE.heads // SHAPE.kv_heads, -1)
    alone = (position == 0) | (position == 2)
    values["layers.0.attn"][alone] = own.reshape(len(own), -1)[alone]
    for site in ("layers.0.q_rope", "layers.0.k_rope"):
        values[site][position == 2] = sharp
    a, b = write_trace(tmp_path / "a", values), write_trace(tmp_path / "b", values)
    path = b.folder / "prefill" / "pass.json"
    first = [WrongBoundary(sample=0, position=2, sees="itself alone")]
    record = load_record(PassRecord, path)
    path.unlink()
    boundaries = BoundaryRecord(checked=9, wrong=wrong, first=first)
    save_record(record.model_copy(update={"boundaries": boundaries}), path)
    seal(b.folder)
    assert [m.name for m in check_parity(a, Trace(b.folder))] == named


def test_a_shift_that_no_attention_sees_is_said_to_be_harmless(make: Make) -> None:
    trace = with_pass(make("b"), "prefill", 5, None)
    path = trace.folder / "prefill" / "pass.json"
    record = load_record(PassRecord, path)
    path.unlink()
    shifted = record.positions.model_copy(update={"shift": (3, 3)})
    save_record(record.model_copy(update={"positions": shifted}), path)
    seal(trace.folder)
    (mismatch,) = check_parity(make("a"), Trace(trace.folder))
    assert mismatch.detail.endswith(
        "all queries and keys are shifted by +3; attention reads differences of positions alone, "
        "so its output cannot change"
    )


def test_a_model_in_training_mode_is_named_on_either_side(make: Make) -> None:
    drops = {"dropout": "0.05 in model.layers.0.self_attn and 4 more modules"}
    a, b = make("a"), make("b", attributes=drops)
    (mismatch,) = check_parity(a, b)
    assert (mismatch.name, mismatch.rollout, mismatch.train) == (
        "dropout",
        "none",
        drops["dropout"],
    )
    assert mismatch.detail.startswith("the train model is in training mode")
    # Both alike is no agreement: each drops others.
    assert [m.name for m in check_parity(make("c", attributes=drops), b)] == ["dropout", "dropout"]


def test_another_rotary_embedding_tells_no_positions(make: Make) -> None:
    a, b = (make(f"{t}", attributes={"rope_theta": t}) for t in (1.0, 2.0))
    b = with_pass(b, "prefill", 5, None)
    assert [m.name for m in check_parity(a, b)] == ["rope_theta"]


def test_padding_differs_only_where_both_pad(make: Make) -> None:
    sides: list[str | None] = ["left", "right", None]
    for x in sides:
        for y in sides:
            names = (f"{x}-{y}-a", f"{x}-{y}-b")
            pair = (
                make(n, attributes={"padding_side": s}) for n, s in zip(names, (x, y), strict=True)
            )
            assert bool(check_parity(*pair)) == ({x, y} == {"left", "right"})
