"""The part of the adapter that runs inside vLLM's worker: the manifest of the live model, and taps.

vLLM mixes WorkerExtension into its Worker class (`worker_extension_cls`), so its methods have
`self.model_runner`. Their names start with `rlk_`, because vLLM refuses names of its Worker.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlk_align.engines.common.attributes import (
    corrected_routing,
    gated_activation_name,
    norm_attributes,
    norm_epsilons,
    per_layer,
    plain_activation_name,
    rope_attributes,
)
from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.fused_places import attentions
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.lora import record_adapter
from rlk_align.engines.common.parameters import ParameterRecord, record_parameter
from rlk_align.engines.common.places import shards_of
from rlk_align.engines.common.transformers_rope import rotary_embeddings
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.process import heartbeat
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm.delta_net import delta_attributes
from rlk_align.engines.vllm.experts import sparse_blocks
from rlk_align.engines.vllm.graphs import GraphCounter
from rlk_align.engines.vllm.latent import core_of
from rlk_align.engines.vllm.lora import live_adapter
from rlk_align.engines.vllm.mamba import mamba_attributes
from rlk_align.engines.vllm.parallel import tensor_parallel
from rlk_align.engines.vllm.places import of_transformers, sliding_window, vllm_places
from rlk_align.engines.vllm.quantised import live_cache, live_fp8
from rlk_align.engines.vllm.taps import VLLMTaps
from rlk_align.engines.vllm.weights import vllm_weights
from rlk_align.errors import BadOption
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import ModelShape
from rlk_align.results import CodePlace, GraphReplays
from rlk_align.trace.schema import CacheRecord, LoraRecord, QuantisedProduct
from rlk_align.trace.writer import PassWriter


@dataclass(frozen=True, slots=True)
class TapPlan:
    """One pass to observe, as vLLM sends it to the worker processes."""

    open: Callable[[], PassWriter]
    """Opens the part of the pass that rank 0 writes."""
    shape: ModelShape
    samples: dict[str, int]
    """Id of a request in vLLM's outputs -> sample."""
    sampled: list[range]
    """Per sample, the positions whose logits are wanted."""
    kind: str
    """`decode` or `prefill`: whether logits come from sampling or from prompt log-probs."""
    batch: TokenBatch
    intervention: Intervention | None
    forced: bool
    """Whether the batch's responses are sampled, whatever the logits are."""
    taps: type[VLLMTaps]


class WorkerExtension:
    """Methods that vLLM's `collective_rpc` can call by name."""

    model_runner: Any

    def rlk_start_heartbeat(self, folder: Path, waits: tuple[str, ...]) -> None:
        """Starts the heartbeat of a worker process that vLLM started."""
        heartbeat.start(folder, f"rank {tensor_parallel().rank}", waits)

    def rlk_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rlk_patch(self, spec: EngineSpec) -> None:
        apply_patch(spec, self.model_runner.get_model())

    def rlk_plant(self, plant: Callable[[Any], ExitStack]) -> BadOption | None:
        """Calls `plant` with the model runner. Returns a BadOption instead of raising it, because
        an error that one process raises reaches another process as text only."""
        try:
            self._rlk_planted = plant(self.model_runner)
        except BadOption as error:
            return error
        return None

    def rlk_remove_fault(self) -> None:
        self._rlk_planted.close()

    def rlk_on_model(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model_runner.get_model(), *args)

    def rlk_attributes(self, shape: ModelShape) -> dict[str, Any]:
        return vllm_attributes(self.model_runner.get_model(), shape)

    def rlk_code(self, shape: ModelShape) -> dict[str, CodePlace]:
        model = self.model_runner.get_model()
        return code_places(model, vllm_places(model, shape, tensor_parallel().world))

    def rlk_shards(self, shape: ModelShape) -> dict[str, list[tuple[int, int, int]]]:
        model = self.model_runner.get_model()
        return shards_of(vllm_places(model, shape, tensor_parallel().world))

    def rlk_weights(self, shape: ModelShape) -> list[ParameterRecord]:
        ranks = tensor_parallel()
        with torch.inference_mode():
            live = vllm_weights(self.model_runner.get_model(), shape, ranks)
            # Every rank gathers, and rank 0 records.
            return [record_parameter(p) for p in live if ranks.rank == 0]

    def rlk_adapter(self, request: Any, path: str, shape: ModelShape) -> LoraRecord:
        model = self.model_runner.get_model()
        dtype = str(self.model_runner.dtype).removeprefix("torch.")
        slots = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        live = live_adapter(model, shape, slots.index(request.lora_int_id), path)
        return record_adapter(path, live, dtype)

    def rlk_products(self, shape: ModelShape) -> dict[str, QuantisedProduct]:
        model = self.model_runner.get_model()
        return {live.parameter: live.product for live in live_fp8(model, shape)}

    def rlk_cache(self) -> CacheRecord | None:
        return live_cache(self.model_runner.get_model())

    def rlk_tap(self, plan: TapPlan) -> None:
        ranks = tensor_parallel()
        self._rlk_writer = plan.open() if ranks.rank == 0 else None
        self._rlk_taps = plan.taps(
            self.model_runner,
            ranks,
            plan.shape,
            self._rlk_writer,
            Editor.of(plan.intervention, plan.batch),
            plan.samples,
            plan.sampled,
            plan.kind,
        )
        self._rlk_taps.install()
        if plan.forced:
            self._rlk_taps.force(plan.batch)

    def rlk_untap(self) -> None:
        self._rlk_taps.close()
        if self._rlk_writer is not None:
            self._rlk_writer.close()

    def rlk_reasons(self) -> dict[str, str]:
        """Why the latest observed pass did not record modules; empty before the first."""
        taps = getattr(self, "_rlk_taps", None)
        return dict(taps.reasons) if taps is not None else {}

    def rlk_count_graphs(self) -> None:
        self._rlk_graphs = GraphCounter(self.model_runner)

    def rlk_counted_graphs(self) -> GraphReplays:
        self._rlk_graphs.close()
        return self._rlk_graphs.counted()


