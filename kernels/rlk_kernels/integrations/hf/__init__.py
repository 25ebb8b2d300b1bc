"""The kernels in HF transformers: `use_kernels(model)` after loading, before `fully_shard`.

    from rlk_kernels.integrations import hf
    hf.use_kernels(model)                    # Llama, Qwen2, Qwen3, Mistral
    logprobs = hf.token_logprobs(model(ids).logits[0, :-1], ids[0, 1:])

Modules keep their parameters and get another class; attention is registered under the name `rlk`;
`apply_rotary_pos_emb` of the family's module is wrapped, and hands every call that does not come
from such a model to the original.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from rlk_kernels.integrations.operators import check
from rlk_kernels.integrations.profile import logp as token_logprobs

__all__ = ["check", "operators", "token_logprobs", "use_kernels"]


def use_kernels(model: Any, left: Iterable[str] = ()) -> ExitStack:
    """Put the kernels under every operator of a causal LM, but those that are `left` to it.

    Closing what is returned puts everything back; that works until the model is sharded. Raises
    NotServed for a model that has an operator without a kernel, before anything is changed.
    """
    from rlk_kernels.integrations.hf.model import replace

    return replace(model, left)


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> what computes it, of a live model; all but the log-prob, which is
    `token_logprobs`."""
    from rlk_kernels.integrations.hf.model import operators

    return operators(model)
