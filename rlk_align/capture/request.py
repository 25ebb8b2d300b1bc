"""The request for one capture, which is checked before anything starts."""

from dataclasses import dataclass
from pathlib import Path

from rlk_align.engines.spec import EngineSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePlan:
    """Which values a capture keeps; digests and statistics are kept for every site."""

    budget: int = 8 * 10**9
    """The largest number of bytes of values in one capture."""
    layers: tuple[int, int] | None = None
    """The first and the last layer whose values are kept; None keeps all layers."""
    sites: tuple[str, ...] = ()
    """The sites, or operators such as `attn`, whose values are kept; empty keeps all sites."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRequest:
    """Everything that one engine is asked to do."""

    engine: EngineSpec
    model: str
    prompts: Path
    max_new_tokens: int = 32
    seed: int = 0
    trace: TracePlan = TracePlan()
    passes: tuple[str, ...] = ("decode", "prefill")
    """The observed passes, in order; `decode` samples, `prefill` scores."""
    controls: bool = True
    """Whether each observed pass is also run without taps, and repeated with taps."""
    modules: bool = False
    """Whether the model, of any family, is observed module by module."""
    production: bool = False
    """Whether each observed pass is also run in the engine's un-tapped production mode."""

    @property
    def model_path(self) -> str:
        return str(self.engine.option("model") or self.model)
