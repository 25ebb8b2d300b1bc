"""A small Qwen3-like transformer on the kernels, its prefill and its decode over a paged cache."""

from dataclasses import dataclass

import rlk_kernels as rk
import torch


@dataclass(frozen=True)
class Sizes:
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    ff: int = 80
    vocabulary: int = 97
    layers: int = 2


class Model:
    """RMS norm, QK norm, RoPE, GQA, SwiGLU; positions and packing are the caller's."""

    def __init__(self, dtype, sizes: Sizes = Sizes(), device="cpu"):
        generator = torch.Generator().manual_seed(0)
        self.sizes, self.device = sizes, device
        h, d = sizes.hidden, sizes.dim

        def w(*shape):
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            x = torch.randn(*shape, generator=generator) * scale
            return x.to(dtype).to(device).requires_grad_()

        self.embed, self.head = w(sizes.vocabulary, h), w(sizes.vocabulary, h)
        self.final = w(h)
        self.layers = [
            {
                "norm": w(h), "norm2": w(h), "qn": w(d), "kn": w(d),
                "q": w(sizes.heads * d, h), "k": w(sizes.kv_heads * d, h),
                "v": w(sizes.kv_heads * d, h), "o": w(h, sizes.heads * d),
                "gate": w(sizes.ff, h), "up": w(sizes.ff, h), "down": w(h, sizes.ff),
            }
            for _ in range(sizes.layers)
        ]  # fmt: skip

    def __call__(self, ids, positions, attend):
        """Logits; `attend(layer, q, k, v)` is dense, paged or whatever the caller has."""
        x = rk.embedding(ids, self.embed)
        delta = torch.zeros_like(x)
        for i, p in enumerate(self.layers):
            h, x = rk.rms_norm(delta, p["norm"], 1e-6, residual=x)
            q, k, v = (rk.linear(h, p[n]).view(len(ids), -1, self.sizes.dim) for n in "qkv")
            q, k = rk.rms_norm(q, p["qn"], 1e-6), rk.rms_norm(k, p["kn"], 1e-6)
            q, k = rk.rope(q, k, positions, theta=1e4)
            delta = rk.linear(attend(i, q, k, v).reshape(len(ids), -1), p["o"])
            h, x = rk.rms_norm(delta, p["norm2"], 1e-6, residual=x)
            delta = rk.linear(rk.swiglu(rk.linear(h, p["gate"]), rk.linear(h, p["up"])), p["down"])
        h, _ = rk.rms_norm(delta, self.final, 1e-6, residual=x)
        return rk.linear(h, self.head, out_dtype=torch.float32)

    def prefill(self, ids, lens):
        """Logits of packed sequences."""
        cu = torch.tensor([0, *lens]).cumsum(0).to(self.device)
        positions = torch.cat([torch.arange(n) for n in lens]).to(self.device)
        return self(ids, positions, lambda i, q, k, v: rk.attention(q, k, v, cu, cu))

    def decode(self, ids, lens, chunk, page):
        """Logits of every sequence, `chunk` tokens at a time, all of them in one batch, over a
        shuffled paged cache whose unused slots hold NaN."""
        each = -(-max(lens) // page)
        blocks = each * len(lens)
        s = self.sizes
        shape = (s.layers, blocks, page, s.kv_heads, s.dim)
        caches = [
            torch.full(shape, float("nan"), dtype=self.embed.dtype, device=self.device)
            for _ in range(2)
        ]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
        table = order.int().view(len(lens), each).to(self.device)
        parts, done = ids.split(lens), [0] * len(lens)
        steps: list[list] = [[] for _ in lens]
        while live := [b for b in range(len(lens)) if done[b] < lens[b]]:
            take = [min(chunk, lens[b] - done[b]) for b in live]
            spans = [(b, done[b], done[b] + n) for b, n in zip(live, take, strict=True)]
            position = torch.cat([torch.arange(x, y) for _, x, y in spans]).to(self.device)
            owner = torch.tensor(live).repeat_interleave(torch.tensor(take)).to(self.device)
            slot = table[owner, position // page].long(), position % page
            context = torch.tensor([y for _, _, y in spans]).to(self.device)
            bounds = torch.tensor([0, *take]).cumsum(0).to(self.device)

            def attend(i, q, k, v, slot=slot, context=context, bounds=bounds, live=live):
                caches[0][i][slot], caches[1][i][slot] = k, v
                return rk.paged_attention(
                    q, caches[0][i], caches[1][i], table[live], context, cu_seqlens_q=bounds
                )

            tokens = torch.cat([parts[b][x:y] for b, x, y in spans])
            outs = self(tokens, position, attend).split(take)
            for (b, _, y), out in zip(spans, outs, strict=True):
                steps[b].append(out)
                done[b] = y
        return [torch.cat(step) for step in steps]
