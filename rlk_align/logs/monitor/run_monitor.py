"""Monitors a run: takes its steps, returns their records, and decides when to stop.

monitor = RunMonitor(patience=3)
for step in ...:
    record = monitor.arrays(step, rollout_logprobs, train_logprobs, mask)
    if monitor.stop:
        break
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS, BadOption
from rlk_align.logs.diagnose.contract import RunContract, load_run_contract
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.dumps.sequences import UNKNOWN, Sequences, join
from rlk_align.logs.monitor.frameworks import framework_metrics
from rlk_align.logs.monitor.judge import Trends, step_findings
from rlk_align.logs.monitor.measure import measure
from rlk_align.logs.monitor.pairs import pairs_of
from rlk_align.logs.monitor.record import StepRecord


class RunMonitor:
    """Monitors a training run in an amount of memory that does not grow with the steps.

    `stop` becomes true once `patience` steps in a row have failed, for early stopping. `on_step` is
    called with each step's record. The default of `contract` is the built-in one for runs.
    """

    def __init__(
        self,
        contract: RunContract | None = None,
        patience: int = 1,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.contract = contract or load_run_contract()
        self.patience, self.on_step = patience, on_step
        self.steps = self.failed = self.inconclusive = 0
        self._failing = 0
        self._trends = Trends(self.contract)

    @property
    def stop(self) -> bool:
        """Whether each of the last `patience` steps failed."""
        return self._failing >= self.patience

    @property
    def exit_code(self) -> int:
        """0 if all steps passed, 1 if a step failed, 4 if a step has no compared token, or if there
        was no step."""
        if self.inconclusive or not self.steps:
            return EXIT_INCONCLUSIVE
        return EXIT_FAIL if self.failed else EXIT_PASS

    def sequences(self, step: int, parts: Iterable[Sequences]) -> StepRecord:
        """Returns the record of a step's sequences."""
        whole = [p for p in parts if len(p)]
        if not whole:
            return self.record(StepRecord(step=step, sequences=0, tokens=0))
        sequences = join(whole)
        measured = measure(step, sequences, self.contract)
        named = framework_metrics(pairs_of(sequences))
        return self.record(measured.model_copy(update={"frameworks": named}))

    def arrays(
        self,
        step: int,
        rollout: ArrayLike,
        train: ArrayLike,
        mask: ArrayLike,
        *,
        rewards: ArrayLike | None = None,
        rollout_versions: ArrayLike | None = None,
        train_version: int | None = None,
    ) -> StepRecord:
        """Returns the record of padded arrays [B, T] of log-probs; index t of both sides belongs to
        the same token. `rewards` and `rollout_versions` are [B]. Raises BadOption for other
        shapes."""
        sequences = padded_sequences(
            step, rollout, train, mask, rewards, rollout_versions, train_version
        )
        return self.sequences(step, [sequences])

    def record(self, measured: StepRecord) -> StepRecord:
        """Returns a step's record with its findings. Steps must be recorded in order."""
        findings = [*step_findings(measured, self.contract.steps), *self._trends.add(measured)]
        record = measured.model_copy(update={"findings": findings})
        levels = {f.level for f in findings}
        self.steps += 1
        self.failed += "fail" in levels
        self.inconclusive += "inconclusive" in levels
        self._failing = self._failing + 1 if levels & {"fail", "inconclusive"} else 0
        if self.on_step is not None:
            self.on_step(record)
        return record


def padded_sequences(
    step: int,
    rollout: ArrayLike,
    train: ArrayLike,
    mask: ArrayLike,
    rewards: ArrayLike | None = None,
    rollout_versions: ArrayLike | None = None,
    train_version: int | None = None,
) -> Sequences:
    """Returns padded arrays [B, T] as sequences of T tokens with unknown ids."""
    g, t = np.asarray(rollout, dtype=np.float64), np.asarray(train, dtype=np.float64)
    scored = np.asarray(mask, dtype=bool)
    if g.ndim != 2 or not g.shape == t.shape == scored.shape:
        raise BadOption(
            f"step {step}: the log-probs and the mask have the shapes {g.shape}, {t.shape} and "
            f"{scored.shape}; they must have one shape [sequences, tokens]"
        )
    count, length = g.shape
    nothing = np.zeros(g.size, dtype=bool)
    versions = _per_sequence(rollout_versions, count, UNKNOWN, np.int64, "rollout_versions")
    return Sequences(
        ids=[str(n) for n in range(count)],
        groups=[None] * count,
        offsets=np.arange(count + 1, dtype=np.int64) * length,
        prompt_lengths=np.zeros(count, dtype=np.int64),
        steps=np.full(count, step, dtype=np.int64),
        token_ids=np.full(g.size, UNKNOWN, dtype=np.int64),
        scored=scored.ravel(),
        rollout=g.ravel(),
        train=t.ravel(),
        rollout_missing=nothing,
        train_missing=nothing,
        rollout_versions=np.repeat(versions, length),
        train_versions=np.full(count, UNKNOWN if train_version is None else train_version),
        position_ids=np.full(g.size, UNKNOWN, dtype=np.int64),
        pack_indices=np.full(count, UNKNOWN, dtype=np.int64),
        cached_tokens=np.full(count, UNKNOWN, dtype=np.int64),
        entropy=np.full(g.size, np.nan),
        kept_mass=np.full(g.size, np.nan),
        rewards=_per_sequence(rewards, count, np.nan, np.float64, "rewards"),
        mask_rewritten=np.zeros(count, dtype=bool),
        sampling=[Sampling()] * count,
        rollout_dtypes=[None] * count,
        train_dtypes=[None] * count,
        samplers=[None] * count,
        seeds=np.full(g.size, UNKNOWN, dtype=np.int64),
        seeds_missing=np.ones(g.size, dtype=bool),
    )


def _per_sequence(
    values: ArrayLike | None, count: int, unknown: float, kind: type, name: str
) -> np.ndarray:
    if values is None:
        return np.full(count, unknown, dtype=kind)
    array: np.ndarray = np.asarray(values, dtype=kind)
    if array.shape != (count,):
        raise BadOption(f"{name} has the shape {array.shape}; it must be ({count},)")
    return array
