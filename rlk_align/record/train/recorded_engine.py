"""The engines around transformers, as they describe a live model: they also save its parameters and
its adapter as they gather them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlk_align.engines.common.lora import record_adapter
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.deepspeed.engine import DeepSpeedEngine
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.hf.fsdp import FSDPEngine
from rlk_align.record.shared.together import on_first
from rlk_align.record.train.adapter import ActiveAdapter, write_adapter
from rlk_align.record.train.rank_attributes import of_ranks
from rlk_align.record.train.weight_files import WeightFiles, write_index
from rlk_align.trace.schema import LoraRecord


class RecordedHF(HFEngine):
    """A model of transformers."""

    files: WeightFiles | None = None
    """What saves the parameters; None if they are not saved."""
    active: ActiveAdapter | None = None
    adapter_folder: Path
    """Where the adapter is saved."""

    def whole_parameters(self) -> Iterator[LiveParameter]:
        for parameter in super().whole_parameters():
            if self.files is not None:
                self.files.add(parameter.name, parameter.value)
            yield parameter
        if self.files is not None:
            on_first(self.ranks, partial(_finish, self.files))

    def adapters(self) -> list[LoraRecord | None]:
        active = self.active
        if active is None:
            return []
        # Copies, because ranks may share these factors again as soon as the next ones are gathered.
        live = [
            replace(each, a=each.a.clone(), b=each.b.clone())
            for each in self.live_adapter(active.name)
        ]
        folder, modules = self.adapter_folder, self.shape.family.modules
        on_first(self.ranks, lambda: write_adapter(folder, active, live, modules))
        if self.ranks.rank:
            return []
        return [record_adapter(str(self.adapter_folder), live, self.compute_dtype)]

    def attributes(self) -> dict[str, Any]:
        return of_ranks(self.ranks, super().attributes())


def _finish(files: WeightFiles) -> None:
    files.finish()
    write_index(files.folder, files.written)


class RecordedFSDP(RecordedHF, FSDPEngine):
    """One that FSDP2 shards."""


class RecordedDeepSpeed(RecordedHF, DeepSpeedEngine):
    """One in an engine of DeepSpeed."""
