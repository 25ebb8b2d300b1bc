import os, sys, time, itertools, traceback, json, math
import torch
from concurrent.futures import ProcessPoolExecutor
import multiprocessing as mp

sys.path.insert(0, os.path.dirname(__file__))
from timing import graph_ms, event_ms, copies
from rlk_kernels.gemm import Tile, gemm_triton
import rlk_kernels.attention_triton as at
import rlk_kernels.cornerstone as cs

OUT = os.environ.get("OUT", "/tmp")
log = open(f"{OUT}/explore.log", "w")
T0 = time.time()


def say(*a, quiet=False):
    s = " ".join(str(x) for x in a)
    log.write(s + "\n")
    log.flush()
    if not quiet:
        print(s, flush=True)


SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (24576, 4096),
    (4096, 12288),
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
]
T = Tile
small = [T(16,64,256,4,5),T(16,64,256,4,4),T(16,32,512,4,3),T(16,32,512,4,4),T(16,16,512,2,6),T(16,16,512,4,6),T(16,64,256,4,5,swap=True),T(16,64,128,4,8,swap=True),T(16,128,128,4,5,swap=True),T(16,64,512,4,2,swap=True),T(16,32,256,2,7)]
s32 = [T(32,64,256,4,4),T(32,32,512,4,3),T(32,64,256,4,4,swap=True),T(32,64,128,4,8,swap=True),T(32,128,128,4,5,swap=True),T(32,128,64,4,8,swap=True)]
s64 = [T(64,64,256,4,3),T(64,64,128,4,6),T(64,32,256,4,4),T(64,32,128,4,8),T(64,128,64,4,8),T(64,128,128,4,4),T(64,128,64,4,6,n2=64),T(64,64,128,4,5,n2=32),T(64,32,128,4,6,n2=16),T(64,16,256,4,5)]
m128 = [T(128,64,128,4,4),T(128,64,128,8,4),T(128,64,64,8,8),T(128,64,64,4,6,n2=32),T(128,64,128,8,3,n2=32),T(128,128,64,8,5),T(128,128,64,8,4,n2=64),T(128,256,64,8,4,subtile=True),T(64,256,64,8,4),T(64,256,64,4,4),T(128,32,128,4,5),T(128,64,64,8,6,n2=16)]
big = [T(128,128,64,8,4,n2=64,flatten=True),T(128,128,64,8,4,n2=64,group=16,flatten=True),T(128,128,64,8,4,flatten=True),T(128,128,64,8,4,group=16),T(128,256,64,8,4,group=16,subtile=True,flatten=True),T(128,256,64,8,4,group=32,subtile=True,flatten=True),T(128,256,64,8,4,group=4,subtile=True,flatten=True),T(256,128,64,8,3,subtile=True,flatten=True),T(128,256,64,8,3,group=16,subtile=True,flatten=True)]
SWEEP = {1: small, 16: small, 32: s32, 64: s32[2:]+s64, 128: s32[4:5]+s64+m128, 256: s64+m128, 512: s64+m128+big[:1], 1024: s64[1:2]+s64[4:8]+m128+big, 2048: m128+big, 4096: m128[4:8]+big, 8192: big}
def compile_tile(t):
    try:
        a = torch.randn(48, 1024, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
        gemm_triton(
            a,
            b,
            None,
            False,
            True,
            torch.empty(48, 256, device="cuda", dtype=torch.bfloat16),
            tile=t,
        )
        torch.cuda.synchronize()
        return None
    except Exception as e:
        return f"{t}: {str(e)[:200]}"


def att_inputs(B, S, Hq=32, Hk=8, D=128, dt=torch.bfloat16):
    q = torch.randn(B * S, Hq, D, device="cuda", dtype=dt)
    k = torch.randn(B * S, Hk, D, device="cuda", dtype=dt)
    v = torch.randn_like(k)
    return q, k, v, torch.arange(0, (B + 1) * S, S, device="cuda", dtype=torch.int32)


def paged(B, S, page, Hk=8, D=128, dt=torch.bfloat16):
    nb = B * S // page
    kc = torch.randn(nb, page, Hk, D, device="cuda", dtype=dt)
    vc = torch.randn_like(kc)
    return (
        kc,
        vc,
        torch.randperm(nb, device="cuda").int().view(B, -1),
        torch.full((B,), S, device="cuda", dtype=torch.int32),
    )


def run_att(v):
    rows, bn, stages, chunk, split, S, B = v
    at.CHUNK = chunk
    at.block_n = lambda d, t: bn
    q, k, vv, cu = att_inputs(B, S)
    return lambda: at.attention_forward_triton(
        q, k, vv, cu, cu, None, True, 128**-0.5, None, rows=rows, split=split, stages=stages
    )


def run_dec(v):
    rows, bn, stages, chunk, split, S, B = v
    at.CHUNK = chunk
    at.block_n = lambda d, t: bn
    kc, vc, tab, lens = paged(B, S, 16)
    q = torch.randn(B, 32, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.arange(B + 1, device="cuda", dtype=torch.int32)
    return lambda: at.attention_forward_triton(
        q, kc, vc, cu, lens, tab, True, 128**-0.5, None, rows=rows, split=split, stages=stages
    )


def compile_att(kv):
    kind, v = kv
    try:
        v = v[:5] + (256, 2)
        (run_att if kind == "p" else run_dec)(v)()
        torch.cuda.synchronize()
        return None
    except Exception as e:
        return f"{kind}{v}: {str(e)[:300]}"


PRE = [
    (r, bn, st, ch, sp)
    for r in (128, 64)
    for bn in (128, 64)
    for st in (2, 3)
    for ch, sp in ((1024, False), (1 << 20, True))
]
DEC = [
    (64, bn, st, ch, sp)
    for bn in (128, 64)
    for st in (2, 3, 4)
    for ch, sp in ((1024, True), (1024, False), (512, True))
]


def main():
    torch.manual_seed(0)
    ctx = mp.get_context("spawn")
    tiles = list(dict.fromkeys(t for v in SWEEP.values() for t in v))
    with ProcessPoolExecutor(14, mp_context=ctx) as ex:
        for r in ex.map(compile_tile, tiles):
            if r:
                say("compile", r)
        for r in ex.map(compile_att, [("p", v) for v in PRE] + [("d", v) for v in DEC]):
            if r:
                say("compile", r)
    say("compiled", len(tiles), "tiles in", round(time.time() - T0))
    # ceilings
    x = torch.empty(1 << 31, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    ms = event_ms(lambda: y.copy_(x))
    bw = 2 * x.numel() / ms / 1e6
    say("copy GB/s", round(bw))
    del x, y
    # corner stone
    try:
        for dt in (torch.bfloat16, torch.float16):
            ref = cs.tile_bits(tiles[0], dt, torch.device("cuda"))
            bad = [
                t for t in tiles if not torch.equal(cs.tile_bits(t, dt, torch.device("cuda")), ref)
            ]
            p = [
                torch.equal(cs.tile_bits(t, dt, torch.device("cuda"), pointers=True), ref)
                for t in (tiles[0], s64[1], m128[5])
            ]
            say("cornerstone", dt, "bad", bad, "pointers", p)
    except Exception:
        say(traceback.format_exc()[-1500:])
    best = {}
    for M, cands in SWEEP.items():
        for N, K in SHAPES:
            if time.time() - T0 > 330:
                break
            n = copies((N * K + M * K + M * N) * 2)
            W = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(n)]
            A = [torch.randn(M, K, device="cuda", dtype=torch.bfloat16) for _ in range(n)]
            O = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
            tc = graph_ms(
                [lambda a=a, w=w: torch.mm(a, w.T, out=O) for a, w in zip(A, W)], repeat=3
            )
            res = []
            for t in cands:
                try:
                    tt = graph_ms(
                        [
                            lambda a=a, w=w: gemm_triton(a, w, None, False, True, O, tile=t)
                            for a, w in zip(A, W)
                        ],
                        repeat=3,
                    )
                except Exception as e:
                    say("fail", t, str(e)[:150], quiet=True)
                    continue
                res.append((tt, t))
                say(
                    "gemm",
                    M,
                    N,
                    K,
                    f"{tt * 1e3:.1f}us cublas {tc * 1e3:.1f} ratio {tc / tt:.3f}",
                    t,
                    quiet=True,
                )
            res.sort(key=lambda r: r[0])
            best[M, N, K] = (tc, res)
            del W, A
    for M, cands in SWEEP.items():
        rows = [best[M, N, K] for N, K in SHAPES if (M, N, K) in best]
        if not rows:
            continue
        geo = {}
        for t in cands:
            r = [
                tc / dict((b, a) for a, b in res)[t]
                for tc, res in rows
                if t in dict((b, a) for a, b in res)
            ]
            if r:
                geo[t] = (math.exp(sum(map(math.log, r)) / len(r)), min(r))
        say(
            "M",
            M,
            "best-of geo %.3f"
            % math.exp(sum(math.log(tc / res[0][0]) for tc, res in rows) / len(rows)),
        )
        for t, g in sorted(geo.items(), key=lambda kv: -kv[1][0])[:4]:
            say(
                "   %.3f min %.3f" % g,
                (t.m, t.n, t.k, t.warps, t.stages, t.group, t.subtile, t.flatten),
            )
        say(
            "   per shape:",
            " ".join(
                f"{N}x{K}:{best[M, N, K][0] / best[M, N, K][1][0][0]:.2f}[{(lambda t: f'{t.m},{t.n},{t.k}')(best[M, N, K][1][0][1])}]"
                for N, K in SHAPES
                if (M, N, K) in best
            ),
        )
    say("gemm done", round(time.time() - T0))
    import torch.nn.functional as F
    from torch.nn.attention import sdpa_kernel, SDPBackend

    for S, B in ((4096, 4), (16384, 1)):
        fl = 2 * 2 * B * 32 * S * S * 128 / 2
        q = torch.randn(B, 32, S, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(B, 8, S, 128, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        for be in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(be):
                    ms = event_ms(
                        lambda: F.scaled_dot_product_attention(
                            q, k, v, is_causal=True, enable_gqa=True
                        )
                    )
                say("sdpa", S, be, "%.0f TF" % (fl / ms / 1e9))
            except Exception as e:
                say("sdpa fail", be, str(e)[:200])
        for v5 in PRE:
            try:
                ms = event_ms(run_att(v5 + (S, B)), repeat=5)
                say("attn", S, v5, "%.0f TF" % (fl / ms / 1e9))
            except Exception as e:
                say("attn fail", v5, str(e)[:200])
    for S, B in ((4096, 64),):
        nbytes = 2 * B * S * 8 * 128 * 2
        for v5 in DEC:
            try:
                ms = graph_ms([run_dec(v5 + (S, B))])
                say("decode", S, B, v5, "%.1f us %.2f of copy" % (ms * 1e3, nbytes / ms / 1e6 / bw))
            except Exception as e:
                say("decode fail", v5, str(e)[:200])
    # equality prefill = decode
    for bn in (128, 64):
        at.CHUNK = 1024
        at.block_n = lambda d, t: bn
        for dt in (torch.bfloat16, torch.float16):
            q, k, v, cu = att_inputs(1, 3000, dt=dt)
            outs = {}
            for rows, split in ((128, False), (64, False), (64, True), (128, True)):
                try:
                    outs[rows, split] = at.attention_forward_triton(
                        q, k, v, cu, cu, None, True, 128**-0.5, None, rows=rows, split=split
                    )
                except Exception as e:
                    say("eq fail", rows, split, str(e)[:200])
            ref = outs[128, False]
            say(
                "equal",
                bn,
                dt,
                {
                    kk: (torch.equal(o[0], ref[0]), torch.equal(o[1], ref[1]))
                    for kk, o in outs.items()
                },
            )
            kc = torch.zeros(188, 16, 8, 128, device="cuda", dtype=dt)
            vc = torch.zeros_like(kc)
            kc.view(-1, 8, 128)[:3000] = k
            vc.view(-1, 8, 128)[:3000] = v
            tab = torch.arange(188, device="cuda", dtype=torch.int32)[None].repeat(64, 1)
            pos = torch.randint(0, 3000, (64,), device="cuda")
            for split in (True, False):
                o, l = at.attention_forward_triton(
                    q[pos],
                    kc,
                    vc,
                    torch.arange(65, device="cuda", dtype=torch.int32),
                    (pos + 1).int(),
                    tab,
                    True,
                    128**-0.5,
                    None,
                    split=split,
                )
                say(
                    "decode equal",
                    bn,
                    dt,
                    split,
                    torch.equal(o, ref[0][pos]),
                    torch.equal(l, ref[1][:, pos]),
                    (o.float() - ref[0][pos].float()).abs().max().item(),
                )
    # memory-bound
    from rlk_kernels.rms_norm import rms_norm
    from rlk_kernels.rope import rope
    from rlk_kernels.swiglu import swiglu
    from rlk_kernels.embedding import embedding
    from rlk_kernels.logp import logp

    for M, H in ((8192, 4096), (64, 4096), (8192 * 8, 128)):
        x = torch.randn(M, H, device="cuda", dtype=torch.bfloat16)
        r = torch.randn_like(x)
        w = torch.randn(H, device="cuda", dtype=torch.bfloat16)
        pos = torch.arange(M, device="cuda")
        cases = {
            "rms": (lambda: rms_norm(x, w, 1e-6), 4 * M * H),
            "rms+res": (lambda: rms_norm(x, w, 1e-6, residual=r), 8 * M * H),
        }
        if H == 4096:
            kk = x[:, :1024].contiguous().view(M, 8, 128)
            qq = x.view(M, 32, 128)
            g = torch.randn(M, 2 * 12288, device="cuda", dtype=torch.bfloat16)
            L = torch.randn(min(M, 2048), 128256, device="cuda", dtype=torch.bfloat16)
            tg = torch.randint(0, 128256, (L.shape[0],), device="cuda")
            E = torch.randn(128256, H, device="cuda", dtype=torch.bfloat16)
            ids = torch.randint(0, 128256, (M,), device="cuda")
            cases |= {
                "rope": (lambda: rope(qq, kk, pos, theta=1e6), 4 * M * 5120),
                "swiglu": (lambda: swiglu(g[:, :12288], g[:, 12288:]), 6 * M * 12288),
                "logp": (lambda: logp(L, tg), 2 * L.numel()),
                "embedding": (lambda: embedding(ids, E), 4 * M * H),
            }
        for name, (f, nb) in cases.items():
            try:
                ms = graph_ms([f])
                say("mem", name, M, H, "%.1f us %.2f of copy" % (ms * 1e3, nb / ms / 1e6 / bw))
            except Exception as e:
                say("mem fail", name, str(e)[-300:])
    say("all", round(time.time() - T0))


if __name__ == "__main__":
    main()
