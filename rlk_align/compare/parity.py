"""The precheck: before any number, are both sides given the same thing?

A mismatch is not drift. It is reported as what it is: a token span, a parameter or an
attribute, and where it is first.
"""

from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from rlk_align.compare.own_value import round_to_own_value
from rlk_align.compare.parity_weights import check_weights
from rlk_align.model.sites import RowIndex
from rlk_align.results import Kind, Mismatch, SideName
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import SHIFT_IS_HARMLESS, PassRecord, PositionRecord

FREQUENCIES = "rope_frequencies"
"""The attribute that says that a side's inverse frequencies were rounded; a side without it has
those of the checkpoint."""
DROPOUT = "dropout"
"""The attribute that says where a model drops values; a side without it drops none."""
UNSET_AGREES = frozenset({"padding_side"})
"""Attributes that a side without them does not contradict."""


def check_parity(rollout: Trace, train: Trace) -> list[Mismatch]:
    """Every mismatch, tokens first, in the order of samples, parameters and attributes."""
    attributes = _attributes(rollout.record.attributes, train.record.attributes)
    # Another rotary embedding turns by other angles: no position can be told from them.
    attributes += _frequencies(rollout, train)
    same_rotary = not any("rope" in m.name for m in attributes)
    return [
        *_tokens(rollout, train),
        *check_weights(rollout, train),
        *attributes,
        *(_positions(rollout, train) if same_rotary else ()),
        *_dropout(rollout, train),
        *_boundaries(rollout, train),
        *_padding(rollout, train),
    ]


