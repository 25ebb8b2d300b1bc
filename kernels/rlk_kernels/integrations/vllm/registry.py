"""Registers the classes in vLLM, removes them again, and finds the module of each operator in a
live model."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from vllm.model_executor import custom_op
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rlk_kernels import backend_calls
from rlk_kernels.integrations import fused_decoder
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import ARCHITECTURES
from rlk_kernels.integrations.operators import (
    NORMS,
    Counted,
    excluded_operators,
    excludes,
)
from rlk_kernels.integrations.operators import check as check_operators
from rlk_kernels.integrations.vllm import config, families, fp8, logprobs, lora, sampling

_CODE = "transformers_code:TransformersForCausalLM"
MODELS = {
    "Glm4MoeForCausalLM": "glm4_moe:RlkGlm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "glm4_moe:RlkGlm4MoeLiteForCausalLM",
    "MiniMaxM2ForCausalLM": "minimax_m2:RlkMiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "ministral3:RlkMinistral3ForCausalLM",
    "Qwen3NextForCausalLM": "delta_net:RlkQwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_5:RlkQwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "qwen3_5:RlkQwen3_5MoeForCausalLM",
    **{ARCHITECTURES[family]: _CODE for family in families.OF_TRANSFORMERS},
}
"""Architecture -> the model's class, if replacing the classes of its layers is not enough."""
WITH_IMAGES = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}
"""Architecture -> the one with images of the same module, which alone vLLM 0.26 has registered."""

_undo = ExitStack()
_registered: list[tuple[frozenset[str], bool]] = []
"""The excluded operators, and whether the sampler is replaced."""
_PACKAGE = __name__.rpartition(".")[0]


def register(excluded: Iterable[str], sampler: bool) -> None:
    """See the package."""
    excluded = excluded_operators(excluded)
    if _registered == [(excluded, sampler)]:
        return
    unregister()
    with ExitStack() as undo:
        config.set_excluded(excluded)
        for base, ours in _classes(excluded).items():
            _register_layer(undo, base, ours)
        for architecture, name in MODELS.items():
            # Some versions lack some models.
            if {architecture, WITH_IMAGES.get(architecture)} & ModelRegistry.models.keys():
                _register_model(undo, architecture, f"{_PACKAGE}.{name}")
        if "attn" not in excluded:
            _register_attention(undo)
        if "logprob" not in excluded:
            logprobs.COMPUTED.rlk_calls = 0
            _patch(undo, list(logprobs.patches()))
        if sampler:
            sampling.DRAWN.rlk_calls = 0
            _patch(undo, list(sampling.patches()))
        _patch(undo, _lora_patches())
        fp8.register()
        undo.callback(fp8.unregister)
        _clear_vllm_caches()
        undo.callback(_clear_vllm_caches)
        _registered.append((excluded, sampler))
        undo.callback(_registered.clear)
        _undo.push(undo.pop_all())


def unregister() -> None:
    """See the package."""
    _undo.close()


def _classes(excluded: frozenset[str]) -> dict[type, type]:
    from rlk_kernels.integrations.vllm import layers

    layers.RlkRowParallelLinear.excluded = excluded
    groups = (
        (("embed",), (layers.RlkVocabParallelEmbedding,)),
        (("q_proj", "k_proj", "v_proj"), (layers.RlkQKVParallelLinear,)),
        (
            ("gate_proj", "up_proj"),
            (layers.RlkMergedColumnParallelLinear, layers.RlkColumnParallelLinear),
        ),
        ((), (layers.RlkRowParallelLinear,)),
        (("q_rope", "k_rope"), layers.ROTARIES),
        (("act",), (layers.RlkSiluAndMul, layers.RlkGeluAndMul)),
        (("logits",), (layers.RlkLogitsProcessor,)),
    )
    chosen = [
        ours for fused, classes in groups if not excludes(excluded, *fused) for ours in classes
    ]
    if not excluded >= NORMS:
        chosen += [layers.RlkRMSNorm, layers.RlkGemmaRMSNorm]
    classes = {ours.__bases__[1]: ours for ours in chosen}
    return classes | _sparse_classes() | _delta_net_classes() | _latent_classes()


def _sparse_classes() -> dict[type, type]:
    """The classes of sparse layers; none for a vLLM that builds these layers differently, whose
    sparse models `config` refuses."""
    try:
        from rlk_kernels.integrations.vllm import sparse
    except ImportError:
        config.set_sparse_supported(False)
        return {}
    config.set_sparse_supported(True)
    return sparse.CLASSES


