"""Simulated dumps of RL runs: healthy ones at the published noise level, and planted faults.

Every token has a law of K alternatives, from flat to peaked, that is sampled. The trainer's logits
are the rollout's plus noise, independent of what is sampled, so that E[ρ] = 1 holds exactly and
E|t − g| ≈ c (1 − p), as in real dumps. The noise is clustered: its scale differs between groups,
sequences and tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.dumps.sequences import UNKNOWN, Sequences

ALTERNATIVES = 16
PROMPT = 12
GROUP = 8
NOISE = {"bfloat16": 0.05, "float16": 0.006, "float32": 4e-5}
"""c of the two sides' difference, by dtype; a run's own is 0.62 to 1.44 times that, which makes it
0.031 to 0.072 in bfloat16, as published."""
Floats = NDArray[np.float64]


class Dump:
    """A run of GRPO: `steps` steps, groups of 8, about `tokens` response tokens."""

    def __init__(
        self, seed: int, tokens: int, dtype: str = "bfloat16", steps: int = 6, turns: int = 1
    ) -> None:
        self.rng = rng = np.random.default_rng(seed)
        mean = min(400, max(60, tokens // 32))
        groups = max(2, round(tokens / (mean * GROUP)))
        self.sequences = S = groups * GROUP
        self.steps = np.sort(np.arange(groups) % steps).repeat(GROUP)
        self.groups = np.arange(groups).repeat(GROUP)
        self.lengths = np.maximum(24, (mean * rng.lognormal(-0.08, 0.4, S)).astype(int))
        self.sequence = np.arange(S).repeat(self.lengths)
        self.position = np.concatenate([np.arange(n) for n in self.lengths])
        R = len(self.position)
        width = np.exp(rng.uniform(0.0, np.log(30.0), R))
        self.logits = width[:, None] * rng.standard_normal((R, ALTERNATIVES))
        spread = 0.7 * rng.standard_normal(R)
        spread += 0.25 * rng.standard_normal(S)[self.sequence]
        spread += 0.15 * rng.standard_normal(groups)[self.groups[self.sequence]]
        level = NOISE[dtype] * float(np.exp(rng.uniform(np.log(0.62), np.log(1.44))))
        self.scale = 0.8 * level * np.exp(spread)
        self.start_healthy(dtype, turns)

    def start_healthy(self, dtype: str, turns: int) -> None:
        """Sets turns, and what faults change to what it is in a healthy run."""
        R, S = len(self.sequence), self.sequences
        self.segment = self.position * turns // self.lengths[self.sequence]
        self.tool = np.zeros(R, dtype=bool)
        # The first tokens of every turn but the first are the tool's.
        starts = np.flatnonzero(np.diff(self.segment) > 0) + 1
        for k in range(4):
            self.tool[np.minimum(starts + k, R - 1)] = True
        self.extra = np.ones(R)
        """By what the noise is larger than healthy."""
        self.margin = np.zeros(R)
        """Noise that is proportional to the logits, as other weights and dropout make it."""
        self.temperature = 1.0
        self.top_p = 1.0
        self.top_k = self.logits.shape[1]
        self.min_p = 0.0
        self.rollout_raw = self.train_raw = False
        self.dtype = dtype
        self.records_mass = False
        """Whether the dump has the mass that truncation kept."""
        self.cached = np.full(S, UNKNOWN)
        self.packs = np.full(S, UNKNOWN)
        self.versions = np.full(S, UNKNOWN)
        self.after: list[Callable[[Sequences], None]] = []
        self.top_token = False
        self.scored_shift = 0

    def sequences_of(self) -> Sequences:
        """Samples the tokens and returns what both sides say of them."""
        rng, R = self.rng, len(self.position)
        processed = self._truncated(self.logits / self.temperature)
        law = np.exp(processed)
        whole = np.exp(_log_softmax(self.logits / self.temperature))
        mass = np.where(law > 0, whole, 0.0).sum(1)
        chosen = self.sampled(law)
        other = self.logits + self.noise() * self.extra[:, None]
        other += self.logits * (self.margin * rng.standard_normal(R))[:, None]
        rollout = _log_softmax(self.logits) if self.rollout_raw else processed
        if self.train_raw:
            train = _log_softmax(other)
        else:
            train = _log_softmax(other / self.temperature)
            train -= _logsumexp(np.where(np.isfinite(processed), train, -np.inf))
        said = law.argmax(1) if self.top_token else chosen
        g, t = rollout[np.arange(R), said], train[np.arange(R), chosen]
        return self._with_prompts(_stored(g), _stored(t), chosen, np.minimum(mass, 1.0))

    def sampled(self, law: Floats) -> NDArray[np.int64]:
        """[R]; an alternative of each token's law, drawn with its probability."""
        chosen = (self.rng.random(len(law))[:, None] > np.cumsum(law, 1)).sum(1)
        chosen = np.minimum(chosen, law.shape[1] - 1)
        return np.where(law[np.arange(len(law)), chosen] > 0, chosen, law.argmax(1))

    def noise(self) -> Floats:
        """[R, K]; what a healthy trainer's logits have more than the rollout's."""
        return self.rng.standard_normal(self.logits.shape) * self.scale[:, None]

    def _truncated(self, logits: Floats) -> Floats:
        """Log-probs of the law that top-p, top-k and min-p leave."""
        logp = _log_softmax(logits)
        if self.top_p >= 1 and self.top_k >= logits.shape[1] and self.min_p <= 0:
            return logp
        order = np.argsort(-logp, axis=1)
        ranked = np.take_along_axis(np.exp(logp), order, 1)
        outside = np.cumsum(ranked, 1) - ranked >= self.top_p
        outside |= ranked < self.min_p * ranked[:, :1]
        outside[:, self.top_k :] = True
        mask = np.zeros_like(outside)
        np.put_along_axis(mask, order, outside, 1)
        kept = np.where(mask, -np.inf, logp)
        return kept - _logsumexp(kept)

    def _with_prompts(
        self, g: Floats, t: Floats, chosen: NDArray[np.int64], mass: Floats
    ) -> Sequences:
        total = self.lengths + PROMPT
        offsets = np.concatenate([[0], np.cumsum(total)])
        N = int(offsets[-1])
        at = offsets[self.sequence] + PROMPT + self.position
        rollout, train = np.full(N, np.nan), _stored(-self.rng.exponential(2.0, N))
        rollout[at], train[at] = g, t
        kept_mass = np.full(N, np.nan)
        if self.records_mass:
            kept_mass[at] = mass
        rollout[at[self.tool]] = np.nan
        scored = np.zeros(N, dtype=bool)
        scored[at[~self.tool]] = True
        if self.scored_shift:
            scored = np.roll(scored, self.scored_shift)
        token_ids = self.rng.integers(1000, 2000, N)
        token_ids[at] = chosen
        train_missing = np.zeros(N, dtype=bool)
        train_missing[offsets[:-1]] = True
        result = Sequences(
            ids=[f"s{k}" for k in range(self.sequences)],
            groups=[f"g{k}" for k in self.groups],
            offsets=offsets,
            prompt_lengths=np.full(self.sequences, PROMPT),
            steps=self.steps,
            token_ids=token_ids,
            scored=scored,
            rollout=rollout,
            train=np.where(train_missing, np.nan, train),
            rollout_missing=np.isnan(rollout),
            train_missing=train_missing,
            rollout_versions=np.repeat(self.versions, total),
            train_versions=np.where(self.versions == UNKNOWN, UNKNOWN, self.steps),
            position_ids=np.full(N, UNKNOWN),
            pack_indices=self.packs,
            cached_tokens=self.cached,
            entropy=np.full(N, np.nan),
            kept_mass=kept_mass,
            rewards=np.full(self.sequences, np.nan),
            mask_rewritten=np.zeros(self.sequences, dtype=bool),
            sampling=[Sampling()] * self.sequences,
            rollout_dtypes=[self.dtype] * self.sequences,
            train_dtypes=[self.dtype] * self.sequences,
            samplers=[None] * self.sequences,
            seeds=np.full(N, UNKNOWN),
            seeds_missing=np.ones(N, dtype=bool),
        )
        for change in self.after:
            change(result)
        return result


