"""Qwen3 in plain PyTorch. T = new tokens, S = tokens so far, H = heads, D = head size"""

import torch
from torch import nn
from torch.nn import functional as F


def norm(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x, positions, inv_freq):  # [T, H, D], [T], [D / 2]
    angles = positions[:, None, None] * inv_freq
    a, b, cos, sin = *x.float().chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attention(q, k, v):  # [T, H, D], [S, H, D], [S, H, D]
    visible = q.new_ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1)


FUNCTIONS = {"embedding": F.embedding, "rms_norm": norm, "linear": F.linear, "rotary": rope}
FUNCTIONS |= {"attention": attention, "residual": torch.add}
FUNCTIONS["activation"] = lambda gate, up: F.silu(gate) * up


class Operator(nn.Module):
    def __init__(self, function, *operands):
        super().__init__()
        self.function, self.operands, self.weight = function, operands, None

    def forward(self, *inputs):
        weight = () if self.weight is None else (self.weight,)
        return self.function(*inputs, *weight, *self.operands)


class Decoder(nn.Module):
    def __init__(self, shape, eps, inv_freq):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(shape.layers))
        operands = {"rms_norm": (eps,), "rotary": (inv_freq,)}
        for layer, op in shape.operators():
            if op.formula in FUNCTIONS:
                module = Operator(FUNCTIONS[op.formula], *operands.get(op.formula, ()))
                (self if layer is None else self.layers[layer]).add_module(op.name, module)

    def forward(self, ids, positions, caches, size):
        x = self.embed(ids)
        for at, cache in zip(self.layers, caches, strict=True):
            y = at.attn_norm(x)
            q, k, v = (p(y).unflatten(1, (-1, size)) for p in (at.q_proj, at.k_proj, at.v_proj))
            q, k = at.q_rope(at.q_norm(q), positions), at.k_rope(at.k_norm(k), positions)
            cache[:] = map(torch.cat, zip(cache, (k, v), strict=True)) if cache else (k, v)
            x = at.attn_residual(x, at.o_proj(at.attn(q, *cache).flatten(1)))
            y = at.mlp_norm(x)
            x = at.mlp_residual(x, at.down_proj(at.act(at.gate_proj(y), at.up_proj(y))))
        return self.logits(self.final_norm(x))
