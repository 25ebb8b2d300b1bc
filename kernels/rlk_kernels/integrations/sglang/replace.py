"""Puts the kernels into a live ModelRunner, takes them out again, and finds the object that
computes each operator."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.logprob_processor import InputLogprobProcessor, OutputLogprobProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models import qwen3, qwen3_moe
from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from torch import Tensor

from rlk_kernels.integrations import fused_decoder, profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.frameworks import refuse
from rlk_kernels.integrations.handle import Handle
from rlk_kernels.integrations.operators import (
    ROUTED,
    Replacement,
    check_sparse,
    excluded_operators,
)
from rlk_kernels.integrations.operators import check as check_operators
from rlk_kernels.integrations.rotary import rotation
from rlk_kernels.integrations.sglang import layers, ranks, sampling, settings
from rlk_kernels.integrations.sglang.attention import Attention, RlkAttentionBackend
from rlk_kernels.integrations.sglang.logprobs import PromptLogprobs, SampledLogprobs, Sampling
from rlk_kernels.integrations.token_logprobs import TokenLogprobs

CLASSES: dict[type, type] = {
    VocabParallelEmbedding: layers.Embedding,
    **dict.fromkeys((QKVParallelLinear, MergedColumnParallelLinear), layers.Linear),
    RowParallelLinear: layers.RowLinear,
    RMSNorm: layers.Norm,
    **dict.fromkeys(
        (
            *(RotaryEmbedding, LinearScalingRotaryEmbedding),
            *(Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding),
        ),
        layers.Rotary,
    ),
    SiluAndMul: layers.Act,
    RadixAttention: Attention,
    Qwen3MoeSparseMoeBlock: layers.SparseBlock,
    LogitsProcessor: layers.Logits,
    Sampler: Sampling,
    InputLogprobProcessor: PromptLogprobs,
    OutputLogprobProcessor: SampledLogprobs,
}
"""SGLang's class -> the class that comes in front of it."""
REPLACEMENTS = {
    base: type(f"Rlk{base.__name__}", (ours, base), {}) for base, ours in CLASSES.items()
}
"""SGLang's class -> the class that its objects get."""
DRAWING = type("RlkDrawingSampler", (sampling.Drawing, Sampler), {})
"""The class of a sampler that draws by the kernels."""
_excluded: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
"""ModelRunner with the kernels -> the operators that SGLang continues to compute."""


