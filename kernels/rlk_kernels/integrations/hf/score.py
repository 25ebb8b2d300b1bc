"""Scores tokens with the model's own forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations.hf.loss import NO_TOKEN
from rlk_kernels.integrations.hf.packing import packed
from rlk_kernels.integrations.hf.sequences import packed_starts
from rlk_kernels.integrations.profile import EVERYTHING, Truncation
from rlk_kernels.integrations.scoring import Scoring, scoring


def score_tokens(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None,
    last: int | None, temperature: float, return_entropy: bool, cu_seq_lens: Tensor | None,
    truncation: Truncation, kept: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """See the package."""
    if input_ids.dim() != 2:
        raise ValueError(f"score_tokens: input_ids[B, L] are needed, not {tuple(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"score_tokens: attention_mask {tuple(attention_mask.shape)} does not fit input_ids "
            f"{tuple(input_ids.shape)}"
        )
    if attention_mask is not None and cu_seq_lens is not None:
        raise ValueError(
            "score_tokens: attention_mask describes padded rows and cu_seq_lens packed ones; pass "
            "one of them"
        )
    length = input_ids.shape[1]
    count = length - 1 if last is None else last
    if not 0 <= count < length:
        raise ValueError(
            f"score_tokens: last={last} of {length} tokens; it must be 0 to {length - 1}, because "
            "the first token has none before it"
        )
    if kept is not None and truncation != EVERYTHING:
        raise ValueError(
            f"score_tokens: kept says which tokens are kept, and so does {truncation}; pass one of "
            "them"
        )
    batch = input_ids.shape[0]
    if kept is not None and (kept.dtype != torch.bool or kept.shape[:-1] != (batch, count)):
        raise ValueError(
            f"score_tokens: bool kept[{batch}, {count}, V] is needed, not {kept.dtype} "
            f"{tuple(kept.shape)}"
        )
    if attention_mask is not None and position_ids is None:
        # As in vLLM, positions do not count padding.
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    targets = _targets(input_ids, attention_mask, position_ids)[:, length - 1 - count :]
    rows = torch.arange(length - 1 - count, length - 1, device=input_ids.device)
    if cu_seq_lens is None and attention_mask is None and position_ids is not None:
        # Otherwise each layer would search for them.
        cu_seq_lens = packed_starts(position_ids, input_ids.shape[0])
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    asked = Scoring(targets, temperature, return_entropy, truncation=truncation, kept=kept)
    with scoring(model, asked):
        scores = _scores(model, inputs, position_ids, cu_seq_lens, rows)
    return (scores[..., 0], scores[..., 1]) if return_entropy else scores[..., 0]


def score_without_padding(
    model: Any, forward: Callable[..., Any], ids: Tensor, mask: Tensor, last: int,
    temperature: float, entropy: bool, entropy_gradient: bool = True,
) -> Tensor:  # fmt: skip
    """fp32 [B, last, 1 or 2]: the log-probs of the `last` tokens of ids[B, L], and with `entropy`
    the entropies. They have the bits of `score_tokens` with the mask, and are 0 at padding. The
    tokens are moved into one row (`packing.py`), so the sums over rows in weights' gradients have
    another order. `forward` is called instead of the model, of which it is a part.
    entropy_gradient: whether the caller differentiates the entropies."""
    row = packed(ids, mask, last)
    inputs = {"input_ids": row.ids, "attention_mask": None}
    asked = Scoring(row.targets, temperature, entropy, entropy_gradient=entropy_gradient)
    with scoring(model, asked):
        scores = _scores(forward, inputs, row.positions, row.starts, row.rows)
    return row.unpacked(scores)


def _scores(
    forward: Callable[..., Any], inputs: dict[str, Any], position_ids: Tensor | None,
    cu_seq_lens: Tensor | None, rows: Tensor,
) -> Tensor:  # fmt: skip
    """What a model in `scoring` returns for these rows."""
    packed = {}
    if cu_seq_lens is not None:
        packed = {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
    return forward(
        **inputs, position_ids=position_ids, use_cache=False, logits_to_keep=rows, **packed
    ).logits


def _targets(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """int64 [B, L - 1] for ids[B, L]: the token after each; NO_TOKEN at padding, and before the
    first token of a packed sequence."""
    targets = ids[:, 1:].long()
    if mask is not None:
        real = mask.bool()
        return targets.masked_fill(~(real[:, 1:] & real[:, :-1]), NO_TOKEN)
    if positions is not None:
        targets = targets.masked_fill(positions[:, 1:] != positions[:, :-1] + 1, NO_TOKEN)
    return targets
