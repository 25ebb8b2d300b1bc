"""The kernels in HF transformers: `use_kernels(model)` after loading, before `fully_shard`.

    from rlk_kernels.integrations import hf
    hf.use_kernels(model)                    # Llama, Qwen2, Qwen3, Mistral, Qwen3-MoE, Mixtral
    logprobs = hf.score_tokens(model, ids)   # of ids[:, 1:], without logits in memory
    logprobs = hf.token_logprobs(model(ids).logits[0, :-1], ids[0, 1:])     # the same bits

Modules keep their parameters and get another class; attention is registered under the name `rlk`;
`apply_rotary_pos_emb` of the family's module is wrapped, and hands every call that does not come
from such a model to the original.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlk_kernels.integrations.operators import check
from rlk_kernels.integrations.profile import logp as token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from rlk_kernels.integrations.hf.handle import Handle

__all__ = ["check", "operators", "score_tokens", "token_logprobs", "use_kernels"]


def use_kernels(model: Any, excluded: Iterable[str] = ()) -> "Handle":
    """Replace every operator of a causal LM by its kernel, except the `excluded` ones.

    Returns a handle, which is also a context manager: `close()` restores the model, until the model
    is sharded; if the handle is dropped, the kernels stay. A second call for the same model adds
    kernels where they are missing; its `excluded` removes none. Handles may be closed in any order:
    the kernels of one stay while a later one is open, and closing the last restores the model. If
    the handle of a later call is dropped, that call ends with the one before it.
    Raises NotServed, before anything changes, for a model with an operator that has no kernel.
    """
    from rlk_kernels.integrations.hf.model import replace

    return replace(model, excluded)


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it in a live model; all except the log-prob,
    which is `token_logprobs`."""
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
) -> "Tensor | tuple[Tensor, Tensor]":
    """Log-prob of each token but the first, given those before it -> fp32 [B, L - 1], or of the
    `last` tokens of each row [B, last]; with return_entropy a pair whose second part is the entropy
    [B, same] of each token's distribution. Both are differentiable.

    input_ids[B, L], attention_mask[B, L] and position_ids[B or 1, L] are the model's. Given only
    the mask, positions count the tokens that it shows, as vLLM does. Without a mask, positions that
    restart mark sequences packed into one row; cu_seq_lens (int32 [sequences + 1]) says where each
    of them begins and where the last ends, and is checked; without it they are searched for.
    The log-prob of padding and of a packed sequence's first token is 0, without a gradient. Logits
    are divided by the temperature.

    The result has the bits of `token_logprobs(model(...).logits, ...)`, without a [tokens,
    vocabulary] tensor in memory. The model, wrapped (FSDP2, DDP) or not, runs its own forward.
    Raises NotServed where its output layer has no kernel, ValueError where `last` is out of range,
    shapes do not fit, or both a mask and cu_seq_lens are given.
    """
    from rlk_kernels.integrations.hf.score import score_tokens

    return score_tokens(
        model, input_ids, attention_mask, position_ids, last, temperature, return_entropy,
        cu_seq_lens,
    )  # fmt: skip