def _delta_net_classes() -> dict[type, type]:
    """The classes of gated delta nets and of their norms; none for a vLLM that builds them
    differently, whose hybrid models `config` refuses."""
    try:
        from rlk_kernels.integrations.vllm import delta_net
    except ImportError:
        config.set_delta_nets_supported(False)
        return {}
    config.set_delta_nets_supported(True)
    ours = delta_net.RlkQwenGatedDeltaNetAttention, delta_net.RlkRMSNormGated
    return {kind.__bases__[1]: kind for kind in ours}


def _latent_classes() -> dict[type, type]:
    """The classes of latent attention; none for a vLLM that builds it differently, whose models
    `config` refuses."""
    try:
        from rlk_kernels.integrations.vllm import latent
    except ImportError:
        config.set_latent_supported(False)
        return {}
    config.set_latent_supported(True)
    return latent.CLASSES


def _lora_patches() -> list[tuple[Any, str, Any]]:
    """Those of adapters; none for a vLLM whose adapters work differently, which `config`
    refuses."""
    try:
        patches = list(lora.patches())
    except (ImportError, AttributeError):
        patches = []
    supported = bool(patches) and all(name in vars(owner) for owner, name, _ in patches)
    config.set_lora_supported(supported)
    return patches if supported else []


def _patch(undo: ExitStack, patches: Iterable[tuple[Any, str, Any]]) -> None:
    for owner, name, function in patches:
        undo.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, function)


def _register_layer(undo: ExitStack, base: Any, ours: type) -> None:
    taken = custom_op.op_registry_oot.get(base.__name__)
    if taken is not None:
        raise NotSupported(f"vLLM's {base.__name__} is already replaced by {taken.__qualname__}")
    base.register_oot(name=base.__name__)(ours)
    undo.callback(custom_op.op_registry_oot.pop, base.__name__)


def _register_model(undo: ExitStack, architecture: str, ours: str) -> None:
    models = ModelRegistry.models
    if architecture in models:
        undo.callback(models.__setitem__, architecture, models[architecture])
    else:
        undo.callback(models.pop, architecture)
    ModelRegistry.register_model(architecture, ours)


def _register_attention(undo: ExitStack) -> None:
    backend, name = AttentionBackendEnum.CUSTOM, "attention_gpu.RlkAttentionBackend"
    if current_platform.is_cpu():
        backend, name = AttentionBackendEnum.CPU_ATTN, "attention_cpu.RlkCPUAttentionBackend"
    register_backend(backend, f"{_PACKAGE}.{name}")
    undo.callback(backend.clear_override)


def _clear_vllm_caches() -> None:
    """Clears vLLM's caches of rotary embeddings, activations, backends and classes of models, which
    outlive a model."""
    from vllm.model_executor.layers import activation, rotary_embedding
    from vllm.model_executor.model_loader import utils

    rotary_embedding._ROPE_DICT.clear()
    activation._ACTIVATION_AND_MUL_REGISTRY._dict.clear()
    utils._MODEL_ARCH_BY_HASH.clear()
    selector._cached_get_attn_backend.cache_clear()


def leave(model: Any, excluded: Iterable[str]) -> None:
    """See the package. Operators that `register` excluded are vLLM's own already."""
    wanted = excluded_operators(excluded) & NORMS
    ours = [
        module
        for name, module in operators(model).items()
        if name.rpartition(".")[2] in wanted and isinstance(module, Counted)
    ]
    if ours and not model.model.do_not_compile:
        raise NotSupported(
            f"{', '.join(sorted(wanted))}: compiled code cannot change its norms; exclude all "
            "norms, or run vLLM eager"
        )
    for module in ours:
        module.__class__ = type(module).__bases__[1]


def operators(model: Any) -> dict[str, Any]:
    """See the package."""
    named = {
        name: module.impl if name.endswith(".attn") else module
        for name, module in lora.unwrapped(fused_decoder.modules(model)).items()
    }
    logprob_excluded = not _registered or "logprob" in _registered[0][0]
    return named | {"logprob": None if logprob_excluded else logprobs.COMPUTED}


def check(llm: Any) -> Any:
    """See the package."""
    if not hasattr(llm.llm_engine, "model_executor"):
        raise NotSupported(
            "the model is in another process, where its operators cannot be inspected: set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported"
        )
    return llm.apply_model(check_model)[0]


def check_model(model: Any, called: bool = True) -> Any:
    """`check` of a live model; without `called`, of one that has not generated yet. Compiled code
    counts no calls: for a compiled model it is enough that this process called some kernel."""
    excluded, sampler = _registered[0] if _registered else (frozenset(), False)
    counts = model.model.do_not_compile
    replacement = check_operators(operators(model), excluded, called and counts)
    if called and not backend_calls():
        raise NotSupported("the model has generated, and no kernel was called")
    if called and sampler and not sampling.DRAWN.rlk_calls:
        raise NotSupported("the model has generated, and the kernels' sampler was not called")
    return replacement
