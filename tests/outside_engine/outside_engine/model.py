"""Qwen3 in plain PyTorch. T = tokens of this forward, S = all so far, H = heads, D = head size."""

import torch
from torch import nn
from torch.nn import functional as F


class Rope(nn.Module):
    def __init__(self, theta, size):
        super().__init__()
        self.inv_freq = 1.0 / theta ** (torch.arange(0, size, 2) / size)

    def forward(self, q, k, positions):
        angles = positions[:, None, None] * self.inv_freq.to(q.device)
        return _rotated(q, angles), _rotated(k, angles)


def _rotated(x, angles):
    a, b, cos, sin = *x.float().chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def forward(self, q, k, v):  # [T, H, D] of q[T, H, D], k[S, Hk, D], v[S, Hk, D]
        visible = q.new_ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1)


class GatedSilu(nn.Module):
    def forward(self, gate, up):
        return F.silu(gate) * up


class Layer(nn.Module):
    def __init__(self, s, eps, theta):
        super().__init__()
        heads, kv_heads = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(s.hidden, eps) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(s.head_dim, eps) for _ in range(2))
        self.q_proj = nn.Linear(s.hidden, heads, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(s.hidden, kv_heads, bias=False) for _ in range(2))
        self.rope, self.attn, self.act = Rope(theta, s.head_dim), Attention(), GatedSilu()
        self.o_proj = nn.Linear(heads, s.hidden, bias=False)
        self.gate_proj, self.up_proj = (
            nn.Linear(s.hidden, s.intermediate, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x, positions, cache):
        y, head = self.attn_norm(x), self.q_norm.normalized_shape
        q, k, v = (p(y).unflatten(-1, (-1, *head)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rope(self.q_norm(q), self.k_norm(k), positions)
        cache[:] = map(torch.cat, zip(cache, (k, v), strict=True)) if cache else (k, v)
        x = x + self.o_proj(self.attn(q, *cache).flatten(1))
        y = self.mlp_norm(x)
        return x + self.down_proj(self.act(self.gate_proj(y), self.up_proj(y)))
