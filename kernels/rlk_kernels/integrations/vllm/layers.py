"""The out-of-tree classes of vLLM's layers. T = packed tokens of all requests.

They override `forward` itself. vLLM calls `forward_oot` on out-of-tree platforms only, and a
compiled model calls `forward_native`, so that vLLM would silently skip a kernel in either.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import (
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

try:
    from vllm.model_executor.layers.rotary_embedding.gemma4_rope import Gemma4RotaryEmbedding
except ImportError:  # an older vLLM
    Gemma4RotaryEmbedding = None

from rlk_kernels.ahead import finish
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.finish import FINISHED, finish_of
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.rotary import INTERLEAVED, rotation
from rlk_kernels.integrations.vllm import gather
from rlk_kernels.integrations.vllm.ahead import compile_products, sizes_of
from rlk_kernels.integrations.vllm.config import prepare_config
from rlk_kernels.integrations.vllm.fp8 import DequantisedMethod
from rlk_kernels.parallel.embedding import local_ids, of_owner


class RlkEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Looks up rows of the weight as it was loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        return

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return profile.embed(input_, layer.weight)


class RlkVocabParallelEmbedding(Counted, VocabParallelEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()
        if type(self.quant_method) is not UnquantizedEmbeddingMethod:
            raise NotSupported(
                f"an embedding of {type(self.quant_method).__name__} is not supported"
            )
        self.quant_method = RlkEmbeddingMethod()
        if self.tp_size > 1:
            gather.connect((self.embedding_dim,), self.weight.dtype)

    def forward(self, input_: Tensor) -> Tensor:
        self.count()
        if self.tp_size == 1:
            return super().forward(input_)
        # Each rank looks up all ids, and the row of the rank that has the id is taken. vLLM adds
        # zeros instead, which turns -0 into +0.
        rows = self.num_embeddings_per_partition
        ids = input_.long()
        local, _ = local_ids(ids, get_tp_group().rank_in_group, rows)
        every = gather.columns(profile.embed(local, self.weight), self.tp_size)
        return of_owner(every.unflatten(-1, (self.tp_size, -1)).movedim(-2, 0), ids, rows)


class RlkRMSNorm(Counted, RMSNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()
        if self.variance_size_override is not None:
            raise NotSupported("a norm of a part of its row is not supported")

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        self.count()
        how = self.weight if self.has_weight else x.new_ones(x.shape[-1]), self.variance_epsilon
        return profile.norm(x, *how) if residual is None else profile.add_norm(x, residual, *how)


class RlkGemmaRMSNorm(Counted, GemmaRMSNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        self.count()
        how = self.weight, self.variance_epsilon, True
        return profile.norm(x, *how) if residual is None else profile.add_norm(x, residual, *how)


class RlkLinearMethod(UnquantizedLinearMethod):
    """Multiplies by the weight as it was loaded. On CPUs vLLM's own method repacks the weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight.is_cuda:
            compile_products(layer.weight, layer.bias, layer.rlk_rows)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.count()
        return profile.linear(x, layer.weight, bias)


class RlkDequantisedMethod(RlkLinearMethod):
    """Multiplies by the weight that fp8 values and their scales stand for."""

    def __init__(self, loaded: DequantisedMethod) -> None:
        self._loaded = loaded

    def process_weights_after_loading(self, layer: Any) -> None:
        self._loaded.process_weights_after_loading(layer)
        super().process_weights_after_loading(layer)