def _stored(values: Floats) -> Floats:
    return values.astype(np.float32).astype(np.float64)


def _logsumexp(logits: Floats) -> Floats:
    top = logits.max(1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(1, keepdims=True))


def _log_softmax(logits: Floats) -> Floats:
    return logits - _logsumexp(logits)


@dataclass(frozen=True)
class Fault:
    """A planted mistake; `strengths` from the smallest to the one of the table."""

    diagnosis: str
    plant: Callable[[Dump, float], None]
    strengths: tuple[float, ...]
    turns: int = 1


def _change(dump: Dump, change: Callable[[Sequences, np.random.Generator], None]) -> None:
    dump.after.append(lambda s: change(s, dump.rng))


def _copied(dump: Dump, _x: float) -> None:
    _change(dump, lambda s, _: np.copyto(s.train, s.rollout, where=s.compared))


def _zeros(dump: Dump, _x: float) -> None:
    _change(dump, lambda s, _: np.copyto(s.train, 0.0, where=s.scored))


def _empty_mask(dump: Dump, _x: float) -> None:
    _change(dump, lambda s, _: s.scored.fill(False))


def lagged(by: int) -> Callable[[Dump, float], None]:
    """The trainer's log-probs of a share of the sequences, one at least, lie `by` tokens late."""

    def plant(dump: Dump, part: float) -> None:
        def change(s: Sequences, rng: np.random.Generator) -> None:
            count = max(1, round(part * len(s)))
            for k in rng.choice(len(s), count, replace=False):
                at = slice(s.offsets[k] + PROMPT - abs(by), s.offsets[k + 1])
                s.train[at] = np.roll(s.train[at], by)

        _change(dump, change)

    return plant


