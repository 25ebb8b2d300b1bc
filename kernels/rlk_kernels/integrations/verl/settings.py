"""verl's settings with which its rollout and its trainer would not be the same policy, by name.

Each was read in the source of verl 0.9.1; paths are those of its configuration.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlk_kernels.integrations.frameworks import at, refuse
from rlk_kernels.integrations.vllm import ENVIRONMENT, EXCEPT, PLUGIN

HERE = "actor_rollout_ref"
DTYPES = {
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16"},
    **{"fp32": "float32", "float": "float32"},
}
"""verl's and vLLM's other names of dtypes."""
OVERRIDES = frozenset(
    ("attn_implementation", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache")
)
"""What `model.override_config` may change: verl gives it to the trainer alone."""


def _off(value: Any) -> bool:
    return not value


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


_PART = "the rollout would sample from a part of the trainer's distribution"
_LORA = "LoRA: merge the adapter into the checkpoint, and train all weights"
_SHARED = "ranks that share a sequence (Ulysses)"
_QUANTISED = "quantised weights are not the trainer's"
REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("rollout.name", _is("vllm"), "the kernels are in vLLM: rollout.name=vllm"),
    ("actor.strategy", _is("fsdp2"), "the kernels are in FSDP2 workers: actor.strategy=fsdp2"),
    ("rollout.top_p", _is(1), _PART),
    ("rollout.top_k", _is(-1, 0), _PART),
    ("rollout.temperature", lambda value: value > 0, "the trainer divides by it"),
    ("rollout.quantization", _off, _QUANTISED),
    ("rollout.qat.enable", _off, _QUANTISED),
    ("rollout.full_determinism", _off, "it replaces torch's operators in vLLM; leave it out"),
    ("rollout.expert_parallel_size", _is(1), "expert parallelism"),
    ("rollout.enable_rollout_routing_replay", _off, "the kernels route alike without a replay"),
    ("rollout.disaggregation.enabled", _off, "separate servers for prefill were not run"),
    ("model.mtp.enable", _off, "multi-token prediction"),
    ("model.lora_rank", _off, _LORA),
    ("model.lora.rank", _off, _LORA),
    ("model.lora_adapter_path", _off, _LORA),
    ("model.use_liger", _off, "Liger's operators would replace the kernels"),
    ("model.use_fused_kernels", _off, "verl's fused head computes log-probs past the kernels"),
    ("model.model_type", _is("language_model"), "the kernels are in causal language models"),
    ("actor.ulysses_sequence_parallel_size", _is(1), _SHARED),
    ("actor.fsdp_config.ulysses_sequence_parallel_size", _is(1), _SHARED),
    ("actor.fsdp_config.qat.enable", _off, _QUANTISED),
    ("hybrid_engine", bool, "a rollout on other GPUs than the trainer's was not run"),
)
"""Path below actor_rollout_ref, which of its values are served, and why others are not."""
ENGINE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("quantization", "speculative_config", "enable_lora"), _off),
    **dict.fromkeys(("enable_expert_parallel", "attention_backend", "hf_overrides"), _off),
    **dict.fromkeys(("logits_processors", "logprobs_mode", "worker_extension_cls"), _off),
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size"), _is(1)),
    "decode_context_parallel_size": _is(1),
    "dtype": _off,
}
"""Below rollout.engine_kwargs.vllm: what the kernels refuse in vLLM, and what verl sets itself."""


def check(config: Any, environment: Mapping[str, str]) -> None:
    """Raises NotSupported with every setting of verl's whole configuration, and every variable of a
    process, that is refused."""
    refuse("verl", [*refused(config), *refused_variables(environment)])


def refused(config: Any) -> Iterator[str]:
    """A sentence for each refused setting; what the configuration lacks is not looked at."""
    here = at(config, HERE)
    for path, served, why in REFUSED:
        value = at(here, path)
        if value is not None and not served(value):
            yield f"{HERE}.{path}={value}: {why}"
    for name, served in ENGINE.items():
        value = at(here, f"rollout.engine_kwargs.vllm.{name}")
        if value is not None and not served(value):
            yield f"{HERE}.rollout.engine_kwargs.vllm.{name}={value}: leave it out"
    yield from _refused_dtypes(here)
    yield from _refused_logprobs(here)
    yield from _refused_config(at(here, "model"))
    mode = at(config, "trainer.v1.trainer_mode")
    if at(config, "trainer.use_v1") and mode not in (None, "sync"):
        yield (
            f"trainer.v1.trainer_mode={mode}: a rollout of earlier weights is another policy than "
            "the trainer's; sync is served"
        )


def _refused_dtypes(here: Any) -> Iterator[str]:
    rollout = _dtype(at(here, "rollout.dtype"))
    computed = _dtype(at(here, "actor.fsdp_config.mixed_precision.param_dtype") or "bfloat16")
    held = _dtype(at(here, "actor.fsdp_config.model_dtype"))
    kv_cache = _dtype(at(here, "rollout.engine_kwargs.vllm.kv_cache_dtype"))
    if rollout not in (None, computed):
        yield (
            f"{HERE}.rollout.dtype={rollout}: the trainer computes in {computed} "
            "(actor.fsdp_config.mixed_precision.param_dtype)"
        )
    if held not in (None, "float32", computed):
        yield (
            f"{HERE}.actor.fsdp_config.model_dtype={held}: weights are rounded to it before they "
            f"are rounded to {computed}; float32 and {computed} are served"
        )
    if kv_cache not in (None, "auto", computed):
        yield f"{HERE}.rollout.engine_kwargs.vllm.kv_cache_dtype={kv_cache}: leave it out"


def _dtype(name: Any) -> str | None:
    return None if name is None else DTYPES.get(str(name), str(name).removeprefix("torch."))


def _refused_logprobs(here: Any) -> Iterator[str]:
    mode, temperature = at(here, "rollout.logprobs_mode"), at(here, "rollout.temperature")
    if mode not in (None, "processed_logprobs") and (mode != "raw_logprobs" or temperature != 1):
        yield (
            f"{HERE}.rollout.logprobs_mode={mode} with temperature={temperature}: the trainer's "
            "log-probs are of logits divided by the temperature; processed_logprobs are too"
        )
    if at(here, "rollout.calculate_log_probs") is False:
        yield (
            f"{HERE}.rollout.calculate_log_probs=False: without the rollout's log-probs verl does "
            "not measure how far the two sides are apart"
        )


def _refused_config(model: Any) -> Iterator[str]:
    path, other = at(model, "path"), at(model, "hf_config_path")
    if other not in (None, path):
        yield f"{HERE}.model.hf_config_path={other}: the rollout reads config.json of model.path"
    for name in sorted(set(at(model, "override_config") or ()) - OVERRIDES):
        yield (
            f"{HERE}.model.override_config.{name}: the rollout does not get it; write it into the "
            "checkpoint's config.json"
        )


def refused_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable of a process that would part the two sides."""
    if (asked := environment.get(ENVIRONMENT)) != "1":
        yield (
            f"{ENVIRONMENT}={asked or ''}: 1 switches the kernels on in the rollout; set it where "
            "verl starts, and for an existing cluster of Ray as "
            f"+ray_kwargs.ray_init.runtime_env.env_vars.{ENVIRONMENT}='\"1\"'"
        )
    if left := environment.get(EXCEPT):
        yield f"{EXCEPT}={left}: leaves operators of the rollout to vLLM, and none of the trainer's"
    if environment.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        yield "VLLM_BATCH_INVARIANT=1: replaces torch's own operators in vLLM"
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        yield f"VLLM_PLUGINS={plugins}: vLLM loads the plugins that it names; name {PLUGIN} too"
