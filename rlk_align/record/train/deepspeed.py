"""A live causal LM of transformers inside an engine of DeepSpeed."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlk_align.engines.info import OptionValue
from rlk_align.engines.process.ranks import Ranks
from rlk_align.errors import BadOption
from rlk_align.record.train.recorded_engine import RecordedDeepSpeed, RecordedHF
from rlk_align.record.train.replicas import LiveReplicas

_INSTEAD = "rlk-align compare --train deepspeed:dp=N scores the same ids with ranks of its own"


class LiveDeepSpeed(LiveReplicas):
    """What `deepspeed.initialize` returned, whatever ZeRO shards."""

    recorded = ("deepspeed", RecordedDeepSpeed)

    def __init__(self, engine: Any, *, temperature: float, weights: bool) -> None:
        _check(engine)
        super().__init__(engine.module, temperature=temperature, weights=weights)
        self._stage = int(engine.zero_optimization_stage())
        self.among(Ranks(dist.get_rank(), dist.get_world_size(), engine.device))

    def open(self, folder: Path, about: Path) -> RecordedHF:
        import deepspeed

        engine = super().open(folder, about)
        assert isinstance(engine, RecordedDeepSpeed)
        engine.package = deepspeed
        return engine

    def _options(self) -> dict[str, OptionValue]:
        recomputes = bool(self.model.is_gradient_checkpointing)
        own: dict[str, OptionValue] = {"dp": self.ranks.world, "stage": str(self._stage)}
        return super()._options() | own | {"checkpointing": recomputes}


def _check(engine: Any) -> None:
    """Raises BadOption for an engine that is not recorded."""
    kind = type(engine).__name__
    refused = {
        kind: kind != "DeepSpeedEngine",
        "a model that ranks share (AutoTP, or an mpu)": engine.mpu is not None,
        "torch_autocast": bool(engine.torch_autocast_enabled()),
        "fp16": bool(engine.fp16_enabled()),
        "zero_quantized_weights": bool(engine.zero_quantized_weights()),
        f"hpZ (zero_hpz_partition_size={engine.zero_hpz_partition_size()})": (
            engine.zero_hpz_partition_size() > 1
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            raise BadOption(f"DeepSpeed: {what} is not recorded", _INSTEAD)