def _mask(by: int) -> Callable[[Dump, float], None]:
    """The mask of a share of the sequences is off by one; what no rollout sampled is 0.0."""

    def plant(dump: Dump, part: float) -> None:
        def change(s: Sequences, rng: np.random.Generator) -> None:
            s.rollout[s.rollout_missing] = 0.0
            s.rollout_missing.fill(False)
            for k in np.flatnonzero(rng.random(len(s)) < part):
                at = slice(s.offsets[k], s.offsets[k + 1])
                s.scored[at] = np.roll(s.scored[at], by)

        _change(dump, change)

    return plant


def filled(value: float, side: str) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, part: float) -> None:
        def change(s: Sequences, rng: np.random.Generator) -> None:
            where = s.compared & (rng.random(s.tokens) < part)
            getattr(s, side)[where] = value
            if np.isnan(value):
                getattr(s, f"{side}_missing")[where] = True

        _change(dump, change)

    return plant


def rounded(side: str, bits: int) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, _x: float) -> None:
        def change(s: Sequences, _: np.random.Generator) -> None:
            low = np.uint32((1 << bits) - 1)
            values = getattr(s, side).astype(np.float32).view(np.uint32)
            values = (values + np.uint32(1 << (bits - 1))) & ~low
            getattr(s, side)[:] = values.view(np.float32).astype(np.float64)

        _change(dump, change)

    return plant


def _top_token(dump: Dump, _x: float) -> None:
    dump.top_token = True


def _scaled(dump: Dump, temperature: float) -> None:
    _change(dump, lambda s, _: np.divide(s.train, temperature, out=s.train))


def temperature_of(raw: str) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, temperature: float) -> None:
        dump.temperature = temperature
        setattr(dump, raw, True)

    return plant


def truncated(law: str, raw: str) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, bound: float) -> None:
        setattr(dump, law, int(bound) if law == "top_k" else bound)
        setattr(dump, raw, True)

    return plant


def _turns(dump: Dump, factor: float) -> None:
    hit = (dump.rng.random(dump.sequences) < 0.5)[dump.sequence]
    dump.extra[hit & (dump.segment >= 2)] = factor


def _packs(dump: Dump, factor: float) -> None:
    dump.packs = np.arange(dump.sequences) % 4
    dump.extra[(dump.packs > 0)[dump.sequence]] = factor


def _rope(dump: Dump, factor: float) -> None:
    dump.extra = factor ** (dump.position / dump.lengths.max())


def _rope_step(dump: Dump, factor: float) -> None:
    dump.extra[dump.position > np.quantile(dump.position, 0.6)] = factor


def _cache(known: bool) -> Callable[[Dump, float], None]:
    def plant(dump: Dump, factor: float) -> None:
        hit = (dump.rng.random(dump.groups.max() + 1) < 0.4)[dump.groups]
        hit[-GROUP:] = True
        hit[dump.steps == 0] = False
        if known:
            dump.cached = np.where(hit, PROMPT - 1, 0)
        dump.extra[hit[dump.sequence]] = factor

    return plant


def _never_synced(dump: Dump, size: float) -> None:
    dump.margin = size * dump.steps[dump.sequence]


def _lag(dump: Dump, size: float) -> None:
    lag = dump.rng.integers(0, 3, dump.sequences)
    dump.versions = np.maximum(dump.steps - lag, 0)
    dump.margin = size * (dump.steps - dump.versions)[dump.sequence]


def _decode(dump: Dump, factor: float) -> None:
    hit = (dump.rng.random(dump.groups.max() + 1) < 0.15)[dump.groups]
    hit[:GROUP] = True
    dump.extra[hit[dump.sequence]] = factor


def _routing(dump: Dump, part: float) -> None:
    dump.extra[dump.rng.random(len(dump.extra)) < part] = 25.0


def _dropout(dump: Dump, size: float) -> None:
    dump.margin = np.full(len(dump.margin), size)


def _quantised(dump: Dump, factor: float) -> None:
    dump.extra = np.full(len(dump.extra), factor)


