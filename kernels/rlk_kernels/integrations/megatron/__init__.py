"""The kernels in Megatron-core: a layer spec, and the parts that GPTModel builds itself.

    from rlk_kernels.integrations import megatron
    spec = megatron.layer_spec(config)               # in place of get_gpt_layer_local_spec()
    model = megatron.use_kernels(GPTModel(config, spec, ...), rope_parameters)
    logprobs = megatron.score_tokens(model, ids, positions, None, labels)    # no logits in memory
    logprobs = megatron.token_logprobs(logits_rows, targets, group=tensor_parallel_group)
    norm = megatron.gradient_norm(model)             # the same for every number of ranks

Compared with the TransformerEngine spec, communication does not overlap with products, and products
do not add weight gradients into `main_grad`. Supported are tensor parallelism, with or without
sequence parallelism, if the number of ranks divides the hidden size; context parallelism, if it
divides the heads, with sequences sliced as in megatron-core; and pipeline stages, virtual ones
included.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlk_kernels.integrations.operators import check
from rlk_kernels.integrations.profile import logp as token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "check",
    "gradient_norm",
    "layer_spec",
    "operators",
    "ordered_reduce_scatter",
    "score_tokens",
    "token_logprobs",
    "use_kernels",
    "with_kernels",
]


def layer_spec(config: Any, excluded: Iterable[str] = (), vp_stage: int | None = None) -> Any:
    """The spec of a decoder's layers for GPTModel, by its TransformerConfig. Every operator is a
    kernel, except the `excluded` ones, which are those of Megatron's local spec. The spec contains
    the layers of this rank's pipeline stage, or of `vp_stage` if stages are virtual.

    Raises NotSupported for a config that needs an operator without a kernel.
    """
    from rlk_kernels.integrations.megatron.spec import layer_spec

    return layer_spec(config, excluded, vp_stage)


def with_kernels(
    block: Any, excluded: Iterable[str] = (), windows: tuple[int | None, ...] = ()
) -> Any:
    """The same for a TransformerBlockSubmodules that was built from the local spec. windows: for
    each layer, the number of keys that a query sees, None for all; default: the config's
    `window_size`."""
    from rlk_kernels.integrations.megatron.spec import with_kernels

    return with_kernels(block, excluded, windows)


def use_kernels(
    model: Any, rope_parameters: Mapping[str, Any], excluded: Iterable[str] = ()
) -> Any:
    """Replaces a GPTModel's embedding, rotary embedding and output layer, which no spec covers, and
    returns the model. rope_parameters: those of the checkpoint's config.json."""
    from rlk_kernels.integrations.megatron.spec import use_kernels

    return use_kernels(model, rope_parameters, excluded)


@contextmanager
def ordered_reduce_scatter() -> Iterator[None]:
    """A context in which data-parallel ranks add up gradients in the order of
    `rlk_kernels.parallel.gradients`, if `DistributedDataParallelConfig` sets
    `reduce_scatter_with_fp32_accumulation` and `use_distributed_optimizer`. Build and train the
    model inside it."""
    from megatron.core.distributed import param_and_grad_buffer

    from rlk_kernels.parallel.gradients import reduce_scatter

    names = ("reduce_scatter_with_fp32_accumulation", "dist_reduce_scatter_func")
    before = [getattr(param_and_grad_buffer, name) for name in names]
    param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = reduce_scatter
    try:
        yield
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(param_and_grad_buffer, name, function)


def gradient_norm(model: Any) -> Any:
    """The 2-norm of a GPTModel's gradients, float64, with the same bits for any number of
    tensor-parallel ranks. Call it on all of them, after data-parallel ranks have added up their
    gradients and have them whole. A different padding of the vocabulary changes the sum."""
    from rlk_kernels.integrations.megatron.gradients import gradient_norm

    return gradient_norm(model)


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it in a live model, for all operators except
    the log-prob, which `token_logprobs` computes."""
    from rlk_kernels.integrations.megatron.spec import operators

    return operators(model)


def score_tokens(
    model: Any,
    input_ids: "Tensor",
    position_ids: "Tensor | None",
    attention_mask: "Tensor | None",
    labels: "Tensor",
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    vocabulary: int | None = None,
    **forward: Any,
) -> "Tensor | tuple[Tensor, Tensor]":
    """Log-probs fp32 [B, S] of labels[B, S], which are each row's next tokens, as for GPTModel. A
    negative label has log-prob 0 and no gradient. With return_entropy the result is a pair, whose
    second part is each row's entropy [B, S]. Both are differentiable.

    The other arguments are those of GPTModel.forward (for example `packed_seq_params=`) on the
    pipeline's last stage. vocabulary: the number of tokens if the output layer is padded; the
    padding is ignored. The result has the bits of `token_logprobs` of the model's logits, also if
    ranks share the vocabulary, without a [tokens, vocabulary] tensor in memory. Raises NotSupported
    if the output layer has no kernel, and for a temperature other than 1 if ranks share it.
    """
    from rlk_kernels.integrations.scoring import Scoring, scoring

    with scoring(model, Scoring(labels.t(), temperature, return_entropy, vocabulary)):
        scores = model(input_ids, position_ids, attention_mask, **forward)
    return (scores[..., 0], scores[..., 1]) if return_entropy else scores[..., 0]
