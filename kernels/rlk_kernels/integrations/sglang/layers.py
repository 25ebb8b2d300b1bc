"""The classes that SGLang's modules get, each in front of the module's own class. They override
`forward` itself, which SGLang's classes use to choose one of their implementations.

T = packed rows of all requests   F = features
"""

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.distributed import get_tp_group
from sglang.srt.models import qwen3_moe
from torch import Tensor

import rlk_kernels
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.sglang import ranks
from rlk_kernels.parallel.embedding import local_ids, of_owner


class Embedding(Counted):
    weight: Tensor
    tp_size: int

    def forward(self, input_: Tensor) -> Tensor:
        self.count()
        if self.tp_size == 1:
            return profile.embed(input_, self.weight)
        # Each rank looks up all ids, and the row of the rank that has the id is taken.
        rows, ids = len(self.weight), input_.long()
        local, _ = local_ids(ids, get_tp_group().rank_in_group, rows)
        every = ranks.columns(profile.embed(local, self.weight))
        return of_owner(every.unflatten(-1, (self.tp_size, -1)).movedim(-2, 0), ids, rows)


class Linear(Counted):
    """A linear whose `quant_method` is an `RlkLinearMethod`, which counts its calls."""


class RowLinear(Linear):
    """o_proj or down_proj, which several ranks compute by rows of its weight."""

    quant_method: Any
    bias: Tensor | None
    reduce_results: bool
    rlk_shares_outputs = False
    """Whether the parameters are rows of the whole ones."""

    def forward(self, input_: Tensor, *args: Any, **more: Any) -> Any:
        if not self.rlk_shares_outputs:
            return super().forward(input_, *args, **more)
        y = self.quant_method.apply(self, ranks.columns(input_), self.bias)
        return ranks.returned(y, self.reduce_results), None


class Norm(Counted):
    weight: Tensor
    variance_epsilon: float

    def forward(
        self, x: Tensor, residual: Tensor | None = None, post_residual_addition: Any = None,
        quant_linear: Any = None,
    ) -> Any:  # fmt: skip
        """The norm of x; with a residual, (the norm of the sum, the sum). Nothing is written in
        place."""
        if post_residual_addition is not None or quant_linear is not None:
            raise NotSupported("a norm that adds a third tensor or quantises is not supported")
        self.count()
        if residual is None:
            return profile.norm(x, self.weight, self.variance_epsilon)
        return profile.add_norm(x, residual, self.weight, self.variance_epsilon)


def norms_by_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's norm of the heads of q and k, which on GPUs computes both in place by one kernel of
    its own, and elsewhere copies them. Norms that have kernels of ours read them where the
    projection has written them."""

    @functools.wraps(original)
    def apply_qk_norm(
        q: Tensor, k: Tensor, q_norm: Any, k_norm: Any, head_dim: int, *args: Any, **more: Any
    ) -> Any:
        if not isinstance(q_norm, Norm):
            return original(q, k, q_norm, k_norm, head_dim, *args, **more)
        by_head = (x.unflatten(-1, (-1, head_dim)) for x in (q, k))
        return tuple(norm(x).flatten(-2) for norm, x in zip((q_norm, k_norm), by_head, strict=True))

    return apply_qk_norm


class Rotary(Counted):
    """Rotates by positions and frequencies, and does not read SGLang's table."""

    head_size: int
    rotary_dim: int
    rlk_inv_freq: Tensor
    rlk_scaling: Tensor | None

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if offsets is not None:
            raise NotSupported("a rotation with offsets is not supported")
        self.count()
        q, k = (x.reshape(x.shape[0], -1, self.head_size) for x in (query, key))
        q, k = profile.rope(q, k, positions.flatten(), self.rlk_inv_freq, self.rlk_scaling)
        if fused_set_kv_buffer_arg is not None:
            _write_cache(k, fused_set_kv_buffer_arg)
        return q.view(query.shape), k.view(key.shape)


def _write_cache(k: Tensor, to: Any) -> None:
    """Writes k[T, Hk, D] and the values of its rows to their slots, as SGLang's rotation of sparse
    models does on GPUs."""
    caches = (x.view(-1, 1, *k.shape[1:]) for x in (to.k_buffer, to.v_buffer))
    rlk_kernels.write_kv_cache(k, to.value.reshape(k.shape), *caches, to.cache_loc)


class Act(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.count()
        gate, up = x.chunk(2, dim=-1)
        return profile.act(gate, up)


class Logits(Counted):
    def _compute_lm_head(
        self, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None, *,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """fp32 [T, V], which SGLang does not round; `out`, where given, is not written."""
        self.count()
        return profile.logits(hidden_states, lm_head.weight, embedding_bias)


class SparseBlock(Sparse):
    """Qwen3-MoE's block: routes, computes the experts and adds them up, without SGLang's router
    and kernels."""

    gate: Any
    topk: Any
    experts: Any
    tp_size: int
    reduce_results = hasattr(qwen3_moe, "moe_tensor_model_parallel_all_reduce")
    """Whether SGLang's own block adds up the ranks' partial sums, as in 0.5.17."""

    def forward(self, hidden_states: Tensor, forward_batch: Any = None) -> Tensor:
        self.count()
        how = self.topk.topk_config
        logits = self.logits(hidden_states, self.gate.weight)
        weights, ids = self.choose(logits, how.top_k, how.renormalize)
        stacked = self.experts.w13_weight, self.experts.w2_weight
        return self.compute(hidden_states, weights, ids, *stacked)

    def columns(self, x: Tensor) -> Tensor:
        return x if self.tp_size == 1 else ranks.columns(x)

    def whole(self, x: Tensor) -> Tensor:
        return x if self.tp_size == 1 else ranks.returned(x, self.reduce_results)