def _one_token(dump: Dump, size: float) -> None:
    """One token whose log-prob the trainer gets wrong by so many times c."""

    def plant(run: Sequences) -> None:
        room = -np.expm1(run.rollout)
        there = run.compared & (room > 0.5) & (room < 0.8)
        usual = np.abs(run.train - run.rollout)[run.compared].sum() / room[run.compared].sum()
        at = dump.rng.choice(np.flatnonzero(there))
        run.train[at] = run.rollout[at] - size * max(usual, 0.01) * room[at]

    dump.after.append(plant)


FAULTS = {
    "copied": Fault("vacuous", _copied, (1,)),
    "trainer all 0": Fault("vacuous", _zeros, (1,)),
    "empty mask": Fault("vacuous", _empty_mask, (1,)),
    "trainer one late": Fault("misaligned", lagged(1), (0.0, 0.05, 1.0)),
    "trainer two early": Fault("misaligned", lagged(-2), (0.0, 0.05, 1.0)),
    "mask one early": Fault("mask-shifted", _mask(-1), (0.1, 0.3, 1.0)),
    "mask one late": Fault("mask-shifted", _mask(1), (0.1, 0.3, 1.0), 3),
    "zeros for missing": Fault("missing", filled(0.0, "rollout"), (0.001, 0.003, 0.01)),
    "-9999 for missing": Fault("missing", filled(-9999.0, "rollout"), (0.001, 0.003, 0.01)),
    "log(1/V) for missing": Fault(
        "missing", filled(float(np.float32(-11.931)), "train"), (0.001, 0.003, 0.01)
    ),
    "null for missing": Fault("missing", filled(float("nan"), "rollout"), (0.02, 0.05, 0.2)),
    "trainer stored in bf16": Fault("low-precision", rounded("train", 16), (1,)),
    "rollout stored in fp16": Fault("low-precision", rounded("rollout", 13), (1,)),
    "top-1 instead of sampled": Fault("wrong-token", _top_token, (1,)),
    "log-probs divided by T": Fault("logprob-scaled", _scaled, (0.99, 0.98, 0.95, 0.9)),
    "T on the trainer only": Fault(
        "temperature", temperature_of("rollout_raw"), (0.98, 0.95, 0.9, 0.8)
    ),
    "T on the rollout only": Fault(
        "temperature", temperature_of("train_raw"), (0.98, 0.95, 0.9, 0.7)
    ),
    "rollout renormalised": Fault(
        "truncation", truncated("top_p", "train_raw"), (0.99, 0.97, 0.95, 0.9)
    ),
    "trainer renormalised": Fault(
        "truncation", truncated("top_p", "rollout_raw"), (0.99, 0.97, 0.95, 0.9)
    ),
    "turns re-tokenised": Fault("turn-boundary", _turns, (3, 6, 12, 30), 4),
    "state leaks in packs": Fault("packing", _packs, (1.5, 2, 4, 10)),
    "RoPE grows": Fault("rope", _rope, (3, 6, 20, 60)),
    "RoPE steps": Fault("rope", _rope_step, (2, 4, 8, 20)),
    "stale cache, counts dumped": Fault("stale-cache", _cache(True), (2, 3, 6, 30)),
    "stale cache, nothing dumped": Fault("stale-cache", _cache(False), (6, 12, 30)),
    "never synced": Fault("stale-weights", _never_synced, (0.005, 0.01, 0.02, 0.05)),
    "stale by a lag": Fault("stale-weights", _lag, (0.01, 0.02, 0.05, 0.1)),
    "decode broken": Fault("decode-state", _decode, (8, 15, 40)),
    "routes flip": Fault("routing", _routing, (0.005, 0.01, 0.02, 0.05)),
    "dropout on": Fault("dropout", _dropout, (0.05, 0.1, 0.2)),
    "quantised": Fault("quantisation", _quantised, (2, 3, 4, 6)),
    "one token wrong": Fault("single-token", _one_token, (200, 300, 500)),
}
"""Fault -> which diagnosis it must get and how to plant it."""


def healthy(seed: int, tokens: int, dtype: str = "bfloat16", turns: int = 1) -> Sequences:
    """Returns a healthy run."""
    return Dump(seed, tokens, dtype, turns=turns).sequences_of()


def faulty(name: str, seed: int, tokens: int, strength: float | None = None) -> Sequences:
    """Returns a run with a fault, at its greatest strength by default."""
    fault = FAULTS[name]
    dump = Dump(seed, tokens, turns=fault.turns)
    fault.plant(dump, fault.strengths[-1] if strength is None else strength)
    return dump.sequences_of()