def _frequencies(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Sides whose rotary embedding turns by frequencies that were rounded, where the other's were
    not rounded likewise."""
    said = {s: t.record.attributes.get(FREQUENCIES) for s, t in _sides(rollout, train)}
    if said["rollout"] != said["train"]:
        yield Mismatch(
            kind="attributes",
            name=FREQUENCIES,
            rollout=said["rollout"] or "exact",
            train=said["train"] or "exact",
            detail="the later a position, the more its angles are off: keep inv_freq in float32. "
            "What casts a whole model rounds it: model.to(dtype), DeepSpeed before 0.19.2 and with "
            "buffer_dtype, and zero.Init",
        )


def _dropout(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Sides whose model is in training mode and drops values at random."""
    said = {s: t.record.attributes.get(DROPOUT) for s, t in _sides(rollout, train)}
    for side, where in said.items():
        if where is not None:
            yield Mismatch(
                kind="attributes",
                name=DROPOUT,
                rollout=said["rollout"] or "none",
                train=said["train"] or "none",
                detail=f"the {side} model is in training mode and drops values at random: "
                "call model.eval(), or set its dropout to 0",
            )


def _tokens(rollout: Trace, train: Trace) -> list[Mismatch]:
    """The scored ids of both sides, and what each side's own tokenizer makes of the prompts."""
    mismatches = []
    a, b = rollout.tokens.samples, train.tokens.samples
    for i in range(max(len(a), len(b))):
        if i >= len(a) or i >= len(b):
            name = (a[i] if i < len(a) else b[i]).prompt_id
            lengths = (f"{len(a)} samples", f"{len(b)} samples")
            mismatches.append(_mismatch("tokens", name, *lengths, sample=i, position=0))
            break
        if a[i].prompt_ids != b[i].prompt_ids or a[i].response_ids != b[i].response_ids:
            mismatches.append(_span(a[i].prompt_id, i, list(a[i].ids), list(b[i].ids)))
    if mismatches:
        return mismatches
    for i, s in enumerate(a):
        ids = [side.record.prompt_ids.get(s.prompt_id, []) for side in (rollout, train)]
        if ids[0] != ids[1]:
            mismatches.append(_span(s.prompt_id, i, *ids))
    return mismatches


def _span(name: str, sample: int, a: list[int], b: list[int]) -> Mismatch:
    """The first mismatched span, without what is equal before and after it."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    start = min(len(a), len(b)) if start is None else start
    a, b = a[start:], b[start:]
    for tag, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            where = start + a0
            return _mismatch("tokens", name, a[a0:a1], b[b0:b1], sample=sample, position=where)
    return _mismatch(
        "tokens",
        name,
        "same ids, split differently into prompt and response",
        "",
        sample=sample,
        position=0,
    )


def _positions(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Rows that a side rotated by another position than their own, by side the first."""

    def rotated(trace: Trace, name: str) -> bool:
        return bool(trace.read_pass(name).record.positions.first)

    for side, name, record in _first_wrong(rollout, train, rotated):
        first = record.positions.first[0]
        yield Mismatch(
            kind="attributes",
            name="position",
            rollout=first.effective if side == "rollout" else first.position,
            train=first.effective if side == "train" else first.position,
            sample=first.sample,
            position=first.position,
            detail=f"{side} {name}: {record.positions.wrong} of {record.positions.checked} "
            f"rows are rotated by a position that is not their own{_harmless(record.positions)}",
        )


def _harmless(positions: PositionRecord) -> str:
    """What follows where the positions of each sequence are shifted by one number."""
    if not positions.harmless:
        return ""
    return f"; all queries and keys are shifted by {positions.shift_words}; {SHIFT_IS_HARMLESS}"


def _boundaries(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Rows whose attention sees another sequence, or not their own, by side the first. A side that
    does not repeat its attention tells nothing of it."""
    sides = dict(_sides(rollout, train))
    for side, name, record in _first_wrong(rollout, train, _crossed):
        if not _repeats(sides[side], name, "layers.0.attn"):
            continue
        first = record.boundaries.first[0]
        expected = "itself alone" if first.position == 0 else "other tokens"
        yield Mismatch(
            kind="attributes",
            name="sequence_boundary",
            rollout=f"sees {first.sees if side == 'rollout' else expected}",
            train=f"sees {first.sees if side == 'train' else expected}",
            sample=first.sample,
            position=first.position,
            detail=f"{side} {name}: {record.boundaries.wrong} rows attend across the "
            "boundaries of their sequences",
        )


def _crossed(trace: Trace, name: str) -> bool:
    """Whether a pass has rows that see another sequence, or not their own, which are no rows that
    give themselves nearly all weight."""
    record = trace.read_pass(name).record.boundaries
    alone = all(row.sees == "itself alone" for row in record.first)
    return bool(record.wrong) and not (alone and round_to_own_value(trace, name))


def _repeats(trace: Trace, name: str, site: str) -> bool:
    """Whether a pass, run again, gave a site the same bits; as far as is known."""
    if not trace.has_pass(f"{name}.repeat"):
        return True
    index = RowIndex(trace.tokens)
    first, again = (read_rows(trace.read_pass(n), site, index) for n in (name, f"{name}.repeat"))
    if first is None or again is None or not np.array_equal(first.number, again.number):
        return first is again
    return np.array_equal(first.rows.digest[first.at], again.rows.digest[again.at])


def _padding(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Logits with more columns than the vocabulary has tokens, on one side alone or on both: the
    rows are compared over the vocabulary."""
    columns, vocab = {}, rollout.record.shape.vocab
    for side, trace in _sides(rollout, train):
        records = (trace.read_pass(n).record for n in ("decode", "prefill") if trace.has_pass(n))
        logits = [r.sites["logits"] for r in records if "logits" in r.sites]
        columns[side] = max((s.features + s.padding for s in logits), default=vocab)
    if max(columns.values()) > vocab:
        yield Mismatch(
            kind="attributes",
            name="logits_columns",
            rollout=columns["rollout"],
            train=columns["train"],
            detail=f"the vocabulary has {vocab:,} tokens; logits are compared over their columns, "
            "and the columns beyond them are padding",
            stops=False,
        )


def _first_wrong(
    rollout: Trace, train: Trace, wrong: Callable[[Trace, str], bool]
) -> Iterator[tuple[SideName, str, PassRecord]]:
    """(side, pass, record) of the first observed pass of each side that has a wrong row."""
    for side, trace in _sides(rollout, train):
        for name in ("decode", "prefill"):
            if trace.has_pass(name) and wrong(trace, name):
                yield side, name, trace.read_pass(name).record
                break


def _sides(rollout: Trace, train: Trace) -> tuple[tuple[SideName, Trace], ...]:
    return ("rollout", rollout), ("train", train)


def _attributes(a: dict[str, Any], b: dict[str, Any]) -> list[Mismatch]:
    """Names each attribute that differs, by layer where a side has `layers.i.NAME` beside NAME."""
    mismatches = []
    by_layer = {name.split(".", 2)[2] for name in [*a, *b] if name.startswith("layers.")}
    whole = (n for n in [*a, *b] if not n.startswith("layers.") and n not in (DROPOUT, FREQUENCIES))
    for name in dict.fromkeys(whole):
        names = [name]
        if name in by_layer:
            layers = range(max(_layers(a), _layers(b)))
            names = [f"layers.{i}.{name}" for i in layers]
        mismatches += [
            _mismatch("attributes", n, a.get(n, a.get(name)), b.get(n, b.get(name)))
            for n in names
            if _differ(name, a.get(n, a.get(name)), b.get(n, b.get(name)))
        ]
    return mismatches


def _differ(name: str, a: Any, b: Any) -> bool:
    return a != b and not (name in UNSET_AGREES and None in (a, b))


def _layers(attributes: dict[str, Any]) -> int:
    """How many layers a side has, or at least speaks of."""
    named = [int(n.split(".")[1]) + 1 for n in attributes if n.startswith("layers.")]
    return max([int(attributes.get("layers", 0)), *named])


def _mismatch(
    kind: Kind,
    name: str,
    rollout: Any,
    train: Any,
    sample: int | None = None,
    position: int | None = None,
) -> Mismatch:
    return Mismatch(
        kind=kind, name=name, rollout=rollout, train=train, sample=sample, position=position
    )
