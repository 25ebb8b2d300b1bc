"""Times attention's forward and backward beside torch's SDPA, and measures errors against float64.

The rivals are SDPA's cuDNN and FlashAttention-2, the latter also in torch's deterministic mode.
Rivals get sequences of one length as one [batch, heads, tokens, D], and ragged ones one by one.
`bench_attention.py` times FlashAttention-3, which has no backward in vLLM.
"""

import itertools

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from bench_attention import RIVALS
from timing import event_ms, rand
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = (
    *(((32, 8, 128), [n] * (16384 // n)) for n in (2048, 4096, 8192, 16384)),
    ((16, 16, 128), [4096] * 4),
    ((32, 4, 128), [4096] * 4),
    *(((32, 8, 64), [n] * (16384 // n)) for n in (2048, 4096, 16384)),
    ((16, 16, 64), [4096] * 4),
    ((32, 4, 64), [4096] * 4),
    ((32, 8, 128), [6000, 4100, 3000, 2000, 1000, 284]),
    ((32, 8, 64), [6000, 4100, 3000, 2000, 1000, 284]),
)
"""((query heads, KV heads, head size), tokens of each sequence)."""

TOKENS = 777
"""The length of the sequence whose gradients are compared with float64."""


def _milliseconds(forward, leaves, gradients) -> tuple[float, float]:
    """(milliseconds of the forward, of the backward)."""
    out = forward()

    def backward():
        torch.autograd.grad(out, leaves, gradients, retain_graph=True)

    backward_ms = event_ms(backward, repeat=4, inner=2)
    with torch.no_grad():
        return event_ms(forward, repeat=4, inner=2), backward_ms


def _rlk_times(heads, lengths) -> tuple[float, float]:
    hq, hk, d = heads
    q, k, v = (rand(sum(lengths), h, d, grad=True) for h in (hq, hk, hk))
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return _milliseconds(lambda: rk.attention(q, k, v, cu, cu), (q, k, v), rand(*q.shape))


def _sdpa(heads, lengths, backend, deterministic: bool = False) -> tuple[float, float]:
    hq, hk, d = heads
    batches = [(len(lengths), lengths[0])]
    if len(set(lengths)) > 1:
        batches = [(1, n) for n in lengths]
    inputs = [[rand(b, h, n, d, grad=True) for h in (hq, hk, hk)] for b, n in batches]
    gradients = [rand(b, hq, n, d) for b, n in batches]

    def forward():
        return [F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in inputs]

    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        with sdpa_kernel(backend):
            return _milliseconds(forward, list(itertools.chain(*inputs)), gradients)
    finally:
        torch.use_deterministic_algorithms(False)


def times(ceilings: dict) -> list[dict]:
    """TFLOP/s of forward, backward (2.5 x its operations) and both, of each implementation."""
    records = []
    for heads, lengths in SHAPES:
        flops = 2 * heads[0] * heads[2] * sum(n * n for n in lengths)  # half of them masked
        ms = {"rlk": _rlk_times(heads, lengths)}
        for name, backend in RIVALS.items():
            ms[name] = _sdpa(heads, lengths, backend)
        ms["flash2 deterministic"] = _sdpa(heads, lengths, SDPBackend.FLASH_ATTENTION, True)
        tflops = {
            name: {
                "forward": flops / ahead / 1e9,
                "backward": 2.5 * flops / back / 1e9,
                "both": 3.5 * flops / (ahead + back) / 1e9,
            }
            for name, (ahead, back) in ms.items()
        }
        records.append({"heads": heads, "lengths": lengths, "ms": ms, "tflops": tflops})
        torch.cuda.empty_cache()
    return records


def _error(value, exact) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def errors(ceilings: dict) -> list[dict]:
    """|| gradient - float64 || / || float64 || of dq, dk and dv."""
    records = []
    cu = torch.tensor([0, TOKENS], device="cuda").int()
    for hq, hk, d in ((32, 8, 128), (16, 16, 64)):
        leaves = [rand(TOKENS, h, d, grad=True) for h in (hq, hk, hk)]
        gradient = rand(TOKENS, hq, d)

        def dense(*x):
            rows = [y.transpose(0, 1)[None] for y in x]
            out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        wide = [x.detach().double().requires_grad_() for x in leaves]
        with sdpa_kernel(SDPBackend.MATH):
            exact = torch.autograd.grad(dense(*wide), wide, gradient.double())
        grads = {"rlk": torch.autograd.grad(rk.attention(*leaves, cu, cu), leaves, gradient)}
        for name, backend in RIVALS.items():
            with sdpa_kernel(backend):
                grads[name] = torch.autograd.grad(dense(*leaves), leaves, gradient)
        off = {name: [_error(*pair) for pair in zip(x, exact, strict=True)]
               for name, x in grads.items()}  # fmt: skip
        records.append({"heads": (hq, hk, d), "errors": off})
    return records