class VllmLinear(Counted):
    """The common base of the linears."""

    rlk_rows: tuple[int, ...]
    """`ahead.Sizes.rows`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()
        self.rlk_rows = sizes_of(get_current_vllm_config()).rows
        if isinstance(self.quant_method, DequantisedMethod):
            self.quant_method = RlkDequantisedMethod(self.quant_method)
            return
        if type(self.quant_method) is not UnquantizedLinearMethod:
            raise NotSupported(f"a linear of {type(self.quant_method).__name__} is not supported")
        self.quant_method = RlkLinearMethod()


class RlkMergedColumnParallelLinear(VllmLinear, MergedColumnParallelLinear):
    pass


class RlkColumnParallelLinear(VllmLinear, ColumnParallelLinear):
    """In the code of transformers: up_proj without a gate, or gate and up that a checkpoint
    fuses."""


class RlkQKVParallelLinear(VllmLinear, QKVParallelLinear):
    pass


class RlkRowParallelLinear(VllmLinear, RowParallelLinear):
    """o_proj and down_proj, each of which may be excluded.

    Each of several ranks computes some of the outputs from the whole input; inputs and outputs are
    gathered. Ranks add up no partial sums, so the bits are those of one rank.
    """

    excluded: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Starcoder2 has a name of its own.
        if self.prefix.rpartition(".")[2].replace("c_proj", "down_proj") in self.excluded:
            self.quant_method = UnquantizedLinearMethod()
            self.__class__ = RowParallelLinear
        elif self.tp_size > 1:
            self._share_outputs()

    def _share_outputs(self) -> None:
        """Replaces this rank's columns of the parameters by rows of them."""
        # In vLLM, shared experts return partial sums, which the sparse layer adds up; ours needs
        # whole ones.
        routed = {"shared_experts", "shared_expert"}.isdisjoint(self.prefix.split("."))
        partial = not self.reduce_results and routed
        if not self.input_is_parallel or partial or self.skip_bias_add:
            raise NotSupported(
                "on several ranks, a RowParallelLinear is not supported if its input is whole, its "
                "results stay partial, or the next module adds its bias"
            )
        if self.output_size % self.tp_size:
            raise NotSupported(
                f"{self.output_size} outputs cannot be divided among {self.tp_size} ranks"
            )
        rows = self.output_size // self.tp_size
        gather.connect((self.input_size_per_partition, rows), self.params_dtype)
        self.input_size_per_partition, self.output_size_per_partition = self.input_size, rows
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=self.input_size,
            output_partition_sizes=[rows],
            input_size=self.input_size,
            output_size=self.output_size,
            params_dtype=self.params_dtype,
            weight_loader=self._load_rows,
        )
        if self.bias is not None:
            self.bias = torch.nn.Parameter(self.bias.data[:rows].clone(), requires_grad=False)
            self.bias.weight_loader = self._load_rows
        self.rlk_shares_outputs = True

    rlk_shares_outputs = False
    """Whether the parameters are rows of the whole ones."""

    def _load_rows(self, param: Tensor, loaded: Tensor) -> None:
        rows = param.shape[0]
        param.data.copy_(loaded.narrow(0, self.tp_rank * rows, rows))

    def forward(self, input_: Tensor) -> Any:
        if not self.rlk_shares_outputs:
            return super().forward(input_)
        x = gather.columns(input_, self.tp_size)
        y = gather.columns(self.quant_method.apply(self, x, self.bias), self.tp_size)
        return (y, None) if self.return_bias else y


