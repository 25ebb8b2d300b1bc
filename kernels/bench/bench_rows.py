"""The memory-bound operators against torch, eager and compiled; Liger where it is installed."""

import importlib.util

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from timing import copies, graph_ms

ROWS = (1, 64, 1024, 8192)
H, FF, VOCABULARY = 4096, 12288, 128256


def rand(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def torch_norm(x, weight):
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def torch_norm_residual(x, res, weight):
    x = x + res
    return torch_norm(x, weight), x


def torch_rope(q, k, positions):
    frequency = 1.0 / 1e6 ** (torch.arange(0, 128, 2, device="cuda").float() / 128)
    angle = positions[:, None].float() * frequency
    cos, sin = angle.cos().to(q.dtype)[:, None], angle.sin().to(q.dtype)[:, None]
    out = []
    for x in (q, k):
        a, b = x.chunk(2, -1)
        out.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    return out


def torch_logp(logits, target):
    return torch.log_softmax(logits.float(), -1).gather(-1, target[:, None]).squeeze(-1)


def cases(m: int) -> dict:
    """name -> (bytes that must move, inputs maker, ours, torch's)."""
    weight, head, table = rand(H), rand(128), rand(VOCABULARY, H)
    positions = torch.arange(m, device="cuda")
    rows = min(m, 2048)
    target = torch.randint(0, VOCABULARY, (rows,), device="cuda")

    def ids():
        return torch.randint(0, VOCABULARY, (m,), device="cuda")

    return {
        "rms_norm": (
            4 * m * H, lambda: (rand(m, H),),
            lambda x: rk.rms_norm(x, weight, 1e-6), lambda x: torch_norm(x, weight),
        ),
        "rms_norm + residual": (
            8 * m * H, lambda: (rand(m, H), rand(m, H)),
            lambda x, r: rk.rms_norm(x, weight, 1e-6, residual=r),
            lambda x, r: torch_norm_residual(x, r, weight),
        ),
        "q/k norm (32 heads of 128)": (
            4 * m * 32 * 128, lambda: (rand(m, 32, 128),),
            lambda x: rk.rms_norm(x, head, 1e-6), lambda x: torch_norm(x, head),
        ),
        "rope (32 + 8 heads of 128)": (
            4 * m * 40 * 128, lambda: (rand(m, 32, 128), rand(m, 8, 128)),
            lambda q, k: rk.rope(q, k, positions, theta=1e6),
            lambda q, k: torch_rope(q, k, positions),
        ),
        "swiglu": (
            6 * m * FF, lambda: rand(m, 2 * FF).chunk(2, -1),
            rk.swiglu, lambda g, u: F.silu(g) * u,
        ),
        "embedding": (
            4 * m * H, lambda: (ids(),),
            lambda i: rk.embedding(i, table), lambda i: F.embedding(i, table),
        ),
        f"logp ({rows} rows)": (
            2 * rows * VOCABULARY, lambda: (rand(rows, VOCABULARY),),
            lambda x: rk.logp(x, target), lambda x: torch_logp(x, target),
        ),
    }  # fmt: skip


def measure(ceilings: dict) -> list[dict]:
    records = []
    liger = importlib.util.find_spec("liger_kernel") is not None
    for m in ROWS:
        for name, (nbytes, make, ours, theirs) in cases(m).items():
            inputs = [make() for _ in range(copies(nbytes, most=8))]
            us = {"rlk": graph_ms([lambda i=i, f=ours: f(*i) for i in inputs]) * 1e3}
            us["eager"] = graph_ms([lambda i=i, f=theirs: f(*i) for i in inputs]) * 1e3
            if m == ROWS[-1]:
                torch.compiler.reset()
                compiled = torch.compile(theirs, dynamic=False)
                us["compiled"] = graph_ms([lambda i=i, f=compiled: f(*i) for i in inputs]) * 1e3
            if liger and name == "rms_norm":
                from liger_kernel.transformers.functional import liger_rms_norm

                gain = rand(H)
                us["liger"] = graph_ms(
                    [lambda i=i, w=gain: liger_rms_norm(*i, w, 1e-6) for i in inputs]
                ) * 1e3  # fmt: skip
            if liger and name == "swiglu":
                from liger_kernel.transformers.functional import liger_swiglu

                us["liger"] = graph_ms([lambda i=i: liger_swiglu(*i) for i in inputs]) * 1e3
            share = nbytes / us["rlk"] / 1e3 / ceilings["copy_gbs"]
            records.append({"op": name, "m": m, "us": us, "bandwidth_share": share})
    return records
