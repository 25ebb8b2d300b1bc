"""The engine protocol: open, describe, weights, run a pass over a batch with taps, close."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.config import EngineSpec
from rlk_align.families import ModelShape
from rlk_align.prompts import TokenBatch

Tap = Callable[[str, torch.Tensor, np.ndarray, np.ndarray], None]
"""(site, rows `[N, F]`, samples `[N]`, positions `[N]`): called as the engine computes.

Rows must be used or copied before the tap returns: engines overwrite their buffers.
"""


Progress = Callable[[int], None]
"""Called with the number of samples done."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled: temperature 1, the whole vocabulary, until EOS."""

    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass says of the policy, whether tapped or not."""

    responses: list[list[int]]
    """Per sample, the sampled ids."""
    logprobs: list[np.ndarray]
    """Per sample, float32: the raw log-prob of each sampled id at temperature 1, in nats."""


class Engine(ABC):
    """One model in one engine, inside a worker process of its own.

    A pass with `tap` None must leave no trace of observation: no hook, no copy.
    """

    spare_positions = 0
    """Positions of the model's context that the engine needs for itself."""

    def __init__(
        self, spec: EngineSpec, model: Path, shape: ModelShape, production: bool = False
    ) -> None:
        """`production`: run as users do, compiled where the engine compiles; cannot be tapped."""
        self.spec = spec
        self.model_path = model
        self.shape = shape
        self.production = production

    @abstractmethod
    def open(self) -> None:
        """Loads the model and applies the user's patch."""

    @abstractmethod
    def version(self) -> str:
        """The engine's version, with what else decides its numbers."""

    @abstractmethod
    def dtype(self) -> str:
        """What the engine computes in, e.g. `bfloat16`."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """What the live model says of itself, by the names of `rlk_align.parity`."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every canonical parameter, from the live model, in the checkpoint's layout."""

    def unexposed(self) -> dict[str, str]:
        """Sites that this engine cannot show, with the reason."""
        return {}

    @abstractmethod
    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: Tap | None,
        progress: Progress,
    ) -> PassResult:
        """Decodes a response after every prompt; the same seed gives the same tokens."""

    @abstractmethod
    def score(self, batch: TokenBatch, tap: Tap | None, progress: Progress) -> PassResult:
        """Teacher-forced: one prefill over every whole sequence."""

    def close(self) -> None:
        """Frees what the process's end would not."""
        return


def per_layer(name: str, values: list[Any]) -> dict[str, Any]:
    """`{name: value}` where all layers agree; else the commonest, and each exception by layer."""
    if not values:
        return {}
    common = Counter(map(repr, values)).most_common(1)[0][0]
    shared = next(v for v in values if repr(v) == common)
    exceptions = {f"layers.{i}.{name}": v for i, v in enumerate(values) if repr(v) != common}
    return {name: shared, **exceptions}


def activation_name(activation: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> str:
    """The name of a live activation, told by what it computes and not by its class."""
    x = torch.linspace(-4.0, 4.0, 33)
    known = {
        "silu": torch.nn.functional.silu(x),
        "gelu": torch.nn.functional.gelu(x),
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu(x),
        "identity": x,
    }
    y = activation(x.to(dtype)).float()
    # tanh-GELU and GELU part by 4.7e-4 at most, so the nearest is taken; bf16 rounds to 2^-7.
    name, distance = min(
        ((n, (y - v).abs().mean().item()) for n, v in known.items()), key=lambda item: item[1]
    )
    return name if distance < 1e-2 else "unknown"


def norm_eps(layer: Any) -> Any:
    """The epsilon of a decoder layer's norms: one number, or one for each where they differ."""
    norms = {
        "attn_norm": layer.input_layernorm,
        "mlp_norm": layer.post_attention_layernorm,
        "q_norm": getattr(layer.self_attn, "q_norm", None),
        "k_norm": getattr(layer.self_attn, "k_norm", None),
    }
    eps = {n: getattr(m, "variance_epsilon", None) for n, m in norms.items() if m is not None}
    return next(iter(eps.values())) if len(set(eps.values())) == 1 else eps


def rope_theta(inv_freq: torch.Tensor) -> float:
    """The base of an unscaled rotary embedding, from inv_freq_j = theta^(-2j/d)."""
    pairs = inv_freq.numel()
    if pairs < 2:
        return math.nan
    theta = float(inv_freq[-1].double()) ** (-pairs / (pairs - 1))
    return float(f"{theta:.5g}")
