"""What megatron-core's local spec lacks, given to it through the layer spec: packed sequences and
sliding windows in the attention core, positions in the rotary embedding, and a norm that sequence
parallelism allows.

Each is megatron-core's own arithmetic on other slices of the input. T = packed tokens.
"""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig


class SequencesAttention(DotProductAttention):
    """megatron-core's attention core, one packed sequence after another, within a window."""

    def __init__(self, *args: Any, windows: tuple[int | None, ...], **kwargs: Any) -> None:
        """`windows`: for each layer, how many keys a query sees, itself included; None is all."""
        super().__init__(*args, **kwargs)
        self.window = windows[self.layer_number - 1]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Padded: `[S, B, heads, D]` -> `[S, B, heads * D]`; packed: `[T, heads, D]` ->
        `[T, heads * D]`, the sequences being those of `cu_seqlens_q`."""
        if packed_seq_params is None:
            assert attention_mask is not None
            hidden = attention_mask | self._hidden(query.shape[0], query.device)
            return super().forward(query, key, value, hidden, attn_mask_type, attention_bias)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        out = [
            super(SequencesAttention, self).forward(
                query[start:stop, None],
                key[start:stop, None],
                value[start:stop, None],
                self._hidden(stop - start, query.device),
                attn_mask_type,
                attention_bias,
            )[:, 0]
            for start, stop in pairwise(ends)
        ]
        return torch.cat(out)

    def _hidden(self, length: int, device: torch.device) -> torch.Tensor:
        """`[1, 1, length, length]`, True where the query (row) may not see the key (column)."""
        pairs = torch.ones(length, length, dtype=torch.bool, device=device)
        hidden = pairs.triu(1)
        if self.window is not None:
            hidden |= pairs.tril(-self.window)
        return hidden[None, None]


class PositionedGPTModel(GPTModel):
    """A GPTModel whose rotary embedding sees the position ids, which megatron-core's ignores."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        rotary = self.rotary_pos_emb
        rotary.forward = lambda *_args, **_kwargs: rotate_at(rotary, position_ids)
        return super().forward(input_ids, position_ids, *args, **kwargs)


def rotate_at(rotary: RotaryEmbedding, positions: torch.Tensor) -> Any:
    """What `rotary` gives for 0, 1, 2, ..., at the positions of int64 `[B, S]` instead: angles,
    float32 `[S, B, 1, head_dim]`, and yarn's attention factor with them. Packed, B is 1. One that
    rotates by positions itself, as the kernels do, is given those."""
    if hasattr(rotary, "at"):
        return rotary.at(positions)
    every = rotary.get_emb(int(positions.max()) + 1)
    angles, *factor = every if isinstance(every, tuple) else (every,)
    rows = angles[:, 0, 0][positions.t()][:, :, None, :]
    return (rows, *factor) if factor else rows


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """The norm of the local spec (torch's), for which megatron-core refuses sequence parallelism:
    its weight is marked, so that a trainer sums its gradient over the ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **_unused: Any
    ) -> None:
        super().__init__(normalized_shape=hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
