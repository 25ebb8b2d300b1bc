"""Steps of a run by REINFORCE on a small softmax policy, with a rollout whose weights may be stale
and whose arithmetic is noisy."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

CONTEXTS, VOCABULARY, LENGTH = 16, 24, 16


@dataclass
class Loop:
    """A policy of one logit for each (context, token); the next context is the token's."""

    seed: int = 0
    learning_rate: float = 8.0
    noise: float = 0.05
    """c of the difference between both sides' log-probs."""
    batch: int = 64
    stale_from: int | None = None
    """The step from which on the rollout's weights are not synced any more."""
    weights: np.ndarray = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.weights = self.rng.normal(size=(CONTEXTS, VOCABULARY)) * 1.5

    def steps(self, count: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields (step, rollout's log-probs, trainer's log-probs), each `[batch, LENGTH]`."""
        rollout = self.weights.copy()
        for step in range(count):
            if self.stale_from is None or step < self.stale_from:
                rollout = self.weights.copy()
            context, tokens, g = self._sample(rollout)
            exact = log_softmax(self.weights)[context, tokens]
            spread = self.noise * -np.expm1(exact) * np.sqrt(np.pi / 2)
            t = exact + spread * self.rng.normal(size=exact.shape) - spread**2 / 2
            yield step, g, t
            self._learn(context, tokens)

    def _sample(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logs = log_softmax(weights)
        context = np.zeros((self.batch, LENGTH), dtype=int)
        tokens = np.zeros_like(context)
        state = self.rng.integers(CONTEXTS, size=self.batch)
        for n in range(LENGTH):
            context[:, n] = state
            gumbel = self.rng.gumbel(size=(self.batch, VOCABULARY))
            tokens[:, n] = (logs[state] + gumbel).argmax(axis=1)
            state = tokens[:, n] % CONTEXTS
        return context, tokens, logs[context, tokens]

    def _learn(self, context: np.ndarray, tokens: np.ndarray) -> None:
        reward = (tokens < 6).mean(axis=1)
        advantage = (reward - reward.mean())[:, None] * np.ones(LENGTH)
        gradient = np.zeros_like(self.weights)
        np.add.at(gradient, (context, tokens), advantage)
        share = np.exp(log_softmax(self.weights))[context] * advantage[..., None]
        np.subtract.at(gradient, context, share)
        self.weights += self.learning_rate * gradient / tokens.size


def log_softmax(weights: np.ndarray) -> np.ndarray:
    """Of the last axis."""
    return weights - np.logaddexp.reduce(weights, axis=-1, keepdims=True)
