"""The precheck: do both sides have the same tokens, weights and attributes?

A mismatch is not drift. The report names the token span, the parameter or the attribute, and where
the mismatch starts.
"""

from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from rlk_align.compare.own_value import round_to_own_value
from rlk_align.compare.parity_adapter import NAME, check_adapters
from rlk_align.compare.parity_merge import explain_merges
from rlk_align.compare.parity_quantised import explain_quantised, quantised_inputs
from rlk_align.compare.parity_weights import check_weights
from rlk_align.model.sites import RowIndex
from rlk_align.results import Mismatch, SideName
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import SHIFT_IS_HARMLESS, PassRecord, PositionRecord, WrongRow

FREQUENCIES = "rope_frequencies"
"""The attribute that says that a side's inverse frequencies were rounded; a side without it has
those of the checkpoint."""
DROPOUT = "dropout"
"""The attribute that names where a model drops values; a side without it drops none."""
UNSET_AGREES = frozenset({"padding_side"})
"""Attributes that agree with a side that does not state them."""


def check_parity(rollout: Trace, train: Trace) -> list[Mismatch]:
    """Returns every mismatch: tokens first, then parameters, then attributes."""
    attributes = _attributes(*_stated(rollout, train))
    attributes += _frequencies(rollout, train)
    # A different rotary embedding has other angles: positions cannot be derived from them.
    same_rotary = not any("rope" in m.name for m in attributes)
    return [
        *_tokens(rollout, train),
        *_weights(rollout, train),
        *attributes,
        *(_positions(rollout, train) if same_rotary else ()),
        *_dropout(rollout, train),
        *_boundaries(rollout, train),
        *_padding(rollout, train),
        *_recurrences(rollout, train),
        *quantised_inputs(rollout, train),
    ]


