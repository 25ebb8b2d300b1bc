"""Measures time (against the GEMM alone) and memory of linear_logp and linear_grpo_loss, and of the
rivals.

`measure` replays CUDA graphs in turns, so that all of them run at the same clocks. `rivals` times
calls with events, in turns too, and lists the packages that are not installed.
T = tokens   H = hidden size   V = vocabulary
"""

import importlib.util
import statistics
from collections.abc import Callable

import rlk_kernels as rk
import torch
from timing import rand
from torch.utils.checkpoint import checkpoint

TOKENS = (1024, 4096, 8192, 16384)
HEADS = ((4096, 128256), (4096, 151936), (2048, 151936), (1024, 151936))
MIB = 1 << 20
SPREADS = {
    "well_scaled": (1024, 2.0),
    "peaked": (1024, 12.0),
    "deep": (4096, 4.0),
    "deep_peaked": (4096, 12.0),
}
"""The cases of precision: name -> (H, standard deviation of the logits)."""


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """`call` as the replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def in_turn(calls: dict[str, Callable[[], object]], rounds: int, inner: int) -> dict[str, float]:
    """name -> median milliseconds of a call; every round runs each of them `inner` times."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # the clock settles, and the host is ahead
            start.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / inner)
    return {name: statistics.median(x) for name, x in times.items()}


def held_mib(call: Callable[[], object], results: int = 0, warm: bool = True) -> float:
    """MiB that `call` needs at its peak, beyond the memory in use before it and its `results`, in
    bytes."""
    if warm:
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - results) / MIB


def measure(ceilings: dict) -> list[dict]:
    """A record for each shape: the GEMM alone, forward, forward and backward, the GRPO loss."""
    records = []
    for h, v in HEADS:
        weight = rand(v, h, scale=h**-0.5).requires_grad_()
        for t in TOKENS:
            hidden = rand(t, h).requires_grad_()
            target = torch.randint(0, v, (t,), device="cuda")
            up, mask = torch.randn(t, device="cuda"), torch.ones(t, device="cuda")
            bounds = torch.arange(0, t + 1, 512, device="cuda")
            out = torch.empty(t, v, device="cuda", dtype=torch.bfloat16)
            x, w = hidden.detach(), weight.detach()

            def gemm(x=x, w=w, out=out):
                torch.mm(x, w.T, out=out)

            def forward(x=x, w=w, target=target):
                rk.linear_logp(x, w, target)

            def both(hidden=hidden, target=target, up=up, weight=weight):
                torch.autograd.grad(rk.linear_logp(hidden, weight, target), (hidden, weight), up)

            def grpo(hidden=hidden, target=target, up=up, mask=mask, b=bounds, weight=weight):
                loss, _ = rk.linear_grpo_loss(hidden, weight, target, None, up, mask, cu_seqlens=b)
                torch.autograd.grad(loss, (hidden, weight))

            results = 2 * (hidden.numel() + weight.numel())
            held = {"forward": held_mib(forward), "both": held_mib(both, results)}
            held["grpo"] = held_mib(grpo, results)
            calls = {"gemm": gemm, "forward": forward, "both": both, "grpo": grpo}
            ms = in_turn(
                {name: captured(call) for name, call in calls.items()},
                rounds=5, inner=max(1, 8192 * 4096 // (t * h)),
            )  # fmt: skip
            records.append(
                {
                    "t": t, "h": h, "v": v, "ms": ms, "held_mib": held,
                    "forward_ratio": ms["forward"] / ms["gemm"],
                    "both_ratio": ms["both"] / (4 * ms["gemm"]),
                    "grpo_ratio": ms["grpo"] / (3 * ms["gemm"]),
                    "ceiling_share": 2e-9 * t * h * v / ms["forward"] / ceilings["tflops"],
                }
            )  # fmt: skip
            print({k: r for k, r in records[-1].items() if k != "held_mib"}, held, flush=True)
            del out, calls, gemm
            torch.cuda.empty_cache()
    return records


def torch_whole(hidden, weight, target):
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, target[:, None])[:, 0]


def torch_chunks(hidden, weight, target):
    parts = zip(hidden.split(1024), target.split(1024), strict=True)
    return torch.cat([checkpoint(torch_whole, x, weight, t, use_reentrant=False) for x, t in parts])


def implementations() -> tuple[dict[str, Callable], dict[str, str]]:
    """(name -> a function of hidden, weight and target that returns logp, name -> why a rival is
    absent)."""
    runs: dict[str, Callable] = {
        "rlk": rk.linear_logp,
        "torch, logits in memory": torch_whole,
        "torch, chunks of 1024": torch_chunks,
    }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
            LigerFusedLinearScaledCrossEntropyFunction as Liger,
        )

        runs["Liger 0.8.5 (CuTe DSL)"] = lambda h, w, t: -Liger.apply(h, w, t)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        runs["cut-cross-entropy 25.1.1"] = lambda h, w, t: (
            -linear_cross_entropy(h, w, t, reduction="none")
        )
    if importlib.util.find_spec("verl"):
        from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

        runs["verl 0.9.1 kernel"] = lambda h, w, t: LinearCrossEntropy.apply(h, w, t, 1.0, "none")[
            0
        ]
    names = ("Liger 0.8.5 (CuTe DSL)", "cut-cross-entropy 25.1.1", "verl 0.9.1 kernel")
    return runs, {name: "not installed" for name in names if name not in runs}


def gradients(run: Callable, hidden, weight, target, up):
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    return torch.autograd.grad(run(leaves[0], leaves[1], target), leaves, up)


