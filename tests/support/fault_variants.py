"""Faults of other kinds and sizes than those that the diagnoses were tuned on, and dumps that leave
out fields."""

import dataclasses
from collections.abc import Callable

import numpy as np
from simulate_dumps import (
    FAULTS,
    Dump,
    Fault,
    faulty,
    filled,
    lagged,
    rounded,
    temperature_of,
    truncated,
)

from rlk_align.logs.dumps.sequences import UNKNOWN, Sequences

RAW = {"rollout": "train_raw", "trainer": "rollout_raw"}
"""Side that has processed log-probs -> the flag that makes those of the other side raw."""


def _both_rounded(bits: int) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, x: float) -> None:
        for side in ("rollout", "train"):
            rounded(side, bits)(dump, x)

    return plant


def _decode_with(factor: float) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, part: float) -> None:
        count = dump.groups.max() + 1
        hit = np.zeros(count, dtype=bool)
        hit[dump.rng.permutation(count)[: max(1, round(part * count))]] = True
        dump.extra[hit[dump.groups][dump.sequence]] = factor

    return plant


def _rope_from(position: int) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, factor: float) -> None:
        dump.extra[dump.position > position] = factor

    return plant


def _packs_of(size: int) -> Callable[[Dump, float], None]:
    """Only the first half of each later sequence of a pack is wrong."""

    def plant(dump: Dump, factor: float) -> None:
        dump.packs = np.arange(dump.sequences) % size
        early = dump.position < dump.lengths[dump.sequence] // 2
        dump.extra[(dump.packs > 0)[dump.sequence] & early] = factor

    return plant


def _last_turn(dump: Dump, factor: float) -> None:
    hit = (dump.rng.random(dump.sequences) < 0.2)[dump.sequence]
    dump.extra[hit & (dump.segment == dump.segment.max())] = factor


def _variants() -> dict[str, Fault]:
    found: dict[str, Fault] = {}
    for k in (-3, -2, 2, 3):
        found[f"trainer {k:+d}"] = Fault("misaligned", lagged(k), (1.0,))
        found[f"trainer {k:+d}, 1 row in 20"] = Fault("misaligned", lagged(k), (0.05,))
    for side, raw in RAW.items():
        for law, bounds in (("top_k", (2, 4, 8)), ("min_p", (0.02, 0.05, 0.1, 0.2))):
            for bound in bounds:
                name = f"{side} renormalised, {law.replace('_', '-')} {bound}"
                found[name] = Fault("truncation", truncated(law, raw), (bound,))
        for t in (0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.4):
            found[f"T {t} on the {side} only"] = Fault("temperature", temperature_of(raw), (t,))
    fills = {"-9999": -9999.0, "null": float("nan"), "0.0": 0.0, "log(1/V)": -11.931}
    for side in ("rollout", "train"):
        for text, value in fills.items():
            for part in (0.002, 0.02, 0.2):
                if text == "null" and part < 0.01:
                    continue  # The contract allows a hundredth.
                name = f"{text} in {part:.1%} of the {side} side"
                found[name] = Fault("missing", filled(float(np.float32(value)), side), (part,))
        for dtype, bits in (("bf16", 16), ("fp16", 13)):
            found[f"{side} in {dtype}"] = Fault("low-precision", rounded(side, bits), (1,))
    for dtype, bits in (("bf16", 16), ("fp16", 13)):
        found[f"both in {dtype}"] = Fault("low-precision", _both_rounded(bits), (1,))
    quantised = FAULTS["quantised"].plant
    for factor in (3, 4, 5, 6):
        found[f"noise × {factor}"] = Fault("quantisation", quantised, (factor,))
    for part in (0.05, 0.1, 0.2):
        name = f"decode broken in {part:.0%} of the groups"
        found[name] = Fault("decode-state", _decode_with(40.0), (part,))
    found["RoPE from position 100"] = Fault("rope", _rope_from(100), (10,))
    found["RoPE from position 200"] = Fault("rope", _rope_from(200), (10,))
    found["packs of 2"] = Fault("packing", _packs_of(2), (8,))
    found["packs of 8"] = Fault("packing", _packs_of(8), (8,))
    found["last turn, 1 row in 5"] = Fault("turn-boundary", _last_turn, (30,), 3)
    return found


VARIANTS = _variants()
"""Fault -> its diagnosis and how it is planted."""


def _without(**fields: object) -> Callable[[Sequences], Sequences]:
    def strip(run: Sequences) -> Sequences:
        values = {k: v if isinstance(v, np.ndarray) else [v] * len(run) for k, v in fields.items()}
        return dataclasses.replace(run, **values)

    return strip


def _no_steps(run: Sequences) -> Sequences:
    return dataclasses.replace(run, steps=np.full(len(run), UNKNOWN))


LESS: dict[str, Callable[[Sequences], Sequences]] = {
    "no groups": _without(groups=None),
    "no steps": _no_steps,
    "no dtypes": _without(rollout_dtypes=None, train_dtypes=None),
}
"""What a dump leaves out -> how it is removed."""
INSTEAD = {
    ("no steps", "never synced"): "dropout",
    ("no steps", "stale cache, nothing dumped"): "decode-state",
    ("no groups", "stale cache, nothing dumped"): "decode-state",
}
"""(What is missing, fault) -> the diagnosis that is expected without it."""


def with_less(what: str, name: str, seed: int, tokens: int) -> Sequences:
    """Returns a run with a fault at its greatest strength, from which `what` is removed."""
    return LESS[what](faulty(name, seed, tokens))


def variant(name: str, seed: int, tokens: int) -> Sequences:
    """Returns a run with an unseen fault."""
    fault = VARIANTS[name]
    dump = Dump(seed, tokens, turns=fault.turns)
    fault.plant(dump, fault.strengths[0])
    return dump.sequences_of()
