"""The engine protocol: open, describe, weights, run a pass over a batch with taps, close.

An engine of several ranks runs in as many processes, all of which are called alike.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rlk_align.config import EngineSpec
from rlk_align.engines.parameters import ParameterRecord
from rlk_align.engines.ranks import ALONE, Ranks
from rlk_align.errors import BadOption
from rlk_align.families import ModelShape
from rlk_align.prompts import TokenBatch
from rlk_align.trace.writer import PassWriter


class Tap(Protocol):
    """What an observed pass gives its rows to, as the engine computes."""

    def __call__(
        self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray, /
    ) -> None:
        """Rows `[N, F]` of a site at (sample, position), int `[N]` each; copied before it
        returns, because engines overwrite their buffers."""

    def part(self, number: int, /) -> Callable[[], PassWriter]:
        """What opens another part of the same pass, in whichever process it is called."""


Progress = Callable[[int], None]
"""Called with the number of samples done."""

Logprobs = dict[int, np.ndarray]
"""Sample -> float32 log-prob of each of its sampled ids, in nats, of the samples that this rank
speaks for."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled, until EOS or so many tokens."""

    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a decode pass says of the policy, whether tapped or not."""

    responses: list[list[int]]
    """Per sample, the sampled ids."""
    logprobs: Logprobs


class Engine(ABC):
    """One model in one engine, inside a worker process of its own.

    A pass with `tap` None must leave no trace of observation: no hook, no copy.
    """

    spare_positions = 0
    """Positions of the model's context that the engine needs for itself."""
    ranks: Ranks = ALONE
    """This process among the engine's; set before `open`, torch.distributed being up."""
    alive: Path | None = None
    """Where processes that the engine starts itself note their pulse."""

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
    def weights(self) -> Iterator[ParameterRecord]:
        """Every canonical parameter, from the live model, in the checkpoint's layout; what rank
        0 yields counts."""

    def unexposed(self, kind: str) -> dict[str, str]:
        """Sites that this engine cannot show in a `decode` or a `prefill`, with the reason."""
        return {}

    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: Tap | None,
        progress: Progress,
    ) -> Sampled:
        """Decodes a response after every prompt; the same seed gives the same tokens."""
        raise BadOption(
            f"engine {self.spec.name!r} does not sample",
            "name it as --train, or give `capture` the --tokens of a run",
        )

    @abstractmethod
    def score(self, batch: TokenBatch, tap: Tap | None, progress: Progress) -> Logprobs:
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


def processing(temperature: float, top_p: float = 1.0) -> dict[str, Any]:
    """What reported log-probs are of: the whole raw distribution, or a processed one."""
    raw = temperature == 1.0 and top_p == 1.0
    return {
        "temperature": temperature,
        "top_p": top_p,
        "logprobs": "raw" if raw else "processed",
    }


def token_logprobs(
    logits: torch.Tensor, target: torch.Tensor, temperature: float = 1.0
) -> np.ndarray:
    """log softmax(logits / temperature)[target] in float32: `[N, V]`, `[N]` -> `[N]`."""
    logits = logits.detach()
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    logprob = torch.log_softmax(scaled, dim=-1)
    return logprob.gather(-1, target[:, None]).squeeze(-1).cpu().numpy()
