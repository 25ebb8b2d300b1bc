"""The classes of the layer spec. S = length, B = sequences, activations `[S, B, F]`, packed
`[T, 1, F]`. Tensor-parallel ranks share products by the operators of `rlk_kernels.parallel`."""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.megatron.attention import FIRST_ROWS, boundaries, context_group
from rlk_kernels.integrations.megatron.limits import check_config
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.scoring import Scores
from rlk_kernels.parallel.context import check_lengths, own_positions
from rlk_kernels.parallel.copies import size_of
from rlk_kernels.parallel.embedding import embedding_parallel
from rlk_kernels.parallel.linear import column_parallel, row_parallel
from rlk_kernels.parallel.rms_norm import Shared


class MegatronNorm(Counted, torch.nn.RMSNorm):
    """A norm with the constructor of megatron-core's wrapper of torch's norm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(normalized_shape=hidden_size, eps=eps)
        check_config(config)
        # If a rank has only some of the rows, megatron-core adds up the gradient over ranks.
        self.weight.sequence_parallel = config.sequence_parallel

        self.rlk_shared: Shared | None = "sequence" if config.sequence_parallel else None

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        if self.rlk_shared is None:
            return profile.norm(x, self.weight, self.eps)
        group = get_tensor_model_parallel_group()
        return profile.shared_norm(x, self.weight, self.eps, self.rlk_shared, group)


class MegatronQueryNorm(MegatronNorm):
    """A norm of heads that ranks share, whose gradient megatron-core adds up over these ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps, **unused)
        shares = self.shares_heads(config)
        self.rlk_shared = "heads" if shares and config.tensor_model_parallel_size > 1 else None

    @staticmethod
    def shares_heads(config: Any) -> bool:
        return True


class MegatronKeyNorm(MegatronQueryNorm):
    """A norm like that of queries, unless several ranks have the same key-value head: their sum
    would not be the sum over the rows of one rank."""

    @staticmethod
    def shares_heads(config: Any) -> bool:
        return config.num_query_groups >= config.tensor_model_parallel_size


class Column(Counted, ColumnParallelLinear):
    """Adds its bias inside the product, even if megatron-core would leave it to the next module."""

    out_dtype: torch.dtype | None = None
    rlk_blocks = 1
    """The number of fused operators, each of which all ranks share."""

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, stride=stride, **kwargs)
        self.rlk_blocks = stride

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        self.count()
        self._check_reduces()
        y = column_parallel(
            input_, self.weight if weight is None else weight, self.bias, self.tp_group,
            sequence=self.sequence_parallel, blocks=self.rlk_blocks, out_dtype=self.out_dtype,
        )  # fmt: skip
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers:
            y = gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, None

    def _check_reduces(self) -> None:
        if self.disable_grad_reduce:
            raise NotSupported(
                "disable_grad_reduce is not supported: gradients are not added over ranks"
            )


class Row(Counted, RowParallelLinear):
    """Adds its bias inside the product, like `Column`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.input_is_parallel:
            raise NotSupported(
                "a RowParallelLinear whose input is not shared by ranks is not supported"
            )
        if self.bias is not None:
            # Each rank has the whole gradient, which megatron-core must not add up over ranks.
            self.bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        self.count()
        y = row_parallel(
            input_, self.weight, self.bias, self.tp_group, sequence=self.sequence_parallel
        )
        return y, None


class OutputLayer(Scores, Column):
    """The output layer, whose logits are fp32."""

    out_dtype = torch.float32

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        if self.rlk_scoring is None:
            return super().forward(input_, weight, runtime_gather_output)
        self.count()
        self._check_reduces()
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.tp_group
            )
        weight = self.weight if weight is None else weight
        return self.score(input_, weight, self.bias, self.tp_group), None


def language_model_loss(labels: Tensor, logits: Tensor, group: Any = None) -> Tensor:
    """fp32 `[B, S]`: the negative log-probs of logits `[S, B, V]` at labels `[B, S]`. If the ranks
    of `group` share the vocabulary, logits are this rank's columns."""
    rows, targets = logits.transpose(0, 1).flatten(0, 1), labels.flatten()
    return -profile.logp(rows, targets, group=group).view(labels.shape)


class MegatronEmbedding(Counted, VocabParallelEmbedding):
    def forward(self, input_: Tensor) -> Tensor:
        self.count()
        y = embedding_parallel(input_, self.weight, self.tp_group)
        if not self.reduce_scatter_embeddings:
            return y
        y = y.transpose(0, 1).contiguous()
        return scatter_to_sequence_parallel_region(y, group=self.tp_group)


