"""Times sampling beside torch, vLLM and FlashInfer: the tokens of a step of decode.

Each call starts from logits in `dtype` and ends with token ids. torch sorts the row; "trick"
divides the probabilities by exponential noise, after a mask that needs no sort for top-k. vLLM's is
its native path, and FlashInfer's the call that vLLM would make; both work on fp32 logits, so that a
conversion is part of their time unless the logits are fp32. A rival that is not installed, or that
refuses a call, is left out, with its reason on the standard error.
"""

import sys
from collections.abc import Callable
from functools import partial

import rlk_kernels as rk
import torch
from timing import copies, graphs_ms

VOCABULARY = 151_936
BATCHES = (32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
Call = Callable[[torch.Tensor], object]


def logits(batch: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """normal: top-p keeps tens of thousands of tokens. peaked: probabilities fall with the square
    of the rank, in a random order, and top-p keeps about ten."""
    if kind == "normal":
        x = torch.randn(batch, VOCABULARY, device="cuda") * 2.0
    else:
        rank = torch.rand(batch, VOCABULARY, device="cuda").argsort(1)
        x = -2.0 * (rank + 1.0).log()
    return x.to(dtype)


def of_rows(batch: int, settings: dict[str, float]) -> dict[str, torch.Tensor]:
    """The settings as tensors, as an engine has them."""
    return {
        name: torch.full(
            (batch,), value, device="cuda", dtype=torch.int32 if name == "top_k" else torch.float32
        )
        for name, value in settings.items()
    }


def ours(batch: int, settings: dict[str, float]) -> Call:
    keys = torch.arange(batch, device="cuda")
    positions = torch.full((batch,), 1000, device="cuda")
    return partial(rk.sample, keys=keys, positions=positions, **of_rows(batch, settings))


def _exponential(probabilities: torch.Tensor) -> torch.Tensor:
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def torch_sort(x: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0):
    if temperature == 0:
        return x.argmax(-1)
    values, ids = torch.sort(x.float() / temperature, dim=-1, descending=True)
    if top_k:
        values[:, top_k:] = -torch.inf
    p = values.softmax(-1)
    if top_p < 1:
        p[p.cumsum(-1) - p >= top_p] = 0.0
    return ids.gather(1, torch.multinomial(p, 1, replacement=True))


def torch_trick(x: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0):
    if temperature == 0:
        return x.argmax(-1)
    z = x.float() / temperature
    if top_k:
        z = z.masked_fill(z < z.topk(top_k, -1).values[:, -1:], -torch.inf)
    p = z.softmax(-1)
    if top_p < 1:
        ranked, ids = torch.sort(p, dim=-1, descending=True)
        ranked[ranked.cumsum(-1) - ranked >= top_p] = 0.0
        p = torch.zeros_like(p).scatter_(-1, ids, ranked)
    return _exponential(p)


def vllm_native(batch: int, settings: dict[str, float]) -> Call:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    rows = of_rows(batch, settings)
    k, p = rows.get("top_k"), rows.get("top_p")
    heat = rows["temperature"][:, None]

    def run(x: torch.Tensor) -> torch.Tensor:
        if settings["temperature"] == 0:
            return x.float().argmax(-1)
        z = apply_top_k_top_p(x.float() / heat, k, p)
        return random_sample(z.softmax(-1, dtype=torch.float32), {})

    return run


def flashinfer(batch: int, settings: dict[str, float]) -> Call | None:
    from flashinfer import sampling

    rows = of_rows(batch, settings)
    k, p = rows.get("top_k"), rows.get("top_p")
    heat = rows["temperature"][:, None]
    if settings["temperature"] == 0:
        return None

    def run(x: torch.Tensor) -> torch.Tensor:
        z = x.float() / heat
        if k is None and p is None:
            return sampling.sampling_from_logits(z)
        if p is None:
            return sampling.top_k_sampling_from_probs(z.softmax(-1), k)
        if k is None:
            return sampling.top_p_sampling_from_probs(z.softmax(-1), p)
        return sampling.top_k_top_p_sampling_from_logits(z, k, p)

    return run


RIVALS: dict[str, Callable[[int, dict[str, float]], Call | None]] = {
    "rlk": ours,
    "torch sort": lambda batch, settings: partial(torch_sort, **settings),
    "torch trick": lambda batch, settings: partial(torch_trick, **settings),
    "vllm": vllm_native,
    "flashinfer": flashinfer,
}


def calls_of(inputs: list[torch.Tensor], settings: dict[str, float]) -> dict[str, list]:
    calls = {}
    for name, make in RIVALS.items():
        try:
            call = make(len(inputs[0]), settings)
            if call is None:
                continue
            call(inputs[0])
            torch.cuda.synchronize()
        except Exception as error:  # a rival's own, of any kind
            if name == "rlk":
                raise
            print(f"{name}, {settings}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        calls[name] = [partial(call, x) for x in inputs]
    return calls


def measure(ceilings: dict) -> list[dict]:
    """Microseconds of a call; the share of the bandwidth that one read of the logits would take;
    and the time of the fastest rival divided by ours."""
    records = []
    for kind, dtypes in (("normal", DTYPES), ("peaked", DTYPES[1:2])):
        for dtype in dtypes:
            for batch in BATCHES:
                nbytes = batch * VOCABULARY * dtype.itemsize
                inputs = [logits(batch, dtype, kind) for _ in range(copies(nbytes, most=4))]
                for name, settings in SETTINGS.items():
                    us = {n: ms * 1e3 for n, ms in graphs_ms(calls_of(inputs, settings)).items()}
                    records.append({
                        "logits": kind, "dtype": str(dtype).removeprefix("torch."),
                        "batch": batch, "setting": name, "us": us,
                        "bandwidth_share": nbytes / us["rlk"] / 1e3 / ceilings["copy_gbs"],
                        "fastest_ratio": min(t for n, t in us.items() if n != "rlk") / us["rlk"],
                    })  # fmt: skip
    return records