def vllm_attributes(model: Any, shape: ModelShape) -> dict[str, Any]:
    """The settings of a live vLLM model that affect its numbers, named as in `hf_attributes`."""
    layers, config = list(model.model.layers), model.config
    by_layer = attentions(model)
    attention, numbers = list(by_layer.values()), list(by_layer)
    cores = [core_of(each) for each in attention]

    def of_attention(name: str, values: list[Any]) -> dict[str, Any]:
        return per_layer(name, values, numbers)

    dtype, gated = next(p.dtype for p in model.parameters()), shape.has("gate_proj")
    mlps = {i: _mlp(layer) for i, layer in enumerate(layers) if shape.has_mlp(i)}
    return {
        "layers": len(layers),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **of_attention("heads", [_heads(a, "num_heads") for a in attention]),
        **of_attention("kv_heads", [_heads(a, "num_kv_heads") for a in attention]),
        **of_attention("head_dim", [_rotated_width(a) for a in attention]),
        **of_attention("attention_scale", [float(f"{x.impl.scale:.6g}") for x in cores]),
        **of_attention("sliding_window", [sliding_window(x) for x in cores]),
        **_ropes(model, by_layer),
        **norm_attributes(norm_epsilons(model, vllm_places(model, shape, 1))),
        **per_layer(
            "activation",
            [_activation(block, dtype, gated) for block in mlps.values()],
            list(mlps),
        ),
        **_routing([block.experts for _, _, block in sparse_blocks(model)]),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "padding_side": None,
        **delta_attributes(model),
        **mamba_attributes(model),
    }


def _heads(attention: Any, name: str) -> int:
    """The number of heads of all ranks, which the code of transformers has in vLLM's product in
    it."""
    if hasattr(attention, "kv_lora_rank"):
        # Every head has a key of its own, expanded from the latent.
        return int(attention.num_heads)
    name = f"total_{name}"
    return int(getattr(attention, name, None) or getattr(attention.qkv_proj, name))


def _rotated_width(attention: Any) -> int:
    """The features of a head, or those of them that a latent attention rotates."""
    return int(getattr(attention, "qk_rope_head_dim", None) or attention.head_dim)


_RENAMED = {"deepseek_yarn": "yarn"}
"""The name that vLLM writes into the config of a model with latent attention -> the config's."""


def _ropes(model: Any, attention: dict[int, Any]) -> dict[str, Any]:
    """The attributes of each layer's rotary embedding; `attention`: those of the layers that have
    one."""
    if of_transformers(model):
        return rope_attributes(rotary_embeddings(model))
    rotaries: list[Any] = [getattr(a, "rotary_emb", None) for a in attention.values()]
    if None in rotaries:
        return {}
    numbers, parameters = list(attention), model.config.rope_parameters
    kinds = [] if "rope_type" in parameters else model.config.layer_types
    ropes = [parameters[kind] for kind in kinds] or [parameters]
    return {
        **per_layer(
            "rope_type", [_RENAMED.get(rope["rope_type"], rope["rope_type"]) for rope in ropes]
        ),
        **per_layer("rope_theta", [float(f"{r.base:.5g}") for r in rotaries], numbers),
        **per_layer("rope_dim", [r.rotary_dim for r in rotaries], numbers),
    }


def _mlp(layer: Any) -> Any:
    """A layer's MLP or its block of experts, which may be the only part that it has."""
    names = ("mlp", "block_sparse_moe", "shared_mlp", "feed_forward", "mixer")
    return next(block for name in names if (block := getattr(layer, name, None)) is not None)


def _activation(block: Any, dtype: torch.dtype, gated: bool) -> str:
    """The name of an MLP's activation; for experts vLLM has only the name itself."""
    if hasattr(block, "experts"):
        return str(block.experts.activation.value)
    # vLLM leaves an MLP of transformers as it is if that names its activation otherwise.
    fused = gated and hasattr(block, "act_fn")
    return (gated_activation_name if fused else plain_activation_name)(block, dtype)


def _routing(layers: list[Any]) -> dict[str, Any]:
    """How the sparse layers route; empty for a dense model."""
    routers = [layer.router for layer in layers]
    corrected = [
        layer
        for layer in layers
        if getattr(layer.router, "e_score_correction_bias", None) is not None
        and layer.router.num_expert_group is not None
    ]
    return {
        **corrected_routing(
            groups=[layer.router.num_expert_group for layer in corrected],
            top_groups=[layer.router.topk_group for layer in corrected],
            # vLLM scales either the weights or the sum of the rows.
            scale=[
                layer.router.routed_scaling_factor * layer.routed_scaling_factor
                for layer in corrected
            ],
        ),
        **per_layer("experts_per_token", [r.top_k for r in routers]),
        **per_layer("norm_topk_prob", [bool(r.renormalize) for r in routers]),
    }
