"""What runs inside vLLM's worker: the live model's identity, and the taps.

vLLM mixes WorkerExtension into its Worker class (`worker_extension_cls`), so its methods see
`self.model_runner`. Names start with `rlk_` because vLLM refuses ones that its Worker has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rlk_align.config import EngineSpec
from rlk_align.engines.base import Tap, activation_name, norm_eps, per_layer
from rlk_align.engines.patching import apply_patch
from rlk_align.engines.vllm_taps import VLLMTaps
from rlk_align.families import ModelShape

PATCH_SPEC: EngineSpec | None = None
"""The spec whose patch is to be applied; set before the engine starts in this process."""


@dataclass(frozen=True, slots=True)
class TapPlan:
    """One pass to observe."""

    tap: Tap
    shape: ModelShape
    samples: dict[str, int]
    """Request id, as outputs name it -> sample."""
    sampled: list[range]
    """Per sample, the positions whose logits are wanted."""
    kind: str
    """`decode` or `prefill`: whether logits come from sampling or from prompt log-probs."""


class WorkerExtension:
    """Methods that vLLM's `collective_rpc` can call by name."""

    model_runner: Any

    def rlk_patch(self) -> None:
        assert PATCH_SPEC is not None
        apply_patch(PATCH_SPEC, self.model_runner.get_model())

    def rlk_attributes(self) -> dict[str, Any]:
        return vllm_attributes(self.model_runner.get_model())

    def rlk_weights(self) -> list[tuple[str, torch.Tensor]]:
        with torch.inference_mode():
            return list(vllm_weights(self.model_runner.get_model()))

    def rlk_tap(self, plan: TapPlan) -> None:
        self._rlk_taps = VLLMTaps(
            self.model_runner, plan.shape, plan.tap, plan.samples, plan.sampled, plan.kind
        )
        self._rlk_taps.install()

    def rlk_untap(self) -> None:
        self._rlk_taps.remove()


def vllm_attributes(model: Any) -> dict[str, Any]:
    """What decides a live vLLM model's numbers beside its weights; names as `hf_attributes`."""
    layers, config = list(model.model.layers), model.config
    attention = [layer.self_attn for layer in layers]
    rotary = attention[0].rotary_emb
    dtype = next(p.dtype for p in model.parameters())
    return {
        "layers": len(layers),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **per_layer("heads", [a.total_num_heads for a in attention]),
        **per_layer("kv_heads", [a.total_num_kv_heads for a in attention]),
        **per_layer("head_dim", [a.head_dim for a in attention]),
        **per_layer("attention_scale", [float(f"{a.attn.impl.scale:.6g}") for a in attention]),
        **per_layer("sliding_window", [_window(a.attn) for a in attention]),
        "rope_type": config.rope_parameters["rope_type"],
        "rope_theta": float(f"{rotary.base:.5g}"),
        "rope_dim": rotary.rotary_dim,
        **per_layer("norm_eps", [norm_eps(layer) for layer in layers]),
        "final_norm_eps": model.model.norm.variance_epsilon,
        **per_layer("activation", [_activation(layer.mlp, dtype) for layer in layers]),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "temperature": 1.0,
        "logprobs": "raw",
    }


def _window(attention: Any) -> int | None:
    window = attention.sliding_window
    return None if window in (None, -1) else int(window)


def _activation(mlp: Any, dtype: torch.dtype) -> str:
    """vLLM's activation multiplies by the second half: one there leaves act(x)."""
    device = mlp.down_proj.bias.device if mlp.down_proj.bias is not None else None

    def act(x: torch.Tensor) -> torch.Tensor:
        x = x.to(device or _device_of(mlp))
        # [1, F]: kernels want a token dimension.
        return mlp.act_fn(torch.cat([x, torch.ones_like(x)])[None])[0].cpu()

    return activation_name(act, dtype)


def _device_of(module: Any) -> torch.device:
    return next(module.parameters()).device


def vllm_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical parameters of a live vLLM model, unfused, in the checkpoint's layout."""
    vocab = model.config.vocab_size
    yield "embed", model.model.embed_tokens.weight[:vocab]
    for i, layer in enumerate(model.model.layers):
        name, attention, mlp = f"layers.{i}", layer.self_attn, layer.mlp
        q, kv = attention.q_size, attention.kv_size
        yield f"{name}.attn_norm", layer.input_layernorm.weight
        ops = ("q_proj", "k_proj", "v_proj")
        yield from _split(name, ops, [q, kv, kv], attention.qkv_proj)
        for op in ("q_norm", "k_norm"):
            if hasattr(attention, op):
                yield f"{name}.{op}", getattr(attention, op).weight
        yield from _split(name, ("o_proj",), None, attention.o_proj)
        yield f"{name}.mlp_norm", layer.post_attention_layernorm.weight
        yield from _split(name, ("gate_proj", "up_proj"), None, mlp.gate_up_proj)
        yield from _split(name, ("down_proj",), None, mlp.down_proj)
    yield "final_norm", model.model.norm.weight
    yield "lm_head", model.lm_head.weight[:vocab]


def _split(
    layer: str, ops: tuple[str, ...], sizes: list[int] | None, module: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    weight = live_weight(module)
    sizes = sizes or [weight.shape[0] // len(ops)] * len(ops)
    for op, part in zip(ops, weight.split(sizes), strict=True):
        yield f"{layer}.{op}", part
    if getattr(module, "bias", None) is not None:
        for op, part in zip(ops, module.bias.split(sizes), strict=True):
            yield f"{layer}.{op}.bias", part


def live_weight(module: Any) -> torch.Tensor:
    """The weight `[out, in]` that a linear layer computes with.

    On CPUs vLLM packs it into another layout and empties the parameter: the identity, pushed
    through the layer, gives it back bit for bit, but for the sign of zero.
    """
    if module.weight.numel():
        return module.weight
    dtype = module.params_dtype
    size = module.input_size_per_partition
    columns = [
        module.quant_method.apply(module, block, None)
        for block in torch.eye(size, dtype=dtype).split(1024)
    ]
    return torch.cat(columns).T
