"""Gated delta nets of transformers' models, and the attention with a gate beside them.

A row has no state from before: a cache is refused. Padding, packing and whole rows are described by
the rows at which sequences begin, as in `attention`. B = sequences of the batch, T = their rows.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.delta_nets import DeltaNetCore, Shown
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.hf.attention import AttentionModule, attend
from rlk_kernels.integrations.hf.modules import cast
from rlk_kernels.integrations.hf.sequences import (
    check_rows,
    check_starts,
    packed_starts,
    real_first,
)
from rlk_kernels.integrations.operators import Counted


class DeltaNetLayer(Counted):
    """A decoder layer that also shows the positions to its gated delta net, which transformers'
    layer keeps from it: where they start again, a sequence begins."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        self.count()
        return super().forward(
            *args, position_ids=position_ids, rlk_positions=position_ids, **kwargs
        )


class GatedNorm(Counted):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        self.count()
        return profile.gated_norm(hidden_states, gate, cast(self.weight), self.variance_epsilon)


class DeltaNetModule(DeltaNetCore):
    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        rlk_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        self.count()
        if cache_params is not None:
            raise NotSupported(
                "a cache of a gated delta net is not supported in transformers: pass "
                "use_cache=False; vLLM decodes with the kernels"
            )
        shape, caller_cu = hidden_states.shape[:2], kwargs.get("cu_seq_lens_q")
        if attention_mask is not None and caller_cu is not None:
            raise NotSupported("cu_seq_lens_q and an attention mask with padding: pass one of them")
        if self.layer_idx == 0:
            if caller_cu is not None:
                check_starts(rlk_positions, caller_cu, shape[0])
            elif attention_mask is not None:
                check_rows(rlk_positions, attention_mask.bool(), shape[1], None)
        rows, order = cast(hidden_states).flatten(0, 1), None
        if attention_mask is not None:
            # Real rows to the front, padding to the end, outside every sequence.
            real = attention_mask.bool()
            order, cu = real_first(real), profile.packed(real.sum(1))
        elif caller_cu is not None:
            cu = caller_cu
        elif rlk_positions is not None and shape[1] > 1:
            cu = packed_starts(rlk_positions, shape[0])
        else:
            cu = profile.packed(torch.full((shape[0],), shape[1], device=rows.device))
        mixed, z, b, a = self.rlk_inputs(rows)
        core = self.rlk_core(self.rlk_net(), mixed, a, b, cu, order=order)
        if order is not None:
            core = core.masked_fill(~real.flatten()[:, None, None], 0.0)
        # Heads are rows of the norm, as in transformers.
        core = self.norm(core.flatten(0, 1), z.flatten(0, 1))
        return self.out_proj(core.reshape(*shape, -1))

    def rlk_net(self) -> profile.DeltaNet:
        parameters = self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias
        return profile.DeltaNet(
            *map(cast, parameters), self.num_k_heads, self.num_v_heads, self.head_k_dim
        )

    def rlk_inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k and v [T, F], z[T, Hv, E], b and a[T, Hv])."""
        if not hasattr(self, "in_proj_qkvz"):
            z = self.in_proj_z(rows).unflatten(-1, (self.num_v_heads, self.head_v_dim))
            return self.in_proj_qkv(rows), z, self.in_proj_b(rows), self.in_proj_a(rows)
        products = self.in_proj_qkvz(rows)[None], self.in_proj_ba(rows)[None]
        q, k, v, z, b, a = (x[0] for x in self.fix_query_key_value_ordering(*products))
        return torch.cat([x.flatten(1) for x in (q, k, v)], -1), z, b, a


class GatedAttention(Shown, AttentionModule):
    """Attention whose output is multiplied by the sigmoid of a gate, which q's product computes
    too."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        self.rlk_check(past_key_values)
        shape = hidden_states.shape[:-1]
        q, gate = self.q_proj(hidden_states).view(*shape, -1, 2 * self.head_dim).chunk(2, -1)
        k, v = (
            f(hidden_states).view(*shape, -1, self.head_dim) for f in (self.k_proj, self.v_proj)
        )
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = sys.modules[type(self).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        out, _ = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling,
            rlk_cached=past_key_values is not None, **kwargs,
        )  # fmt: skip
        self.show("attn", out)
        return self.o_proj(profile.gate(out.flatten(-2), gate.reshape(*shape, -1))), None
