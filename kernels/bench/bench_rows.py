"""Times the memory-bound operators beside torch, eager and compiled, and beside Liger where it is
installed."""

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from timing import copies, graphs_ms, rand

ROWS = (1, 64, 1024, 8192)
H, FF, VOCABULARY = 4096, 12288, 128256


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


def liger() -> dict:
    """name -> Liger's forward of that operator; empty where Liger is not installed."""
    try:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
    except ImportError:
        return {}
    return {
        "norm": LigerRMSNormFunction.apply,
        "norm_residual": LigerFusedAddRMSNormFunction.apply,
        "rope": LigerRopeFunction.apply,
        "swiglu": LigerFusedGateUpSiLUMulFunction.apply,
        "embedding": LigerEmbeddingFunction.apply,
    }


def cases(m: int) -> dict:
    """name -> (bytes that must move, a maker of inputs, our call, torch's, (Liger's operator and a
    call of it) or None)."""
    weight, head, table = rand(H), rand(128), rand(VOCABULARY, H)
    positions = torch.arange(m, device="cuda")
    rows = min(m, 2048)
    target = torch.randint(0, VOCABULARY, (rows,), device="cuda")

    angle = positions[:, None].float() / 1e6 ** (torch.arange(128, device="cuda") % 64 / 64)
    cos, sin = angle.cos().bfloat16()[None], angle.sin().bfloat16()[None]

    def liger_rope(f, q, k):  # in place, from tables that are there already
        return f(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)

    def ids():
        return torch.randint(0, VOCABULARY, (m,), device="cuda")

    return {
        "rms_norm": (
            4 * m * H, lambda: (rand(m, H),),
            lambda x: rk.rms_norm(x, weight, 1e-6), lambda x: torch_norm(x, weight),
            ("norm", lambda f, x: f(x, weight, 1e-6)),
        ),
        "rms_norm + residual": (
            8 * m * H, lambda: (rand(m, H), rand(m, H)),
            lambda x, r: rk.rms_norm(x, weight, 1e-6, residual=r),
            lambda x, r: torch_norm_residual(x, r, weight),
            ("norm_residual", lambda f, x, r: f(x, r, weight, 1e-6)),
        ),
        "q/k norm (32 heads of 128)": (
            4 * m * 32 * 128, lambda: (rand(m, 32, 128),),
            lambda x: rk.rms_norm(x, head, 1e-6), lambda x: torch_norm(x, head),
            ("norm", lambda f, x: f(x, head, 1e-6)),
        ),
        "rope (32 + 8 heads of 128)": (
            4 * m * 40 * 128, lambda: (rand(m, 32, 128), rand(m, 8, 128)),
            lambda q, k: rk.rope(q, k, positions, theta=1e6),
            lambda q, k: torch_rope(q, k, positions),
            ("rope", liger_rope),
        ),
        "swiglu": (
            6 * m * FF, lambda: (rand(m, 2 * FF),),
            lambda y: rk.swiglu(*y.chunk(2, -1)),
            lambda y: F.silu(y[:, :FF]) * y[:, FF:],
            ("swiglu", lambda f, y: f(y)),
        ),
        "embedding": (
            4 * m * H, lambda: (ids(),),
            lambda i: rk.embedding(i, table), lambda i: F.embedding(i, table),
            ("embedding", lambda f, i: f(table, i)),
        ),
        f"logp ({rows} rows)": (
            2 * rows * VOCABULARY, lambda: (rand(rows, VOCABULARY),),
            lambda x: rk.logp(x, target), lambda x: torch_logp(x, target), None,
        ),
    }  # fmt: skip


def measure(ceilings: dict) -> list[dict]:
    records = []
    ligers = liger()
    for m in ROWS:
        for name, (nbytes, make, ours, theirs, of_liger) in cases(m).items():
            inputs = [make() for _ in range(copies(nbytes, most=8))]
            rivals = {"rlk": ours, "eager": theirs}
            if m == ROWS[-1]:
                torch.compiler.reset()
                rivals["compiled"] = torch.compile(theirs, dynamic=False)
            if of_liger and of_liger[0] in ligers:
                call, function = of_liger[1], ligers[of_liger[0]]
                rivals["liger"] = lambda *i, call=call, function=function: call(function, *i)
            calls = {n: [lambda i=i, f=f: f(*i) for i in inputs] for n, f in rivals.items()}
            us = {n: ms * 1e3 for n, ms in graphs_ms(calls).items()}
            share = nbytes / us["rlk"] / 1e3 / ceilings["copy_gbs"]
            records.append({"op": name, "m": m, "us": us, "bandwidth_share": share})
    return records
