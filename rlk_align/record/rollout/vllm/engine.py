"""The adapter of vLLM around the live engine of a job, and what of vLLM is not recorded."""

import shutil
from pathlib import Path
from typing import Any

from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm.engine import VLLMEngine
from rlk_align.errors import BadOption
from rlk_align.model.adapter import CONFIG, TENSORS, read_settings
from rlk_align.model.checkpoint import read_config, resolve_model
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.trace.records import writing
from rlk_align.trace.schema import COMPILED, LoraRecord


class RecordedEngine(VLLMEngine):
    """The live engine of a job."""

    compiled: bool
    _adapter: Any = None
    """vLLM's request for the adapter of the recorded requests; None for none."""
    _copy: Path
    """The folder of its copy."""

    def use_adapter(self, request: Any, folder: Path) -> None:
        """Describes and scores with the adapter of a request from now on; None for none. Copies it
        to `folder`, because the job may write the next one over it. Raises BadOption for one that
        is not recorded, ModelError for one that does more than add scale · B · A."""
        self._adapter, self._copy = request, folder
        if request is None:
            return
        if self._ranks > 1:
            raise BadOption(
                f"RLK_RECORD: an adapter among {self._ranks} tensor-parallel ranks is not recorded",
                "record an engine of one rank, or give it merged weights",
            )
        source = Path(request.lora_path)
        if not (source / TENSORS).is_file():
            raise BadOption(
                f"RLK_RECORD: the adapter {request.lora_name} is in no folder of this machine "
                f"({request.lora_path})",
                "give vLLM a LoRARequest with the folder of the adapter in PEFT's layout",
            )
        read_settings(str(source))
        with writing(folder):
            folder.mkdir()
            for name in (CONFIG, TENSORS):
                shutil.copyfile(source / name, folder / name)
        # So that it is in a slot before any request computes with it.
        self._rpc("add_lora", request)

    def lora_requests(self) -> list[Any]:
        return [] if self._adapter is None else [self._adapter]

    def adapters(self) -> list[LoraRecord | None]:
        copy = str(self._copy)
        return [self._rpc("rlk_adapter", r, copy, self.shape) for r in self.lora_requests()]

    def unexposed(self, kind: str) -> dict[str, str]:
        hidden = super().unexposed(kind)
        if not self.compiled:
            return hidden
        sites = [site.name for site in model_sites(self.shape) if site.name != "logprob"]
        return dict.fromkeys(sites, COMPILED) | hidden


def described_engine(config: Any) -> RecordedEngine:
    """The adapter of an engine with this configuration, not attached to it yet. Raises BadOption
    for a setting of vLLM or a model that is not recorded yet."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise BadOption(
            "RLK_RECORD: pipeline stages are not recorded: in eager mode, which taps need, "
            "vLLM 0.32 on a CPU fails at the first forward of its second stage",
            "use tensor parallelism",
        )
    if parallel.data_parallel_size > 1:
        raise BadOption(
            "RLK_RECORD: data-parallel engines are not recorded: each counts its own requests, so "
            "that their steps would not be the same",
            "start a server for each, with RLK_RECORD for one of them",
        )
    if config.speculative_config is not None:
        raise BadOption("RLK_RECORD: speculative decoding is not recorded")
    if config.model_config.logprobs_mode != "raw_logprobs":
        raise BadOption(
            f"RLK_RECORD: logprobs_mode={config.model_config.logprobs_mode} is not recorded",
            "use raw_logprobs",
        )
    model = resolve_model(config.model_config.model)
    shape = read_shape(model)
    options: dict[str, str | int | float | bool] = {
        "tp": parallel.tensor_parallel_size,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
    }
    spec = EngineSpec("vllm", options).canonical(shape.dtype)
    spec.info.check(spec.option, read_config(model), shape)
    engine = RecordedEngine(spec, model, shape)
    engine.compiled = not config.model_config.enforce_eager
    return engine


def live_engine(llm: Any, config: Any) -> RecordedEngine:
    """The adapter around a live LLM, or what stands for one. Raises as `described_engine`."""
    engine = described_engine(config)
    engine.attach(llm)
    return engine


def adapter_number(request: Any) -> int:
    """vLLM's number of a request's adapter, which each adapter has its own of; 0 for none."""
    return 0 if request.lora_request is None else int(request.lora_request.lora_int_id)