class GatedMLP(Counted, MLP):
    """Computes the activation between the two linears, which count their calls themselves."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Any = None, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        if per_token_scale is not None:
            raise NotSupported("an MLP with per_token_scale (of an expert) is not supported")
        self.count()
        both, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            both = both + bias
        return self.linear_fc2(profile.act(*both.chunk(2, dim=-1)))


class Positions(Counted, RotaryEmbedding):
    """Returns positions, int64 `[S, B or 1]`, instead of angles. For packed sequences it returns
    none, `[0, 1]`, because positions follow from the bounds of the sequences."""

    rlk_scaling: Tensor | None
    """The factor of cos and sin, `[1]`; set by `use_kernels`."""

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **_unused: Any
    ) -> Any:
        self.count()
        length, context = 0 if packed_seq else max_seq_len, self.cp_group
        if context is None or size_of(context) == 1 or length == 0:
            return offset + torch.arange(length, device=self.inv_freq.device)[:, None]
        begins = torch.tensor([0, length])
        check_lengths(begins, length, size_of(context))
        positions = own_positions(begins, length, context).to(self.inv_freq.device)
        return offset + positions[:, None]

    def at(self, positions: Tensor) -> Any:
        """The value of `forward` for these positions, int64 `[B, S]`."""
        self.count()
        return positions.t()


class ScaledPositions(Positions):
    """Returns a pair, because GPTModel expects yarn's angles and attention factor, and drops the
    second."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs), None

    def at(self, positions: Tensor) -> Any:
        return super().at(positions), None


class Rope(torch.nn.Module):
    """Rotates the query and the key of one layer: (q, k) of q[S, B, H, D] and k[S, B, Hk, D]."""

    def __init__(self, interleaved: bool = False) -> None:
        """interleaved: whether neighbours are a pair."""
        super().__init__()
        self.interleaved = interleaved

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        length, batch = q.shape[:2]
        at = positions.expand(length, batch).reshape(-1)
        rows = (x.flatten(0, 1) for x in (q, k))
        turns = inv_freq.to(q.device), None if scaling is None else scaling.to(q.device)
        turned = profile.rope(*rows, at, *turns, self.interleaved)
        return tuple(x.unflatten(0, (length, batch)) for x in turned)


class RotatingAttention(SelfAttention):
    """Rotates queries and keys by `Rope` instead of megatron-core's function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = Rope()
        self._rotation_inputs: tuple[Tensor, Any] | None = None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any,
        rotary_pos_emb: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if kwargs.get("inference_context") is not None:
            raise NotSupported("megatron-core's inference is not supported, only training is")
        self._rotation_inputs = (rotary_pos_emb, kwargs.get("packed_seq_params"))
        try:
            out = super().forward(
                hidden_states, attention_mask, *args, rotary_pos_emb=None, **kwargs
            )
        finally:
            self._rotation_inputs = None
        if self.layer_number == 1:
            check_begin(rotary_pos_emb, getattr(attention_mask, FIRST_ROWS, (None,))[0])
        return out

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        assert self._rotation_inputs is not None
        positions, packed = self._rotation_inputs
        if not isinstance(positions, Tensor) or positions.is_floating_point():
            raise NotSupported(
                "the model's rotary embedding has no kernel: call use_kernels(model)"
            )
        if packed is not None:
            begins = boundaries(packed)
            if not len(positions):
                context = context_group(self.config, self.pg_collection)
                rows = len(query) * size_of(context)
                positions = own_positions(begins, rows, context)[:, None]
        (rotary,) = self.rlk_rotary
        query, key = self.rope(query, key, positions, rotary.inv_freq, rotary.rlk_scaling)
        return query, key, value

    rlk_rotary: tuple[Positions]
    """The model's rotary embedding, set by `use_kernels`. The tuple keeps it from becoming a
    submodule of this layer."""


def check_begin(positions: Tensor, first: Tensor | None) -> None:
    """Raises NotSupported if positions[S, B or 1] are not 0 at the first row of each sequence.
    first: `[B]`, the number of rows of padding before it; None if there are none."""
    if first is None:
        return
    at = positions.expand(-1, len(first)).gather(0, first[None].clamp(max=len(positions) - 1))
    if bool((at != 0).any()):
        raise NotSupported(
            "padding before a sequence is not supported if positions are the indices of rows, as "
            "in GPTModel: pad after the sequences, or pack them"
        )