class VllmRotary(Counted):
    """Rotates by positions and frequencies, and does not read vLLM's table."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()
        family = get_current_vllm_config().model_config.hf_text_config.model_type
        self.rlk_interleaved = family in INTERLEAVED
        if not self.is_neox_style and not self.rlk_interleaved:
            raise NotSupported(f"interleaved rotary pairs are not supported in {family}")
        inv_freq, scaling = rotation(self._rope_parameters(), self.rotary_dim)
        device = self.cos_sin_cache.device
        self.register_buffer("rlk_inv_freq", inv_freq.to(device), persistent=False)
        scaling = None if scaling is None else scaling.to(device)
        self.register_buffer("rlk_scaling", scaling, persistent=False)

    def _rope_parameters(self) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.base}

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self.count()
        if key is None:
            raise NotSupported("keys shared between layers are not supported")
        rows = [x.view(x.shape[0], -1, self.head_size) for x in (query, key)]
        turns = positions.flatten(), self.rlk_inv_freq, self.rlk_scaling
        if self.is_neox_style == self.rlk_interleaved:
            # ERNIE's class changes `is_neox_style` of a module that vLLM caches for other models.
            raise NotSupported(
                "the rotary embedding is shared with a model of another family in this process, "
                "which rotates other pairs: build each model in a process of its own"
            )
        q, k = profile.rope(rows[0], rows[1], *turns, interleaved=self.rlk_interleaved)
        return q.view(query.shape), k.view(key.shape)


class RlkRotaryEmbedding(VllmRotary, RotaryEmbedding):
    pass


class RlkLinearScalingRotaryEmbedding(VllmRotary, LinearScalingRotaryEmbedding):
    def _rope_parameters(self) -> dict[str, Any]:
        if len(self.scaling_factors) != 1:
            raise NotSupported("a linear rope with several factors (LoRA's) is not supported")
        factor = self.scaling_factors[0]
        return {"rope_type": "linear", "rope_theta": self.base, "factor": factor}


class RlkYaRNScalingRotaryEmbedding(VllmRotary, YaRNScalingRotaryEmbedding):
    def _rope_parameters(self) -> dict[str, Any]:
        return {
            "rope_type": "yarn",
            "rope_theta": self.base,
            "factor": self.scaling_factor,
            # vLLM does not store the parameters from which this is computed.
            "attention_factor": self.mscale,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            "original_max_position_embeddings": self.max_position_embeddings,
        }


class RlkLlama3RotaryEmbedding(VllmRotary, Llama3RotaryEmbedding):
    def _rope_parameters(self) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "rope_theta": self.base,
            "factor": self.scaling_factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.orig_max_position,
        }


if Gemma4RotaryEmbedding is None:
    _PROPORTIONAL: tuple[type, ...] = ()
else:

    class RlkGemma4RotaryEmbedding(VllmRotary, Gemma4RotaryEmbedding):
        def _rope_parameters(self) -> dict[str, Any]:
            text = get_current_vllm_config().model_config.hf_text_config
            return dict(text.rope_parameters["full_attention"])

    _PROPORTIONAL = (RlkGemma4RotaryEmbedding,)

ROTARIES = (
    *(RlkRotaryEmbedding, RlkLinearScalingRotaryEmbedding, RlkLlama3RotaryEmbedding),
    *(RlkYaRNScalingRotaryEmbedding, *_PROPORTIONAL),
)


class RlkSiluAndMul(Counted, SiluAndMul):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        gate, up = x.chunk(2, dim=-1)
        return profile.act(gate, up)


class RlkGeluAndMul(Counted, GeluAndMul):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()
        if self.approximate != "tanh":
            raise NotSupported(f"gelu with approximate={self.approximate} is not supported")

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        gate, up = x.chunk(2, dim=-1)
        return profile.act(gate, up, "gelu_tanh")


class RlkLogitsProcessor(Counted, LogitsProcessor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_config()
        self.rlk_finish = finish_of(get_current_vllm_config().model_config.hf_text_config)
        if (self.soft_cap, self.scale) != self.rlk_finish:
            raise NotSupported("scaled or capped logits are not supported in this family")
        self.soft_cap, self.scale = FINISHED
        self.rlk_rows = sizes_of(get_current_vllm_config()).sampled

    def _apply_head(
        self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None
    ) -> Tensor:
        if not isinstance(lm_head.weight, Tensor) or not lm_head.weight.is_floating_point():
            raise NotSupported("a quantised output layer is not supported")
        self.count()
        gather.check()
        if lm_head.weight.is_cuda:
            compile_products(lm_head.weight, embedding_bias, self.rlk_rows, torch.float32)
            finish()
        return profile.logits(hidden_states, lm_head.weight, embedding_bias, self.rlk_finish)

    def _gather_logits(self, logits: Tensor) -> Tensor | None:
        ranks = get_tp_group().world_size
        # Some versions call this for one rank too. Without all-gather only the first rank needs the
        # logits.
        if ranks == 1 or not self.use_all_gather:
            return super()._gather_logits(logits)
        return gather.columns(logits, ranks)