class RlkLinearMethod(UnquantizedLinearMethod):
    """Multiplies by the weight as it was loaded, and as it is reloaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        return

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.count()
        return profile.linear(x, layer.weight, bias)


def operators(runner: Any) -> dict[str, Any]:
    """See the package."""
    model = runner.model
    named = fused_decoder.modules(model)
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            named |= {f"layers.{i}.{op}": layer.mlp for op in ROUTED}
    parts = _logprob_parts(runner)
    stock = [part for part in parts if type(part) in CLASSES]
    return named | {"logprob": stock[0] if stock else parts[-1].rlk_computed}


def _logprob_parts(runner: Any) -> tuple[Any, ...]:
    sampler = runner.sampler
    prompt = runner.model.logits_processor.input_logprob_processor
    return sampler, prompt, sampler.output_logprob_processor


def use_kernels(runner: Any, excluded: Iterable[str] = (), sampler: bool = False) -> Handle:
    """See the package."""
    excluded = excluded_operators(excluded)
    if runner in _excluded:
        raise NotSupported("this ModelRunner has the kernels already: close their handle first")
    if sampler and "logprob" in excluded:
        raise NotSupported("the kernels' sampler without their log-probs: do not exclude logprob")
    settings.check(runner)
    settings.check_not_captured(runner)
    named = operators(runner)
    if any(name.endswith(".experts") for name in named):
        check_sparse(excluded)
    stays = {id(o) for name, o in named.items() if name.rpartition(".")[2] in excluded}
    modules = [o for name, o in named.items() if name != "logprob" and id(o) not in stays]
    refuse("SGLang", _of_modules(modules))
    _call_head_norms()
    with ExitStack() as undo:
        # q, k and v are one module.
        for module in modules:
            if _replace(undo, module):
                _prepare(undo, module, runner)
        if "attn" not in excluded:
            _set(undo, runner, "attn_backend", RlkAttentionBackend(runner))
        if "logprob" not in excluded:
            computed = TokenLogprobs()
            for part in _logprob_parts(runner):
                _replace(undo, part)
                part.rlk_computed = computed
        if sampler:
            sampling.DRAWN.rlk_calls = 0
            runner.sampler.__class__ = DRAWING
            sampling.give_seeds(undo, runner.server_args.random_seed)
        _excluded[runner] = excluded
        undo.callback(_excluded.pop, runner, None)
        # Later models share the cached rotary modules.
        factory._ROPE_DICT.clear()
        check_operators(operators(runner), excluded, called=False)
        return Handle(runner, undo.pop_all())


@functools.cache
def _call_head_norms() -> None:
    """Makes SGLang's models call the norms of q and k that are ours, once in this process. Other
    norms are computed as before."""
    for module in (qwen3, qwen3_moe):
        module.apply_qk_norm = layers.norms_by_head(module.apply_qk_norm)


def _of_modules(modules: Iterable[Any]) -> Iterator[str]:
    """The settings of live modules that no kernel has, each once."""
    found: dict[str, None] = {}
    for m in modules:
        name = type(m).__name__
        method = type(getattr(m, "quant_method", None)).__name__
        scaled = getattr(m, "logit_scale", None) or getattr(m, "final_logit_softcapping", None)
        window = getattr(m, "sliding_window_size", -1)
        refused = {
            f"a {name} of {method}": not method.startswith(("Unquantized", "NoneType")),
            f"a {name} whose weight SGLang has packed": getattr(m, "use_intel_amx_backend", False),
            "a norm of a part of its row, without a weight, or with casts": isinstance(m, RMSNorm)
            and bool(
                m.variance_size_override
                or not m.has_weight
                or m.cast_x_before_out_mul
                or m.fp32_residual
                or m.override_orig_dtype
            ),
            "on several ranks, a RowParallelLinear that takes its whole input, or leaves its bias "
            "to the next module": isinstance(m, RowParallelLinear)
            and get_tp_group().world_size > 1
            and (not m.input_is_parallel or m.skip_bias_add),
            "interleaved rotary pairs": isinstance(m, RotaryEmbedding) and not m.is_neox_style,
            "scaled or capped logits": isinstance(m, LogitsProcessor) and scaled is not None,
            "attention with a window, a cap or scales": isinstance(m, RadixAttention)
            and (window > 0 or m.logit_cap > 0 or m.k_scale is not None),
            "attention that is not a decoder's": isinstance(m, RadixAttention)
            and (m.is_cross_attention or m.attn_type != AttentionType.DECODER),
        }
        found |= dict.fromkeys(setting for setting, is_set in refused.items() if is_set)
    yield from found


def _prepare(undo: ExitStack, module: Any, runner: Any) -> None:
    """Gives a module what its new class reads."""
    several = get_tp_group().world_size > 1
    if isinstance(module, layers.Linear):
        _set(undo, module, "quant_method", RlkLinearMethod())
    if isinstance(module, layers.RowLinear) and several:
        for name in ("weight",) if module.bias is None else ("weight", "bias"):
            ranks.share_outputs(undo, module, name)
        module.rlk_shares_outputs = True
    elif isinstance(module, layers.SparseBlock) and several:
        ranks.share_outputs(undo, module.experts, "w2_weight")
    if isinstance(module, layers.Rotary):
        rope = dict(runner.model_config.hf_config.rope_parameters)
        inv_freq, module.rlk_scaling = rotation(rope, module.rotary_dim)
        module.rlk_inv_freq = inv_freq.to(runner.device)


def _replace(undo: ExitStack, module: Any) -> bool:
    """Whether an object got another class; one that has a class of ours, or one that the kernels
    do not know, keeps its class."""
    base = type(module)
    if base not in CLASSES:
        return False
    undo.callback(_restore, module, base)
    module.__class__ = REPLACEMENTS[base]
    return True


def _restore(module: Any, base: type) -> None:
    module.__class__ = base
    for name in [name for name in vars(module) if name.startswith("rlk_")]:
        del vars(module)[name]


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of an object, which `undo` restores."""
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def check(runner: Any) -> Replacement:
    """See the package."""
    excluded = _excluded.get(runner, frozenset())
    replacement = check_operators(operators(runner), excluded)
    backend = runner.attn_backend
    if "attn" not in excluded and not isinstance(backend, RlkAttentionBackend):
        raise NotSupported(f"attention is now computed by SGLang's {type(backend).__name__}")
    if isinstance(runner.sampler, DRAWING) and not sampling.DRAWN.rlk_calls:
        raise NotSupported("the model has generated, and the kernels' sampler was not called")
    return replacement
