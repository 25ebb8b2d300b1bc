"""The kernels in HF transformers: `use_kernels(model)` after loading, before `fully_shard`.

    from rlk_kernels.integrations import hf
    hf.use_kernels(model)                    # Llama, Qwen2, Qwen3, Mistral, Qwen3-MoE, Mixtral
    logprobs = hf.token_logprobs(model(ids).logits[0, :-1], ids[0, 1:])

Modules keep their parameters and get another class; attention is registered under the name `rlk`;
`apply_rotary_pos_emb` of the family's module is wrapped, and hands every call that does not come
from such a model to the original.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlk_kernels.integrations.operators import check
from rlk_kernels.integrations.profile import logp as token_logprobs

if TYPE_CHECKING:
    from rlk_kernels.integrations.hf.handle import Handle

__all__ = ["check", "operators", "token_logprobs", "use_kernels"]


def use_kernels(model: Any, excluded: Iterable[str] = ()) -> "Handle":
    """Put the kernels under every operator of a causal LM, but the `excluded` ones.

    Closing what is returned (a context manager, too) takes the kernels out, until the model is
    sharded; where nobody keeps it, they stay. A call for a model that has the kernels adds them
    where they are missing, and `excluded` takes none out. Calls may be closed in any order: what
    one of them put in stays as long as a later one is open, and with the last the model is as it
    was. A later call of which nobody keeps the handle ends with the one before it.
    Raises NotServed for a model that has an operator without a kernel, before anything is changed.
    """
    from rlk_kernels.integrations.hf.model import replace

    return replace(model, excluded)


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> what computes it, of a live model; all but the log-prob, which is
    `token_logprobs`."""
    from rlk_kernels.integrations.hf.model import operators

    return operators(model)