def _stated(rollout: Trace, train: Trace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of both sides, without those that an imported side does not state."""
    a, b = rollout.record, train.record
    return (
        {n: v for n, v in a.attributes.items() if n in b.attributes or not b.imported},
        {n: v for n, v in b.attributes.items() if n in a.attributes or not a.imported},
    )


def _imported(rollout: Trace, train: Trace) -> bool:
    return bool(rollout.record.imported or train.record.imported)


def _weights(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Parameters and LoRA adapters that differ; an adapter may also be in the weights."""
    differ = explain_quantised(check_weights(rollout, train), rollout, train)
    weights = explain_merges(differ, rollout, train)
    yield from weights
    if _imported(rollout, train):
        return
    adapters = [trace.record.adapters for _, trace in _sides(rollout, train)]
    known = [adapter for of_side in adapters for adapter in of_side if adapter is not None]
    merged = any(m.name == NAME and "merged" in (m.rollout, m.train) for m in weights)
    # Where one side has an adapter that is merged on the same or the other side, weights say all.
    if all(adapters) or not (merged or any(adapter.merged for adapter in known)):
        yield from check_adapters(rollout, train)


_RECURRENCE = {
    "delta_a_log_dtype": "a decay is exp(A_log), so rounding A_log changes every decay alike",
    "delta_state_dtype": "a state that is rounded after every token loses what decays slowly",
    "delta_eps": "q and k are divided by their norms, which are near the eps in weak rows only",
    "delta_chunk": "the order of sums, and nothing else",
    "mamba_state_dtype": "a state that is rounded after every token loses what decays slowly",
}
"""Attributes of gated delta nets and of state-space models that engines choose themselves -> the
effect of a difference, which the budgets of operators judge."""


def _recurrences(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Yields how the sides' engines compute recurrences differently."""
    a, b = _stated(rollout, train)
    for name in sorted({n for n in (*a, *b) if n.rpartition(".")[2] in _RECURRENCE}):
        if a.get(name) != b.get(name):
            yield Mismatch(
                kind="attributes",
                name=name,
                rollout=a.get(name),
                train=b.get(name),
                detail=_RECURRENCE[name.rpartition(".")[2]],
                stops=False,
            )


def _frequencies(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Sides whose rotary embedding turns by frequencies that were rounded, where the other's were
    not rounded likewise."""
    said = {s: t.record.attributes.get(FREQUENCIES) for s, t in _sides(rollout, train)}
    if said["rollout"] != said["train"] and not _imported(rollout, train):
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
    """Yields sides whose model is in training mode and drops values at random."""
    places = {s: t.record.attributes.get(DROPOUT) for s, t in _sides(rollout, train)}
    for side, where in places.items():
        if where is not None:
            yield Mismatch(
                kind="attributes",
                name=DROPOUT,
                rollout=places["rollout"] or "none",
                train=places["train"] or "none",
                detail=f"the {side} model is in training mode and drops values at random: "
                "call model.eval(), or set its dropout to 0",
            )


def _tokens(rollout: Trace, train: Trace) -> list[Mismatch]:
    """Compares the scored ids of both sides, and the prompts by each side's own tokenizer."""
    mismatches = []
    a, b = rollout.tokens.samples, train.tokens.samples
    for i in range(max(len(a), len(b))):
        if i >= len(a) or i >= len(b):
            name = (a[i] if i < len(a) else b[i]).prompt_id
            lengths = (f"{len(a)} samples", f"{len(b)} samples")
            mismatches.append(_token_mismatch(name, i, 0, *lengths))
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
    """Returns the first mismatched span, without equal ids before and after it."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    start = min(len(a), len(b)) if start is None else start
    a, b = a[start:], b[start:]
    for tag, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            return _token_mismatch(name, sample, start + a0, a[a0:a1], b[b0:b1])
    return _token_mismatch(
        name, sample, 0, "same ids, split differently into prompt and response", ""
    )


def _token_mismatch(
    name: str, sample: int, position: int, rollout: object, train: object
) -> Mismatch:
    return Mismatch(
        kind="tokens", name=name, sample=sample, position=position, rollout=rollout, train=train
    )


def _positions(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Yields for each side the first row that it rotated by a position other than the row's own."""

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
            f"rows are rotated by a position that is not their own{_on_ranks(record, first)}"
            f"{_harmless(record.positions)}",
            ranks=_holders(record, first),
        )


def _harmless(positions: PositionRecord) -> str:
    """Adds a remark where one number shifts all positions of each sequence."""
    if not positions.harmless:
        return ""
    return f"; all queries and keys are shifted by {positions.shift_words}; {SHIFT_IS_HARMLESS}"


def _boundaries(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Yields for each side the first row that attends to another sequence, or not to its own. A
    side that does not repeat its attention cannot be checked."""
    sides = dict(_sides(rollout, train))
    attention = f"layers.{rollout.record.shape.first_attention}.attn"
    for side, name, record in _first_wrong(rollout, train, _crossed):
        if not _repeats(sides[side], name, attention):
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
            f"boundaries of their sequences{_on_ranks(record, first)}",
            ranks=_holders(record, first),
        )


def _holders(record: PassRecord, row: WrongRow) -> list[int]:
    """The ranks that computed a row; empty where every rank computes every row."""
    return sorted(
        {h.rank for h in record.held if h.sample == row.sample and h.start <= row.position < h.stop}
    )


def _on_ranks(record: PassRecord, row: WrongRow) -> str:
    """Adds the ranks that computed the first wrong row, where ranks compute different ones."""
    ranks = _holders(record, row)
    plural = "s" if len(ranks) > 1 else ""
    return f", the first on rank{plural} {', '.join(map(str, ranks))}" if ranks else ""


def _crossed(trace: Trace, name: str) -> bool:
    """Whether a pass has rows that attend to another sequence, or not to their own; rows that give
    themselves nearly all weight do not count."""
    record = trace.read_pass(name).record.boundaries
    alone = all(row.sees == "itself alone" for row in record.first)
    return bool(record.wrong) and not (alone and round_to_own_value(trace, name))


def _repeats(trace: Trace, name: str, site: str) -> bool:
    """Whether the repetition of a pass gave a site the same bits; true where there is none."""
    if not trace.has_pass(f"{name}.repeat"):
        return True
    index = RowIndex(trace.tokens)
    first, again = (read_rows(trace.read_pass(n), site, index) for n in (name, f"{name}.repeat"))
    if first is None or again is None or not np.array_equal(first.number, again.number):
        return first is again
    return np.array_equal(first.rows.digest[first.at], again.rows.digest[again.at])


def _padding(rollout: Trace, train: Trace) -> Iterator[Mismatch]:
    """Yields a mismatch where a side's logits have more columns than the vocabulary has tokens;
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
    """Yields (side, pass, record) of the first observed pass of each side that has a wrong row."""
    for side, trace in _sides(rollout, train):
        for name in ("decode", "prefill"):
            if trace.has_pass(name) and wrong(trace, name):
                yield side, name, trace.read_pass(name).record
                break


def _sides(rollout: Trace, train: Trace) -> tuple[tuple[SideName, Trace], ...]:
    return ("rollout", rollout), ("train", train)


def _attributes(a: dict[str, Any], b: dict[str, Any]) -> list[Mismatch]:
    """Names each differing attribute, by layer where a side has `layers.i.NAME` beside NAME."""
    mismatches = []
    by_layer = {name.split(".", 2)[2] for name in [*a, *b] if name.startswith("layers.")}
    apart = (DROPOUT, FREQUENCIES, *_RECURRENCE)
    whole = (n for n in [*a, *b] if not n.startswith("layers.") and n not in apart)
    for name in dict.fromkeys(whole):
        names = [name]
        if name in by_layer:
            layers = range(max(_layers(a), _layers(b)))
            names = [f"layers.{i}.{name}" for i in layers]
        for n in names:
            mine, theirs = (side.get(n, side.get(name)) for side in (a, b))
            if mine != theirs and not (name in UNSET_AGREES and None in (mine, theirs)):
                mismatches.append(Mismatch(kind="attributes", name=n, rollout=mine, train=theirs))
    return mismatches


def _layers(attributes: dict[str, Any]) -> int:
    """Returns how many layers a side has, or at least names."""
    named = [int(n.split(".")[1]) + 1 for n in attributes if n.startswith("layers.")]
    return max([int(attributes.get("layers", 0)), *named])
