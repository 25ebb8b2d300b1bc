"""HF transformers: a causal LM of any family, module by module."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.modules import ModuleTaps, module_places, module_weights
from rlk_align.engines.common.parameters import ParameterRecord
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import ForwardHooks
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.results import CodePlace
from rlk_align.trace.writer import PassWriter


class HFModuleHooks(ForwardHooks):
    """Hooks on the modules of a live HF model."""

    reasons: dict[str, str]

    def install(self) -> None:
        assert self._tap is not None
        self._modules = ModuleTaps(self, self._model, self._tap)
        self.reasons = self._modules.reasons

    def at(self, rows: ForwardRows, device: torch.device) -> None:
        super().at(rows, device)
        if self._tap is not None:
            sequences = len(np.unique(rows.sample))
            self._modules.at(self._all, (sequences, rows.cells // sequences))


class HFModules(HFEngine):
    """The engine `hf` for `compare --modules`."""

    def _attention(self) -> str | None:
        # Some models have no attention at all.
        stated = self.spec.options.get("attn")
        return None if stated is None else str(stated)

    def _experts_implementation(self) -> dict[str, Any]:
        stated = self.spec.options.get("experts")
        return {} if stated is None else {"experts_implementation": str(stated)}

    def weights(self) -> Iterator[ParameterRecord]:
        return module_weights(self.model, lambda _module, _name, value: value)

    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def attributes(self) -> dict[str, Any]:
        return {}

    def code(self) -> dict[str, CodePlace]:
        return code_places(self.model, module_places(self.model))

    def tapped(self, tap: PassWriter | None, editor: Editor | None) -> HFModuleHooks:
        self._hooks = HFModuleHooks(self.model, (), tap, editor)
        return self._hooks

    def unexposed(self, kind: str) -> dict[str, str]:
        return dict(getattr(self._hooks, "reasons", {}))
