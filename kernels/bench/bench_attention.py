"""attention against torch's SDPA (cuDNN, FlashAttention-2), forward, backward and decode."""

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from shapes import DECODE, HEADS, PREFILL
from timing import event_ms, graph_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

RIVALS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def rand(*shape, grad=False):
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_() if grad else x


def prefill() -> list[dict]:
    """Causal prefill: TFLOP/s forward, and forward with backward, of each implementation."""
    records = []
    for model, (hq, hk, d) in HEADS.items():
        for batch, n in PREFILL:
            flops = 2 * batch * hq * n * n * d  # two products, half of them masked
            q, k, v = (rand(batch * n, h, d, grad=True) for h in (hq, hk, hk))
            cu = torch.arange(0, (batch + 1) * n, n, device="cuda", dtype=torch.int32)
            do = rand(batch * n, hq, d)

            def both(q=q, k=k, v=v, cu=cu, do=do):
                torch.autograd.grad(rk.attention(q, k, v, cu, cu), (q, k, v), do)

            with torch.no_grad():
                forward = graph_ms([lambda q=q, k=k, v=v, cu=cu: rk.attention(q, k, v, cu, cu)])
            tf = {"rlk": flops / forward / 1e9}
            tf_both = {"rlk": 3.5 * flops / event_ms(both, repeat=5) / 1e9}
            dense = [rand(batch, h, n, d, grad=True) for h in (hq, hk, hk)]
            grad = rand(batch, hq, n, d)
            for name, backend in RIVALS.items():

                def run(dense=dense):
                    return F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

                def run_both(dense=dense, grad=grad):
                    torch.autograd.grad(run(), dense, grad)

                with sdpa_kernel(backend):
                    with torch.no_grad():
                        tf[name] = flops / graph_ms([run]) / 1e9
                    tf_both[name] = 3.5 * flops / event_ms(run_both, repeat=5) / 1e9
            best = max(value for name, value in tf.items() if name != "rlk")
            records.append(
                {"model": model, "batch": batch, "tokens": n, "tflops": tf,
                 "tflops_forward_backward": tf_both, "ratio": tf["rlk"] / best}
            )  # fmt: skip
    return records


def decode(ceilings: dict) -> list[dict]:
    """One query a sequence over a paged cache with blocks of 16: share of the copy bandwidth."""
    records = []
    for model, (hq, hk, d) in HEADS.items():
        for batch, n in DECODE:
            blocks = batch * n // 16
            k_cache, v_cache = rand(blocks, 16, hk, d), rand(blocks, 16, hk, d)
            table = torch.randperm(blocks, device="cuda").int().view(batch, -1)
            lens = torch.full((batch,), n, device="cuda", dtype=torch.int32)
            q, cu = rand(batch, hq, d), torch.arange(batch + 1, device="cuda", dtype=torch.int32)
            nbytes = 4 * batch * n * hk * d

            def run(q=q, k=k_cache, v=v_cache, table=table, lens=lens, cu=cu):
                return rk.paged_attention(q, k, v, table, lens, cu_seqlens_q=cu)

            us = {"rlk": graph_ms([run]) * 1e3}
            dense = rand(batch, hq, 1, d), rand(batch, hk, n, d), rand(batch, hk, n, d)
            for name, backend in RIVALS.items():

                def sdpa(dense=dense):
                    return F.scaled_dot_product_attention(*dense, enable_gqa=True)

                with sdpa_kernel(backend):
                    us[name] = graph_ms([sdpa]) * 1e3
            share = nbytes / us["rlk"] / 1e3 / ceilings["copy_gbs"]
            records.append(
                {"model": model, "batch": batch, "context": n, "us": us, "bandwidth_share": share}
            )
    return records
