"""The requirements of a replaced layer on its VllmConfig, and the entries that it writes there."""

import hashlib
import os
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from rlk_kernels.integrations import rotary
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import check_sparse
from rlk_kernels.integrations.vllm import families, fusion
from rlk_kernels.sources import sources_digest

KEY = "rlk_kernels"
"""The key of the digest in `additional_config`."""
_excluded: list[str] = []


def set_excluded(excluded: frozenset[str]) -> None:
    """Sets the excluded operators, which are a part of the digest."""
    _excluded[:] = sorted(excluded)


def excluded() -> tuple[str, ...]:
    """The excluded operators."""
    return tuple(_excluded)


def is_excluded(*ops: str) -> bool:
    """Whether vLLM continues to compute these operators."""
    return not frozenset(ops).isdisjoint(_excluded)


_sparse_supported = [False]


def set_sparse_supported(supported: bool) -> None:
    """Sets whether the sparse layers of this vLLM can be replaced."""
    _sparse_supported[:] = [supported]


_delta_nets_supported = [False]


def set_delta_nets_supported(supported: bool) -> None:
    """Sets whether the gated delta nets of this vLLM can be replaced."""
    _delta_nets_supported[:] = [supported]


_latent_supported = [False]


def set_latent_supported(supported: bool) -> None:
    """Sets whether the latent attention of this vLLM can be replaced."""
    _latent_supported[:] = [supported]


_lora_supported = [False]


def set_lora_supported(supported: bool) -> None:
    """Sets whether the adapters of this vLLM can be replaced."""
    _lora_supported[:] = [supported]


def prepare_config() -> None:
    """Raises NotSupported for a config with unsupported settings; otherwise chooses our attention
    on GPUs and writes a digest into `additional_config`.

    vLLM's compile cache does not see out-of-tree classes. Without the digest, a graph that was
    compiled with the kernels would be loaded without them, and vice versa. vLLM builds models
    before it compiles."""
    config = get_current_vllm_config()
    if not isinstance(config.additional_config, dict):
        raise NotSupported("additional_config must be a dict, in which the kernels write a digest")
    if config.additional_config.get(KEY) == digest():
        return
    _check(config)
    custom = not families.has_latents(config.model_config) and not current_platform.is_cpu()
    if "attn" not in _excluded and custom:
        # vLLM reads this when it builds attention, after the projections of the same layer.
        config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.additional_config[KEY] = digest()
    # Sums and products between the kernels' operators are rounded as in eager code.
    config.compilation_config.inductor_compile_config["emulate_precision_casts"] = True
    fusion.add_pass(config.compilation_config.inductor_compile_config)


def check_sparse_layer() -> None:
    """`prepare_config` for a sparse layer, none of whose operators can be excluded."""
    prepare_config()
    check_sparse(frozenset(_excluded))


def _check(config: Any) -> None:
    parallel, model = config.parallel_config, config.model_config
    backend = config.attention_config.backend
    cache = config.cache_config.cache_dtype
    dtype = str(model.dtype).removeprefix("torch.")
    hidden, ranks = model.hf_text_config.hidden_size, parallel.tensor_parallel_size
    others = backend not in (None, AttentionBackendEnum.CUSTOM)
    refused = families.refused(model, ranks) | {
        f"hidden_size={hidden}, which {ranks} ranks do not divide": hidden % ranks != 0,
        "the sparse layers of this version of vLLM": families.is_sparse(model)
        and not all(_sparse_supported),
        "expert parallelism; omit enable_expert_parallel": families.is_sparse(model)
        and ranks > 1
        and parallel.enable_expert_parallel,
        "compiled code with gated delta nets on a device other than CUDA's; pass "
        "enforce_eager=True": (
            families.has_delta_nets(model)
            and not model.enforce_eager
            and not current_platform.is_cuda()
        ),
        "gated delta nets in this version of vLLM": families.has_delta_nets(model)
        and not all(_delta_nets_supported),
        "latent attention in this version of vLLM": families.has_latents(model)
        and not all(_latent_supported),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.prefill_context_parallel_size > 1,
        "VLLM_BATCH_INVARIANT=1, which makes vLLM replace torch's operators": (
            os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
        ),
        "speculative decoding": config.speculative_config is not None,
        f"logprobs_mode={model.logprobs_mode}": "logprobs" not in model.logprobs_mode
        and "logprob" not in _excluded,
        **(_refused_quantised(config) if model.quantization is not None else {}),
        **(_refused_adapters(config) if config.lora_config is not None else {}),
        f"kv_cache_dtype={cache} of a model in {dtype}": cache not in ("auto", dtype),
        f"the attention backend {backend}; omit it": "attn" not in _excluded
        and not current_platform.is_cpu()
        and (others or bool(config.attention_config.backend_per_kind)),
    }
    if not {"q_rope", "k_rope"}.intersection(_excluded):
        rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
        for kind in rotary.by_kind(rope):
            rotary.check(kind)
            rotary.check_whole(model.hf_text_config.model_type, kind)
    if settings := [setting for setting, is_set in refused.items() if is_set]:
        raise NotSupported(f"rlk_kernels in vLLM does not support {'; '.join(settings)}")


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The operators whose weights a checkpoint of fp8 quantises."""


def _refused_quantised(config: Any) -> dict[str, bool]:
    """Unsupported setting of a VllmConfig with quantised weights -> whether it is set."""
    model = config.model_config
    kind, special = model.hf_text_config.model_type, families.is_sparse(model)
    return {
        f"a quantised model, quantization={model.quantization}": model.quantization != "fp8",
        "fp8 on several ranks": config.parallel_config.tensor_parallel_size > 1,
        "fp8 of a model with sparse layers or gated delta nets": special
        or families.has_delta_nets(model),
        f"fp8 of model_type={kind}": kind in families.PLAIN,
        "fp8 with LoRA": config.lora_config is not None,
        "fp8 with a projection excluded": is_excluded(*PROJECTIONS),
    }


def _refused_adapters(config: Any) -> dict[str, bool]:
    """Unsupported setting of a VllmConfig with adapters -> whether it is set."""
    lora, model = config.lora_config, config.model_config
    targets = frozenset(getattr(lora, "target_modules", None) or ())
    special = families.is_sparse(model) or families.has_delta_nets(model)
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "LoRA in this version of vLLM": not all(_lora_supported),
        "LoRA on several ranks": config.parallel_config.tensor_parallel_size > 1,
        "LoRA of a model with sparse layers or gated delta nets": special,
        f"LoRA of model_type={model.hf_text_config.model_type}": (
            model.hf_text_config.model_type in families.PLAIN
        ),
        "LoRA of the embedding or the output layer; pass lora_target_modules=[...], the names of "
        "the projections that have adapters": not targets
        or not targets.isdisjoint(("embed_tokens", "lm_head")),
        "LoRA with o_proj or down_proj excluded": is_excluded("o_proj", "down_proj"),
        f"lora_dtype={lora.lora_dtype} of a model in {dtype}": lora.lora_dtype
        not in ("auto", dtype, model.dtype),
        "fully_sharded_loras": bool(lora.fully_sharded_loras),
    }


def digest() -> str:
    """A digest of the kernels' sources and of the excluded operators."""
    return hashlib.blake2b(
        (sources_digest() + ",".join(_excluded)).encode(), digest_size=16
    ).hexdigest()
