"""Features that megatron-core's local spec lacks: packed sequences, sliding windows, context
parallelism and values of another width in the attention core, positions in the rotary embedding,
and a norm for sequence parallelism.

Each applies megatron-core's own arithmetic to other slices of the input. T = packed tokens.
"""

import copy
import functools
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from rlk_align.engines.megatron.rope import rotaries
from rlk_align.engines.megatron.slices import Slices
from rlk_align.engines.process.ranks import Ranks


class SequencesAttention(DotProductAttention):
    """megatron-core's attention core, one packed sequence after another, within a window. In
    context parallelism each rank receives all rows of a sequence and keeps its own output rows."""

    def __init__(
        self, config: TransformerConfig, *args: Any, windows: tuple[int | None, ...], **kwargs: Any
    ) -> None:
        """`windows`: for each layer, the number of keys that a query sees; None for all keys."""
        # megatron-core's attention core refuses context parallelism.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.window = windows[self.layer_number - 1]
        self.cp_ranks = context_ranks()

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
        `[T, heads * D]`, with the sequences of `cu_seqlens_q`."""
        slices = slices_of(query, packed_seq_params, self.cp_ranks)
        rows = [slices.whole(x) for x in (query, key, value)]
        if packed_seq_params is None:
            hidden = self._hidden(len(rows[0]), query.device)
            if attention_mask is not None:
                hidden = attention_mask | hidden
            out = super().forward(*rows, hidden, attn_mask_type, attention_bias)
            return slices.own(out)
        parts = [
            super(SequencesAttention, self).forward(
                *(x[start:stop, None] for x in rows),
                self._hidden(stop - start, query.device),
                attn_mask_type,
                attention_bias,
            )[:, 0]
            for start, stop in pairwise(slices.begins)
        ]
        return slices.own(torch.cat(parts))

    def _hidden(self, length: int, device: torch.device) -> torch.Tensor:
        """`[1, 1, length, length]`: True if the query (row) must not see the key (column)."""
        pairs = torch.ones(length, length, dtype=torch.bool, device=device)
        hidden = pairs.triu(1)
        if self.window is not None:
            hidden |= pairs.tril(-self.window)
        return hidden[None, None]


class LatentCore(SequencesAttention):
    """megatron-core's attention core for keys and values of different widths, which its local spec
    lacks: its arithmetic needs only the width of its output to be that of the values."""

    def __init__(
        self, config: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        own = copy.copy(config)
        own.kv_channels = v_channels or config.kv_channels
        super().__init__(own, *args, windows=(None,) * config.num_layers, **kwargs)


def context_ranks() -> Ranks:
    """This process's rank among those that share sequences, by megatron-core's state."""
    group = parallel_state.get_context_parallel_group()
    return Ranks(group.rank(), group.size(), torch.device("cpu"), group)


def slices_of(rows: torch.Tensor, packed: Any, ranks: Ranks) -> Slices:
    """The slices of sequences that these rows are: `[S / R, ...]`, or packed `[T / R, ...]`."""
    ends = [0, len(rows) * ranks.world] if packed is None else packed.cu_seqlens_q.tolist()
    return Slices(tuple(ends), ranks)


class PositionedGPTModel(GPTModel):
    """A GPTModel whose rotary embedding uses the position ids, which megatron-core's ignores."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        packed = kwargs.get("packed_seq_params")
        for rotary in rotaries(self):
            rotary.forward = functools.partial(_at_positions, rotary, position_ids, packed)
        return super().forward(input_ids, position_ids, *args, **kwargs)


def _at_positions(
    rotary: RotaryEmbedding, positions: torch.Tensor, packed: Any, *_args: Any, **_kwargs: Any
) -> Any:
    return rotate_at(rotary, positions, packed)


def rotate_at(rotary: RotaryEmbedding, positions: torch.Tensor, packed: Any = None) -> Any:
    """The output of `rotary` at these positions, int64 `[B, S]`, instead of 0, 1, 2, ...: angles,
    float32 `[S, B, 1, head_dim]`, with yarn's attention factor. Packed, B is 1. The kernels' rotary
    embedding takes positions itself."""
    if hasattr(rotary, "at"):
        return rotary.at(positions)
    ranks = context_ranks()
    if packed is not None and ranks.world > 1:
        # megatron-core selects this rank's rows of packed sequences itself.
        slices = slices_of(positions[0], packed, ranks)
        every_row = positions.new_zeros(slices.begins[-1])
        every_row[torch.from_numpy(slices.columns()).to(positions.device)] = positions[0]
        positions = every_row[None]
    every = rotary.get_emb(int(positions.max()) + 1)
    angles, *factor = every if isinstance(every, tuple) else (every,)
    rows = angles[:, 0, 0][positions.t()][:, :, None, :]
    return (rows, *factor) if factor else rows


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """The norm of the local spec (torch's), with which megatron-core refuses sequence parallelism.
    The weight is marked, so that a trainer sums its gradient over the ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **_unused: Any
    ) -> None:
        super().__init__(normalized_shape=hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
