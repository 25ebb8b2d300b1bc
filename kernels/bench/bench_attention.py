"""Times the forward of `attention` and paged decode beside torch's SDPA (cuDNN, FlashAttention-2),
and beside FlashAttention-3 where vLLM is installed. `bench_attention_training.py` times the
backward."""

import functools

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from shapes import DECODE, HEADS, PREFILL
from timing import graphs_ms, rand
from torch.nn.attention import SDPBackend, sdpa_kernel

RIVALS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def flash3():
    """FlashAttention-3 for packed sequences, from vLLM; None where it is not installed."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE
    except ImportError:
        return None
    return functools.partial(flash_attn_varlen_func, fa_version=3) if FA3_AVAILABLE else None


def within(backend, call):
    """`call`, with SDPA restricted to `backend`."""

    def run():
        with sdpa_kernel(backend):
            return call()

    return run


def prefill(ceilings: dict) -> list[dict]:
    """TFLOP/s of each implementation's causal prefill, forward."""
    records = []
    three = flash3()
    for model, (hq, hk, d) in HEADS.items():
        for batch, n in PREFILL:
            flops = 2 * batch * hq * n * n * d  # two products, half of them masked
            q, k, v = (rand(batch * n, h, d) for h in (hq, hk, hk))
            cu = torch.arange(0, (batch + 1) * n, n, device="cuda", dtype=torch.int32)
            dense = [rand(batch, h, n, d) for h in (hq, hk, hk)]

            def sdpa(dense=dense):
                return F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

            forward = {"rlk": lambda q=q, k=k, v=v, cu=cu: rk.attention(q, k, v, cu, cu)}
            for name, backend in RIVALS.items():
                forward[name] = within(backend, sdpa)
            if three is not None:
                forward["flash3"] = lambda q=q, k=k, v=v, cu=cu, n=n: three(
                    q, k, v, n, cu, n, cu, causal=True
                )
            ms = graphs_ms({name: [call] for name, call in forward.items()}, repeat=7)
            tf = {name: flops / of / 1e9 for name, of in ms.items()}
            best = max(value for name, value in tf.items() if name != "rlk")
            ratio = tf["rlk"] / best
            records.append(
                {"model": model, "batch": batch, "tokens": n, "tflops": tf, "ratio": ratio}
            )
    return records


def decode(ceilings: dict) -> list[dict]:
    """Microseconds, and the share of the copy bandwidth, of one query for each sequence over a
    paged cache with blocks of 16."""
    records = []
    three = flash3()
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

            dense = rand(batch, hq, 1, d), rand(batch, hk, n, d), rand(batch, hk, n, d)

            def sdpa(dense=dense):
                return F.scaled_dot_product_attention(*dense, enable_gqa=True)

            calls = {"rlk": [run]}
            for name, backend in RIVALS.items():
                calls[name] = [within(backend, sdpa)]
            if three is not None:

                def paged(q=q, k=k_cache, v=v_cache, table=table, lens=lens, cu=cu, n=n):
                    return three(q, k, v, 1, cu, n, seqused_k=lens, block_table=table, causal=True)

                calls["flash3"] = [paged]
            us = {name: ms * 1e3 for name, ms in graphs_ms(calls).items()}
            share = nbytes / us["rlk"] / 1e3 / ceilings["copy_gbs"]
            records.append(
                {"model": model, "batch": batch, "context": n, "us": us, "bandwidth_share": share}
            )
    return records
