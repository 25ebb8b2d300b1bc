"""The classes that replace those of transformers' modules: they use the modules' parameters and the
operators of the kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlk_kernels.block_fp8 import fake_quantise
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.activations import check_silu
from rlk_kernels.integrations.experts import Clamped, Sparse
from rlk_kernels.integrations.finish import unfinished
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.scoring import Scores
from rlk_kernels.integrations.transformers_modules import cast


class HFEmbedding(Counted):
    def forward(self, ids: Tensor) -> Tensor:
        self.count()
        rows = cast(profile.embed(ids, self.weight))
        if self.padding_idx is not None and rows.requires_grad:
            # The row of padding gets no gradient.
            rows = torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)
        if hasattr(self, "embed_scale"):  # Gemma's is rounded to the model's dtype
            rows = rows * self.embed_scale.to(rows.dtype)
        return rows


class HFNorm(Counted):
    """Gemma 4's class has another name for eps, and no weight where it norms values."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        x, weight = cast(x), cast(getattr(self, "weight", None))
        return profile.norm(x, x.new_ones(x.shape[-1]) if weight is None else weight, eps)


class OnePlusNorm(Counted):
    """Multiplies by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return profile.norm(cast(x), cast(self.weight), self.eps, one_plus=True)


class Fp8(NamedTuple):
    """How a weight is quantised before it is dequantised again."""

    block: tuple[int, int]
    powers_of_two: bool


class HFLinear(Counted):
    rlk_fp8: Fp8 | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        weight = cast(self.weight)
        if self.rlk_fp8 is not None:
            weight = fake_quantise(weight, *self.rlk_fp8)
        return profile.linear(cast(x), weight, cast(self.bias))


class Head(Scores):
    def forward(self, x: Tensor) -> Tensor:
        self.count()
        if self.rlk_scoring is not None:
            return self.score(cast(x), cast(self.weight), cast(self.bias))
        return profile.logits(cast(x), cast(self.weight), cast(self.bias), self.rlk_finish)


class FinishedLM(Counted):
    """A causal LM whose output layer has capped and multiplied the logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with unfinished(self):
            return super().forward(*args, **kwargs)


class HFRouter(Sparse):
    """Returns the logits of all experts in fp32, and the weights and ids of the chosen experts in
    ascending id."""

    def forward(
        self, x: Tensor, e_score_correction_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """e_score_correction_bias: MiniMax-M2's, a buffer of the layer."""
        self.count()
        # ERNIE's is fp32 in a model of any dtype; only GPT-OSS's has a bias.
        weight = self.weight.float() if hasattr(self, "moe_statics") else cast(self.weight)
        bias = cast(getattr(self, "bias", None))
        logits = self.logits(cast(x.reshape(-1, x.shape[-1])), weight, bias)
        # Mixtral has no such setting: its weights always add up to 1; those of DeepSeek-V2 never.
        normalize = getattr(self, "norm_topk_prob", not hasattr(self, "topk_method"))
        correction = self._correction()
        if e_score_correction_bias is not None:
            correction = profile.Correction(e_score_correction_bias.float(), 1, 1, 1.0)
        weights, ids = self.choose(logits, self.top_k, normalize, correction)
        return logits, weights, ids.long()

    def _correction(self) -> profile.Correction | None:
        if hasattr(self, "moe_statics"):
            # The module adds its parameter, which ZeRO-3 gathers for its call alone.
            zeros = self.weight.new_zeros(1, len(self.weight), dtype=torch.float32)
            return profile.Correction(self.moe_statics(zeros)[0], 1, 1, 1.0, softmax=True)
        if not hasattr(self, "e_score_correction_bias"):
            return None
        # If the whole model was cast, the bias has another dtype, which transformers' code adds
        # too.
        bias, groups = self.e_score_correction_bias.float(), (self.num_group, self.topk_group)
        return profile.Correction(bias, *groups, self.routed_scaling_factor)


class ReversedRouter(HFRouter):
    """A router whose family reads the experts first, and the logits last."""

    def forward(
        self, x: Tensor, e_score_correction_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x, e_score_correction_bias)[::-1]


class SharedGate(Counted):
    """Returns fp32 logits [T, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return profile.router(cast(x), cast(self.weight))


class GatedBlock(Counted):
    """A sparse layer whose shared experts have a gate."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.count()
        x = hidden_states.flatten(0, -2)
        shared = profile.gate_shared(self.shared_expert_gate(x), self.shared_expert(x))
        _, weights, ids = self.gate(x)
        return profile.add_shared(self.experts(x, ids, weights), shared).view(hidden_states.shape)


class HFExperts(Sparse):
    """Takes the chosen experts in ascending id, as `HFRouter` returns them."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.count()
        check_silu(self.act_fn)
        gate_up, down = cast(self.gate_up_proj), cast(self.down_proj)
        return self.compute(cast(x), weights.float(), chosen.int(), gate_up, down)


class ClampedExperts(Sparse):
    """GPT-OSS's experts, whose weights are transposed."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.count()
        gate_up, down = cast(self.gate_up_proj).mT, cast(self.down_proj).mT
        biases = cast(self.gate_up_proj_bias), cast(self.down_proj_bias)
        clamped = Clamped(*biases, self.alpha, self.limit)
        how = weights.float(), chosen.int(), gate_up, down
        return self.compute(cast(x), *how, clamped=clamped)


def experts_class(experts: Any) -> type:
    """The class that replaces that of a layer's experts."""
    return ClampedExperts if hasattr(experts, "gate_up_proj_bias") else HFExperts
