"""Faults as a user would make them, for `patch=first_runs_faults:NAME` of an HF model.

They are not those of the self-test: each is a few lines that somebody might have written.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

LAYER = 1
"""Where a fault of one layer lies."""


def _layer(model: Any) -> Any:
    return model.model.layers[LAYER]


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def _random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape, device=x.device)


def _attention(model: Any, change: Callable[..., tuple]) -> None:
    """Every layer's attention, on what `change(module, query, key, value)` makes of its inputs,
    `[B, heads, S, width]`, behind the recorded rotations."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def changed(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return original(module, *change(module, query, key, value), *args, **kwargs)

    AttentionInterface.register("changed", changed)
    AttentionMaskInterface.register("changed", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = "changed"


def rope_angles_fp16(model: Any) -> None:
    rotary = model.model.rotary_emb

    def forward(x: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> tuple:
        angles = position_ids[..., None].half() * rotary.inv_freq.half()
        whole = torch.cat([angles, angles], dim=-1).float()
        return whole.cos().to(x.dtype), whole.sin().to(x.dtype)

    rotary.forward = forward


def head_zeroed_from_a_position_on(model: Any) -> None:
    attention = _layer(model).self_attn
    seen = {"position": 0}

    def count(_module: Any, _args: Any, kwargs: Any) -> None:
        positions = kwargs.get("cache_position", kwargs.get("position_ids"))
        hidden = kwargs["hidden_states"]
        first = 0 if positions is None else int(positions.reshape(-1)[0])
        seen["position"] = first if hidden.shape[1] == 1 or positions is not None else 0

    def zero(_module: Any, args: Any) -> Any:
        x = args[0].clone()
        at = seen["position"] + torch.arange(x.shape[1])
        x[:, at >= 20, : attention.head_dim] = 0
        return (x,)

    attention.register_forward_pre_hook(count, with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(zero)


def _swapped(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
    order = torch.arange(out.shape[-1])
    order[[3, 4]] = order[[4, 3]]
    return out[..., order]


def channel_swapped_in_gate_and_up(model: Any) -> None:
    for name in ("gate_proj", "up_proj"):
        getattr(_layer(model).mlp, name).register_forward_hook(_swapped)


def residual_fp8_between_layers(model: Any) -> None:
    _layer(model).register_forward_hook(lambda _m, _a, out: _fp8(out))


def residual_fp8_inside(model: Any) -> None:
    layer = _layer(model)

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        hidden = _fp8(hidden_states + attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    layer.forward = forward


def attention_temperature_of_long_rows(model: Any) -> None:
    def change(_module: Any, query: Any, key: Any, value: Any) -> tuple:
        at = torch.arange(key.shape[2] - query.shape[2], key.shape[2])
        factor = torch.where(at >= 24, 1.05, 1.0)[None, None, :, None]
        return (query.float() * factor).to(query.dtype), key, value

    _attention(model, change)


def value_of_one_key_zeroed(model: Any) -> None:
    def change(_module: Any, query: Any, key: Any, value: Any) -> tuple:
        value = value.clone()
        value[:, :, 3] = 0
        return query, key, value

    _attention(model, change)


def norm_changed_after_hashing(model: Any) -> None:
    norm, done = _layer(model).input_layernorm, []

    def change(*_: Any) -> None:
        if not done:
            done.append(True)
            norm.weight.data *= 1.02

    model.model.register_forward_pre_hook(change)


def stale_norm(model: Any) -> None:
    _layer(model).post_attention_layernorm.weight.data *= 0.98


def stale_tied_embedding(model: Any) -> None:
    head = model.lm_head.weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(head * 1.01, requires_grad=False)


def cache_damaged_in_decode(model: Any) -> None:
    def change(_module: Any, query: Any, key: Any, value: Any) -> tuple:
        if query.shape[2] == 1 and key.shape[2] > 6:
            value = value.clone()
            value[:, :, 4] *= 0.5
        return query, key, value

    _attention(model, change)


def dropout_of_a_thousandth(model: Any) -> None:
    def drop(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(out, 0.001, training=True)

    _layer(model).mlp.register_forward_hook(drop)


def noise_of_a_thousandth(model: Any) -> None:
    def add(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 1e-3 * torch.randn_like(out)

    _layer(model).mlp.up_proj.register_forward_hook(add)


def rare_random_rows(model: Any) -> None:
    def replace(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        rare = _random(out[..., :1]) < 0.05
        return torch.where(rare, torch.randn_like(out), out)

    _layer(model).mlp.up_proj.register_forward_hook(replace)


def temperature_99(model: Any) -> None:
    forward = model.forward

    def cooler(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits.float() / 0.99
        return out

    model.forward = cooler


def log_softmax_bf16(_model: Any) -> None:
    """In the engine's own log-prob, as a cast too many would have it."""
    engine = sys.modules["rlk_align.engines.hf.engine"]

    def token_logprobs(logits: Any, target: Any, temperature: float = 1.0) -> Any:
        logprob = torch.log_softmax((logits.float() / temperature).bfloat16(), dim=-1)
        return logprob.float().gather(-1, target[:, None]).squeeze(-1).cpu().numpy()

    engine.token_logprobs = token_logprobs  # type: ignore[attr-defined]


def embedding_row(model: Any) -> None:
    def change(_module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == 32)[..., None], out * 1.1, out)

    model.model.embed_tokens.register_forward_hook(change)


def norm_in_bf16(model: Any) -> None:
    norm = _layer(model).post_attention_layernorm

    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return x * scale * norm.weight

    norm.forward = forward


def gelu_for_silu(model: Any) -> None:
    _layer(model).mlp.act_fn = torch.nn.GELU()


def output_scaled(model: Any) -> None:
    _layer(model).self_attn.o_proj.register_forward_hook(lambda _m, _a, out: out * 1.01)


def down_projection_in_fp8(model: Any) -> None:
    _layer(model).mlp.down_proj.register_forward_pre_hook(lambda _m, args: (_fp8(args[0]),))


def key_norm_left_out(model: Any) -> None:
    _layer(model).self_attn.k_norm.forward = lambda x: x


def final_norm_with_another_epsilon(model: Any) -> None:
    norm = model.model.norm

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1.0)
        return norm.weight * scaled.to(x.dtype)

    norm.forward = forward


def logits_capped(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _m, _a, out: 20 * torch.tanh(out / 20))


def query_bias(model: Any) -> None:
    _layer(model).self_attn.q_proj.register_forward_hook(lambda _m, _a, out: out + 0.02)
