"""The adapter of vLLM around the live engine of a job, and what of vLLM is not recorded."""

from typing import Any

from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm.engine import VLLMEngine
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import resolve_model
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.record.shared.shard import refuse_unless_dense
from rlk_align.trace.schema import COMPILED


class RecordedEngine(VLLMEngine):
    """The live engine of a job."""

    compiled: bool

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
        raise BadOption("RLK_RECORD: pipeline stages are not recorded")
    if parallel.data_parallel_size > 1:
        raise BadOption(
            "RLK_RECORD: data-parallel engines are not recorded",
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
    engine = RecordedEngine(EngineSpec("vllm", options).canonical(shape.dtype), model, shape)
    refuse_unless_dense(engine)
    engine.compiled = not config.model_config.enforce_eager
    return engine


def live_engine(llm: Any, config: Any) -> RecordedEngine:
    """The adapter around a live LLM, or what stands for one. Raises as `described_engine`."""
    engine = described_engine(config)
    engine.attach(llm)
    return engine
