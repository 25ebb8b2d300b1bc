"""The out-of-tree classes of vLLM's sparse layers.

Each tensor-parallel rank computes some outputs of both products of every expert, and the ranks
gather them. gate and up are divided as in vLLM; down is divided by rows, where vLLM divides its
columns and adds up partial sums. Each rank routes every token.

T = packed tokens of all requests   E = experts   H = hidden size   I = inner size of an expert
R = ranks
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.experts import Clamped, Sparse
from rlk_kernels.integrations.vllm import families, gather
from rlk_kernels.integrations.vllm.ahead import compile_experts, compile_products, sizes_of
from rlk_kernels.integrations.vllm.config import check_sparse_layer
from rlk_kernels.integrations.vllm.layers import RlkLinearMethod, VllmLinear

CLAMPED = "swigluoai"
"""vLLM's name of GPT-OSS's activation."""


class RlkFusedMoEMethod(UnquantizedFusedMoEMethod):
    """Keeps the experts' weights as they were loaded, w13[E, 2 I / R, H] and w2[E, H / R, I].
    vLLM's own method pads and packs them for its kernels."""

    supports_pre_processed_weights = True

    def __init__(self, moe: Any) -> None:
        self.rlk_tokens = sizes_of(get_current_vllm_config()).rows
        if not current_platform.is_cpu():
            super().__init__(moe)
            return
        # Skips vLLM's choice of a kernel, because none of its kernels supports every size on a CPU.
        super(UnquantizedFusedMoEMethod, self).__init__(moe)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        ranks = self.moe.moe_parallel_config.tp_size
        if ranks == 1:
            return
        partial = layer.w2_weight
        experts, hidden, inner = partial.shape
        if hidden % ranks:
            raise NotSupported(f"{hidden} outputs of experts cannot be divided among {ranks} ranks")
        # The new parameter has the same number of entries, and vLLM's attributes of the old one.
        rows = partial.data.view(experts, hidden // ranks, inner * ranks)
        layer.w2_weight = torch.nn.Parameter(rows, requires_grad=False)
        set_weight_attrs(layer.w2_weight, vars(partial) | {"weight_loader": self._load_rows})

    def _load_rows(
        self, param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str,
        expert_id: int, return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        """Loads w2 of one expert, [H, I], or of all experts, by rows; vLLM's
        `RoutedExperts.weight_loader` loads it by columns."""
        rows = param.shape[1]
        target = param.data if loaded_weight.dim() == 3 else param.data[expert_id]
        target.copy_(loaded_weight.narrow(-2, self.moe.tp_rank * rows, rows))
        return True if return_success else None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        gate_up, down = layer.w13_weight, layer.w2_weight
        # Experts with biases are compiled when they are called.
        if down.is_cuda and not self.moe.has_bias:
            compile_experts(gate_up, down, layer.top_k, layer.renormalize, self.rlk_tokens)


class RouterMethod(RlkLinearMethod):
    """Returns the logits of all experts in fp32."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight.is_cuda:
            compile_products(layer.weight, layer.bias, layer.rlk_rows, torch.float32)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.count()
        # GLM-4.5's block in vLLM 0.26 widens the rows, which changes no value.
        return profile.router(x.to(layer.weight.dtype), layer.weight, bias)


ROUTERS = ("gate", "router", "shared_expert_gate")
"""The names of routers, and of the gate of shared experts. GPT-OSS's is a `router`, which vLLM 0.26
has as a ReplicatedLinear."""


LATENT = "kv_a_proj_with_mqa"
"""The name of the product of keys' latent in a latent attention without a latent of queries."""


class RlkReplicatedLinear(VllmLinear, ReplicatedLinear):
    """A router, the gate of shared experts, or the product of a latent, by its name; otherwise
    vLLM's own linear."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = kwargs.get("prefix", "").rpartition(".")[2]
        if name not in (*ROUTERS, LATENT):
            self.__class__ = ReplicatedLinear
            ReplicatedLinear.__init__(self, *args, **kwargs)
            return
        super().__init__(*args, **kwargs)
        if name != LATENT:
            self.quant_method = RouterMethod()


class RlkGateLinear(VllmLinear, GateLinear):
    """Bypasses vLLM's choice of a kernel. The weight has the model's dtype, because the product is
    fp32 in any case, unless the checkpoint's is fp32."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        family = get_current_vllm_config().model_config.hf_text_config.model_type
        dtype = torch.float32 if family in families.FP32_ROUTERS else None
        super().__init__(*args, **kwargs | {"params_dtype": dtype})
        self.quant_method = RouterMethod()

    def forward(self, x: Tensor) -> Any:
        return ReplicatedLinear.forward(self, x)


class RlkMoERunner(Sparse, MoERunner):
    """Routes, computes a layer's experts and adds them up, without vLLM's router and kernels."""

    def __init__(self, *args: Any, shared_experts: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, shared_experts=shared_experts, **kwargs)
        # vLLM would run them on another stream. The tuple keeps them from becoming a submodule,
        # because the block has them already.
        self.rlk_shared_experts = (shared_experts,)
        # The kernels multiply by the gate; the block has this module too.
        self.rlk_shared_gate = (getattr(shared_experts, "expert_gate", None),)
        if self.rlk_shared_gate != (None,):
            shared_experts.expert_gate = None
        check_sparse_layer()
        experts, parallel = self.routed_experts, self.moe_config.moe_parallel_config
        activation = getattr(self.activation, "value", "")
        refused = {
            f"experts of {type(experts.quant_method).__name__}": (
                type(experts.quant_method) is not RlkFusedMoEMethod
            ),
            "a gate of the shared experts": self.shared_expert_gate is not None,
            "a transform of the experts' input": self.routed_input_transform is not None,
            "data parallelism": parallel.dp_size > 1,
            "results that the next module adds up": self.moe_config.skip_final_all_reduce,
            f"scoring_func={experts.scoring_func}": experts.scoring_func != "softmax"
            and (experts.e_score_correction_bias is None or experts.scoring_func != "sigmoid"),
            "grouped top-k by a softmax": experts.use_grouped_topk
            and experts.scoring_func == "softmax"
            and (experts.num_expert_group or 1) > 1,
            "a routing function of the model's own": experts.custom_routing_function is not None,
            "routing weights on the experts' inputs": experts.apply_router_weight_on_input,
            f"an activation {self.activation}": activation not in ("silu", CLAMPED),
            f"a bias of experts without {CLAMPED}, or that without a bias": (
                self.moe_config.has_bias != (activation == CLAMPED)
            ),
            "scaled experts by a softmax": self.routed_scaling_factor != 1.0
            and experts.scoring_func == "softmax",
            "experts by a corrected softmax whose weights do not add up to 1": (
                experts.e_score_correction_bias is not None
                and experts.scoring_func == "softmax"
                and not experts.renormalize
            ),
            "redundant experts": experts.global_num_experts != experts.local_num_experts,
        }
        if settings := [setting for setting, is_set in refused.items() if is_set]:
            raise NotSupported(f"a sparse layer with {'; '.join(settings)} is not supported")
        self.rlk_ranks = parallel.tp_size
        if self.rlk_ranks > 1:
            columns = experts.w13_weight.shape[1] // 2, experts.w2_weight.shape[1]
            gather.connect(columns, experts.w13_weight.dtype)

    def maybe_init_modular_kernel(self) -> None:
        """Does nothing: vLLM 0.26 calls this on tensor-parallel ranks to choose a kernel."""

    def columns(self, x: Tensor) -> Tensor:
        return x if self.rlk_ranks == 1 else gather.columns(x, self.rlk_ranks)

    def forward(self, hidden_states: Tensor, router_logits: Tensor, *_: Any, **__: Any) -> Tensor:
        self.count()
        experts = self.routed_experts
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        how = experts.top_k, experts.renormalize, self._correction()
        weights, ids = self.choose(router_logits, *how)
        stacked, clamped = (experts.w13_weight, experts.w2_weight), None
        if self.moe_config.has_bias:
            clamped = Clamped(experts.w13_bias, experts.w2_bias, *families.SWIGLU)
        y = self.compute(hidden_states, weights, ids, *stacked, clamped=clamped)
        (shared,), (gate,) = self.rlk_shared_experts, self.rlk_shared_gate
        if shared is None:
            return y
        row = shared(hidden_states)
        if gate is not None:
            row = profile.gate_shared(gate(hidden_states)[0], row)
        return profile.add_shared(y, row)

    def _correction(self) -> profile.Correction | None:
        experts = self.routed_experts
        bias = experts.e_score_correction_bias
        if bias is None:
            return None
        if experts.scoring_func == "softmax":
            return profile.Correction(bias, 1, 1, 1.0, softmax=True)
        groups = (1, 1)
        if experts.use_grouped_topk:
            groups = (experts.num_expert_group, experts.topk_group)
        # vLLM scales either the weights or the sum of the rows; here it is always the weights.
        scale = self.routed_scaling_factor * experts.routed_scaling_factor
        return profile.Correction(bias, *groups, scale)


CLASSES: dict[type, type] = {
    UnquantizedFusedMoEMethod: RlkFusedMoEMethod,
    ReplicatedLinear: RlkReplicatedLinear,
    GateLinear: RlkGateLinear,
    MoERunner: RlkMoERunner,
}
"""vLLM's class -> the class that replaces it."""
