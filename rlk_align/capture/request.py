"""What one engine is asked to do, checked before anything starts."""

from dataclasses import dataclass
from pathlib import Path

from rlk_align.engines.spec import EngineSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePlan:
    """Which values a capture keeps; digests and statistics are kept for every site."""

    budget: int = 8 * 10**9
    """Bytes of values that one capture may hold."""
    layers: tuple[int, int] | None = None
    """First and last layer whose values are kept; None is all."""
    sites: tuple[str, ...] = ()
    """Sites, or operators such as `attn`, whose values are kept; empty is all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRequest:
    """Everything that decides what one engine is asked to do."""

    engine: EngineSpec
    model: str
    prompts: Path
    max_new_tokens: int = 32
    seed: int = 0
    trace: TracePlan = TracePlan()
    passes: tuple[str, ...] = ("decode", "prefill")
    """The observed passes, in order; `decode` samples, `prefill` scores."""
    controls: bool = True
    """Whether each observed pass is also run without taps, and again."""
    production: bool = False
    """Whether each observed pass is run once more in the engine's un-tapped production mode."""

    @property
    def model_path(self) -> str:
        return str(self.engine.option("model") or self.model)