def errors(run: Callable) -> dict[str, float]:
    """The largest error of logp in each case of SPREADS, for tokens drawn from the softmax and for
    any tokens."""
    t, v = 1000, 32000
    record = {}
    for name, (h, spread) in SPREADS.items():
        torch.manual_seed(1)
        hidden, weight = rand(t, h), rand(v, h, scale=spread * h**-0.5)
        logits = hidden.double() @ weight.double().T
        exact = torch.log_softmax(logits, -1)
        tokens = {
            "drawn": torch.multinomial(exact.exp(), 1),
            "any": torch.randint(0, v, (t, 1), device="cuda"),
        }
        for which, target in tokens.items():
            logp = run(hidden, weight, target[:, 0]).double()
            record[f"error_{name}_{which}"] = float(
                (logp - exact.gather(-1, target)[:, 0]).abs().max()
            )
            if run is rk.linear_logp:
                ours = rk.linear(hidden, weight, out_dtype=torch.float32).gather(-1, target)
                record[f"logit_error_{name}_{which}"] = float(
                    (ours.double() - logits.gather(-1, target)).abs().max()
                )
        del logits, exact
    return record


def properties(run: Callable) -> dict:
    """Precision, and batch invariance at H=1024, V=32000, as the tests check ours."""
    t, h, v = 1000, 1024, 32000
    record: dict = errors(run)
    torch.manual_seed(1)
    hidden, target = rand(t, h), torch.randint(0, v, (t,), device="cuda")
    up = torch.randn(t, device="cuda")
    weight = rand(v, h, scale=2 * h**-0.5)
    whole = run(hidden, weight, target)
    grad, wgrad = gradients(run, hidden, weight, target, up)
    same = same_grad = True
    alone = attempt(run, hidden[:1], weight, target[:1])
    record["one_token"] = alone if isinstance(alone, str) else "yes"
    for m in (2 if isinstance(alone, str) else 1, 2, 17, 64, 65, 129, 512, 999):
        for first in (0, t - m):
            part = slice(first, first + m)
            same &= torch.equal(run(hidden[part], weight, target[part]), whole[part])
            if m in (17, 129, 512):
                lone = gradients(run, hidden[part], weight, target[part], up[part])[0]
                same_grad &= torch.equal(lone, grad[part])
    record["invariant"] = bool(same)
    record["invariant_gradient"] = bool(same_grad)
    repeats = [gradients(run, hidden, weight, target, up)[1] for _ in range(5)]
    record["repeats"] = all(torch.equal(x, wgrad) for x in repeats)
    # a row whose target has p = 0.999: its hidden gradient is g (w_target - sum p w), nearly 0
    rows = weight[target].double()
    reach = torch.log(torch.tensor(999.0 * v, device="cuda").double()) + 0.2
    sure = (rows * reach / rows.norm(dim=-1, keepdim=True) ** 2).to(hidden.dtype)
    exact_leaf = sure.double().requires_grad_()
    logs = torch.log_softmax(exact_leaf @ weight.double().T, -1).gather(-1, target[:, None])[:, 0]
    truth = torch.autograd.grad(logs, exact_leaf, up.double())[0]
    mine = gradients(run, sure, weight, target, up)[0].double()
    scale = truth.norm(dim=-1)
    record["confident_p"] = float(logs.exp().median())
    record["confident_gradient_error"] = float(((mine - truth).norm(dim=-1) / scale).median())
    return record


def attempt(call: Callable, *arguments):
    """The call's value, or a line that says why the call failed."""
    try:
        return call(*arguments)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except Exception as error:  # a rival's failure is a result of the table, with its reason
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def precision(ceilings: dict) -> dict:
    """Precision and invariance of every implementation."""
    return {name: attempt(properties, run) for name, run in implementations()[0].items()}


def rivals(ceilings: dict) -> dict:
    """Time and memory at each shape, of every implementation."""
    runs, absent = implementations()
    shapes = [(t, *HEADS[0]) for t in TOKENS] + [(4096, *head) for head in HEADS[1:]]
    records = []
    for t, h, v in shapes:
        hidden, weight = rand(t, h), rand(v, h, scale=h**-0.5)
        target = torch.randint(0, v, (t,), device="cuda")
        up = torch.randn(t, device="cuda")
        results = 2 * (hidden.numel() + weight.numel())
        out = torch.empty(t, v, device="cuda", dtype=torch.bfloat16)

        def gemm(x=hidden, w=weight, out=out):
            torch.mm(x, w.T, out=out)

        forward: dict[str, Callable] = {"GEMM alone": gemm}
        both: dict[str, Callable] = {}
        held: dict[str, dict] = {}
        failed: dict[str, str] = {}
        for name, run in runs.items():

            def one(run=run, x=hidden, w=weight, target=target):
                with torch.no_grad():
                    return run(x, w, target)

            def two(run=run, x=hidden, w=weight, target=target, up=up):
                gradients(run, x, w, target, up)

            mib = [attempt(held_mib, one), attempt(held_mib, two, results)]
            held[name] = dict(zip(("forward", "both"), mib, strict=True))
            for calls, call, value in ((forward, one, mib[0]), (both, two, mib[1])):
                if isinstance(value, float):
                    calls[name] = call
                else:
                    failed[name] = value
        ms = {"forward": in_turn(forward, 3, 2), "both": in_turn(both, 3, 1)}
        records.append({"t": t, "h": h, "v": v, "ms": ms, "held_mib": held, "failed": failed})
        print(records[-1], flush=True)
        del out, forward, both, gemm
        torch.cuda.empty_cache()
    return {"names": list(runs), "shapes": records, "absent": absent}
