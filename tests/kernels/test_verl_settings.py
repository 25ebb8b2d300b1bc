"""What the kernels refuse of verl's settings. Neither verl nor Ray is imported; that verl has each
of these settings is in tests/real_runs/test_verl_loop.py."""

import os
import subprocess
import sys
from typing import Any

import pytest
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.verl import settings

HERE = "actor_rollout_ref"
SERVED: dict[str, Any] = {
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    f"{HERE}.hybrid_engine": True,
    f"{HERE}.model.path": "M",
    f"{HERE}.model.lora_rank": 0,
    f"{HERE}.model.override_config.attn_implementation": "sdpa",
    f"{HERE}.actor.strategy": "fsdp2",
    f"{HERE}.actor.ulysses_sequence_parallel_size": 1,
    f"{HERE}.actor.fsdp_config.model_dtype": "fp32",
    f"{HERE}.rollout.name": "vllm",
    f"{HERE}.rollout.temperature": 0.7,
    f"{HERE}.rollout.top_p": 1,
    f"{HERE}.rollout.top_k": -1,
    f"{HERE}.rollout.dtype": "bfloat16",
    f"{HERE}.rollout.logprobs_mode": "processed_logprobs",
    f"{HERE}.rollout.calculate_log_probs": True,
    f"{HERE}.rollout.engine_kwargs.vllm.kv_cache_dtype": "auto",
}
WRONG: dict[str, Any] = {
    "trainer.v1.trainer_mode": "separate_async",
    f"{HERE}.hybrid_engine": False,
    f"{HERE}.model.lora_rank": 8,
    f"{HERE}.model.lora.rank": 8,
    f"{HERE}.model.lora_adapter_path": "A",
    f"{HERE}.model.use_liger": True,
    f"{HERE}.model.use_fused_kernels": True,
    f"{HERE}.model.hf_config_path": "other",
    f"{HERE}.model.override_config.rope_theta": 1e6,
    f"{HERE}.model.mtp.enable": True,
    f"{HERE}.actor.strategy": "megatron",
    f"{HERE}.actor.ulysses_sequence_parallel_size": 2,
    f"{HERE}.actor.fsdp_config.model_dtype": "fp16",
    f"{HERE}.actor.fsdp_config.qat.enable": True,
    f"{HERE}.rollout.name": "sglang",
    f"{HERE}.rollout.temperature": 0,
    f"{HERE}.rollout.top_p": 0.9,
    f"{HERE}.rollout.top_k": 50,
    f"{HERE}.rollout.dtype": "float16",
    f"{HERE}.rollout.logprobs_mode": "raw_logprobs",
    f"{HERE}.rollout.calculate_log_probs": False,
    f"{HERE}.rollout.quantization": "fp8",
    f"{HERE}.rollout.full_determinism": True,
    f"{HERE}.rollout.expert_parallel_size": 2,
    f"{HERE}.rollout.enable_rollout_routing_replay": True,
    f"{HERE}.rollout.disaggregation.enabled": True,
    f"{HERE}.rollout.engine_kwargs.vllm.kv_cache_dtype": "fp8",
    f"{HERE}.rollout.engine_kwargs.vllm.speculative_config": {"method": "ngram"},
    f"{HERE}.rollout.engine_kwargs.vllm.hf_overrides": {"rope_theta": 1},
}
ON = {"RLK_KERNELS": "1"}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for path, value in flat.items():
        *above, name = path.split(".")
        inner = config
        for part in above:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return config


def test_a_served_run_is_not_refused() -> None:
    settings.check(nested(SERVED), ON)


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_setting_is_refused_by_name(path: str) -> None:
    with pytest.raises(NotSupported, match="refuses 1 setting,") as refused:
        settings.check(nested(SERVED | {path: WRONG[path]}), ON)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"RLK_KERNELS": "0"},
        {"RLK_KERNELS_EXCEPT": "act"},
        {"VLLM_PLUGINS": "other"},
        {"VLLM_BATCH_INVARIANT": "1"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_variable_is_refused_by_name(wrong: dict[str, str]) -> None:
    with pytest.raises(NotSupported, match="refuses 1 setting,") as refused:
        settings.check(nested(SERVED), ON | wrong)
    assert f"{next(iter(wrong))}={next(iter(wrong.values()))}" in str(refused.value)


def test_all_are_refused_as_one_list() -> None:
    everything = nested(SERVED | WRONG)
    with pytest.raises(NotSupported) as refused:
        settings.check(everything, {})
    for path in [*WRONG, "RLK_KERNELS"]:
        assert path in str(refused.value), path
    assert f"refuses {len(WRONG) + 1} settings," in str(refused.value)


def test_raw_log_probs_are_the_trainers_at_temperature_1() -> None:
    raw = {f"{HERE}.rollout.logprobs_mode": "raw_logprobs", f"{HERE}.rollout.temperature": 1.0}
    settings.check(nested(SERVED | raw), ON)


def test_fp16_on_both_sides_is_served() -> None:
    both = {
        f"{HERE}.rollout.dtype": "half",
        f"{HERE}.actor.fsdp_config.mixed_precision.param_dtype": "fp16",
    }
    settings.check(nested(SERVED | both), ON)


def test_the_check_imports_neither_verl_nor_ray() -> None:
    code = (
        "import sys, rlk_kernels.integrations.verl as v; "
        "v.check({}); print(sorted({'verl', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ON, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
