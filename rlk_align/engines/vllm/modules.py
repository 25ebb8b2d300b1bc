"""vLLM: a model of any family, module by module."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.modules import ModuleTaps, module_places, module_weights
from rlk_align.engines.common.parameters import ParameterRecord
from rlk_align.engines.common.places import Place
from rlk_align.engines.vllm.engine import MAX_CPU_CACHE, VLLMEngine
from rlk_align.engines.vllm.experts import unpacked
from rlk_align.engines.vllm.taps import VLLMTaps
from rlk_align.engines.vllm.weights import linear_weight
from rlk_align.results import CodePlace
from rlk_align.trace.schema import CacheRecord, QuantisedProduct

_LEAST_CPU_CACHE = 2.5e8
"""The cache of keys, values and states on a CPU, in bytes, for a model whose states have an unknown
size."""


class VLLMModuleTaps(VLLMTaps):
    """Hooks on the modules of vLLM's live model."""

    reasons: dict[str, str]

    def places_of(self, *_: Any) -> Iterable[Place]:
        return ()

    def install(self) -> None:
        self._watch_batches()
        self.around(self._model, self._begin)
        assert self._tap is not None
        self._modules = ModuleTaps(self, self._model, self._tap)
        self.reasons = self._modules.reasons

    def _begin(self, args: Any, kwargs: dict[str, Any]) -> None:
        self._locate_rows(args, kwargs)
        self._modules.at(self._all, (1, self._rows.cells))


class VLLMModules(VLLMEngine):
    """The engine `vllm` for `compare --modules`."""

    taps = VLLMModuleTaps

    def weights(self) -> Iterator[ParameterRecord]:
        yield from self.on_models(_weights)[0]

    def attributes(self) -> dict[str, Any]:
        return {}

    def products(self) -> dict[str, QuantisedProduct]:
        return {}

    def cache(self) -> CacheRecord | None:
        return None

    def code(self) -> dict[str, CodePlace]:
        return self.on_models(_code)[0]

    def shards(self) -> dict[str, list[tuple[int, int, int]]]:
        return {}

    def unexposed(self, kind: str) -> dict[str, str]:
        return self._rpc("rlk_reasons")

    def _cache(self, device: str) -> dict[str, Any]:
        usual = super()._cache(device)
        if device != "cpu" or self.spec.option("kv_cache_gb") is not None:
            return usual
        size = max(_LEAST_CPU_CACHE, usual["kv_cache_memory_bytes"])
        return usual | {"kv_cache_memory_bytes": int(min(MAX_CPU_CACHE, size))}


def _weights(model: Any) -> list[ParameterRecord]:
    with torch.inference_mode():
        return list(module_weights(model, _live))


def _code(model: Any) -> dict[str, CodePlace]:
    return code_places(model, module_places(model))


def _live(module: Any, name: str, value: torch.Tensor) -> torch.Tensor | None:
    """A parameter's values, also where vLLM has packed them."""
    if name == "weight" and not value.numel():
        return linear_weight(module) if hasattr(module, "params_dtype") else None
    convolution = getattr(module, "_cpu_unpacked_conv_weight", None)
    if name == "weight" and convolution is not None:
        from vllm._custom_ops import causal_conv1d_weight_pack

        # It computes with the packed weight, which has changed if the copy does not give it.
        packed = causal_conv1d_weight_pack(convolution.detach().clone())
        return convolution if torch.equal(packed, value) else value
    return unpacked(module, name) if name in ("w13_weight", "w2_weight") else value
