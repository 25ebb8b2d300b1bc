"""The kernels in HF transformers: `use_kernels(model)` after loading, before `fully_shard`.

    from rlk_kernels.integrations import hf
    hf.use_kernels(model)                    # Llama, Mixtral: see ..families.ARCHITECTURES
    logprobs = hf.score_tokens(model, ids)   # of ids[:, 1:], without logits in memory
    logprobs = hf.token_logprobs(model(ids).logits[0, :-1], ids[0, 1:])     # the same bits

Modules keep their parameters and get another class. Attention is registered under the name `rlk`.
`apply_rotary_pos_emb` of the family's module is wrapped; calls that do not come from a model with
the kernels go to the original.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from rlk_kernels.integrations.operators import check
from rlk_kernels.integrations.profile import logp as token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from rlk_kernels.integrations.handle import Handle

__all__ = ["check", "fake_quantise", "operators", "score_tokens", "token_logprobs", "use_kernels"]


def use_kernels(model: Any, excluded: Iterable[str] = ()) -> "Handle":
    """Replace every operator of a causal LM by its kernel, except the `excluded` ones.

    Returns a handle, which is also a context manager. `close()` restores the model, unless it has
    been sharded since. If the handle is dropped, the kernels stay. A second call for the same model
    adds missing kernels; its `excluded` removes none. Handles may be closed in any order: the
    kernels of a handle stay while a later handle is open, and closing the last handle restores the
    model. If the handle of a later call is dropped, that call ends together with the previous one.
    Raises NotSupported, before any change, for a model with an operator that has no kernel.
    """
    from rlk_kernels.integrations.hf.model import replace

    return replace(model, excluded)


def fake_quantise(
    model: Any,
    block: tuple[int, int] = (128, 128),
    powers_of_two: bool = False,
    ignored: Collection[str] = (),
) -> list[str]:
    """Make every projection of a model with the kernels multiply by the weight that a rollout
    engine dequantises from fp8 in blocks; returns their names.

    Its weights stay as they are, and get the gradient of what they were rounded to. The output
    layer and the modules that `ignored` names are left out. Raises NotSupported for a model
    without the kernels, with experts, or without a module that `ignored` names.
    """
    from rlk_kernels.integrations.hf.fp8 import fake_quantise

    return fake_quantise(model, block, powers_of_two, ignored)


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it in a live model, for all operators except
    the log-prob, which `token_logprobs` computes."""
    from rlk_kernels.integrations.hf.model import operators

    return operators(model)


def score_tokens(
    model: Any,
    input_ids: "Tensor",
    attention_mask: "Tensor | None" = None,
    position_ids: "Tensor | None" = None,
    *,
    last: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    cu_seq_lens: "Tensor | None" = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    kept: "Tensor | None" = None,
) -> "Tensor | tuple[Tensor, Tensor]":
    """The log-prob of each token except the first, given the tokens before it, fp32 [B, L - 1], or
    of the `last` tokens of each row, [B, last]. With return_entropy the result is a pair, whose
    second part is the entropy of each token's distribution, of the same shape. Both are
    differentiable.

    input_ids[B, L], attention_mask[B, L] and position_ids[B or 1, L] are the model's arguments. If
    only the mask is given, positions count the real tokens, as in vLLM. Without a mask, positions
    that restart mark sequences packed into one row. cu_seq_lens (int32 [sequences + 1]), where each
    sequence begins and the last one ends, is checked against them; without it, the function
    searches the positions. The log-prob of padding and of a packed sequence's first token is 0,
    without a gradient. Logits are divided by the temperature.

    top_k, top_p and min_p are the limits with which the tokens were sampled: the log-prob is then
    that among the tokens that `rlk_kernels.sample` keeps at this temperature, recomputed from the
    model's logits. It has the bits of the sampler's log-prob where the logits have the bits of the
    sampler's logits. A token that the limits drop here has log-prob -inf: the logits differ. The
    gradient is that over the kept tokens, which are constants; the entropy is refused.

    kept, bool [B, L - 1 or last, V], are the kept tokens that the rollout recorded, in the place of
    these limits: where the logits differ, the limits would keep other tokens here. The log-prob and
    its gradient are then over the recorded tokens. A row without any keeps all.

    The result has the bits of `token_logprobs(model(...).logits, ...)`, without a [tokens,
    vocabulary] tensor in memory. The model, wrapped (FSDP2, DDP) or not, runs its own forward.
    Raises NotSupported if its output layer has no kernel; ValueError if `last` is out of range,
    shapes do not fit, or both a mask and cu_seq_lens are given.
    """
    from rlk_kernels.integrations.hf.score import score_tokens
    from rlk_kernels.integrations.profile import Truncation

    return score_tokens(
        model, input_ids, attention_mask, position_ids, last, temperature, return_entropy,
        cu_seq_lens, Truncation(top_k, top_p, min_p), kept,
    )  # fmt: skip
