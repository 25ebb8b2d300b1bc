# ruff: noqa: E501 (a page of Markdown)
"""What tensor parallelism costs with gathers, beside an engine's all-reduce: on paper.

    python kernels/bench/layout_costs.py > reports/layout-costs.md

Nothing here is measured. Of each row-parallel product, y[M, N] = x[M, K] of R ranks in bf16, a rank

    all-reduce    sends and receives 2 (R - 1) / R  2 N bytes a row, in one collective
    gathers       receives (R - 1) / R  2 K bytes a row of x, then (R - 1) / R  2 N of y, in two

and waits for latency + bytes / bandwidth each time.

M = rows   K, N = in and out features   R = ranks
"""

from collections.abc import Iterator
from dataclasses import dataclass

BYTES = 2


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    hidden: int
    heads: int
    """K of o_proj."""
    inner: int
    """K of down_proj."""
    qkv: int

    @property
    def weights(self) -> int:
        """Of a layer."""
        return self.hidden * (self.qkv + self.heads + 3 * self.inner)


MODELS = (
    Model("Qwen3-8B", 36, 4096, 4096, 12288, 6144),
    Model("Qwen3-32B", 64, 5120, 8192, 25600, 10240),
    Model("Llama-3-70B", 80, 8192, 8192, 28672, 10240),
)


@dataclass(frozen=True)
class Link:
    """Between GPUs: assumed, not measured."""

    name: str
    gigabytes: float
    """A second that one GPU receives."""
    reduce_us: float
    """Latency of an all-reduce."""
    gather_us: float
    """Of a gather."""


NCCL = Link("NVLink, NCCL", 360, 15, 15)
PEER = Link("NVLink, by stores", 360, 6, 5)
"""The engine's own all-reduce for few bytes, beside our gather."""
NODES = Link("two nodes", 40, 40, 30)
"""One network card a GPU, 400 Gbit/s; every rank is paired with one of the other node."""
FLOPS, MEMORY = 600e12, 3.0e12
"""Of an H100 in products, and bytes of weights a second in decode: assumed."""
BATCHES = (1, 64, 256)
PREFILL = 8192
RANKS_OF_NODE = 8


def reduced(n: int, ranks: int) -> float:
    """Bytes a row."""
    return 2 * (ranks - 1) / ranks * BYTES * n


def gathered(k: int, n: int, ranks: int) -> float:
    """Bytes a row."""
    return (ranks - 1) / ranks * BYTES * (k + n)


def across(k: int, n: int) -> tuple[float, float]:
    """(all-reduce, gathers): bytes a row that a card receives from the other node, where ranks of a
    node share what is needed: an all-reduce of its share of sums, gathers of the other half."""
    return BYTES * n / RANKS_OF_NODE, BYTES * (k + n) / 2 / RANKS_OF_NODE


def layer_us(model: Model, rows: int, ranks: int) -> float:
    """Of a layer's products on one rank: the slower of arithmetic and of reading weights."""
    share = model.weights / ranks
    return max(2 * share * rows / FLOPS, BYTES * share / MEMORY) * 1e6


def times(model: Model, rows: int, ranks: int, link: Link) -> tuple[float, float]:
    """(all-reduces, gathers): microseconds of a layer's two row-parallel products."""
    reduce = gather = 0.0
    for k in (model.heads, model.inner):
        n = model.hidden
        if link is NODES:
            of_reduce, of_gather = across(k, n)
        else:
            of_reduce, of_gather = reduced(n, ranks), gathered(k, n, ranks)
        per_us = link.gigabytes * 1e3
        reduce += link.reduce_us + rows * of_reduce / per_us
        gather += 2 * link.gather_us + rows * of_gather / per_us
    return reduce, gather


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def ratios() -> Iterator[str]:
    """Bytes of gathers over those of all-reduces: the same for every number of ranks."""
    for model in MODELS:
        products = [(k, model.hidden) for k in (model.heads, model.inner)]
        a = sum(reduced(n, 2) for _, n in products)
        b = sum(gathered(k, n, 2) for k, n in products)
        yield f"{model.name} {b / a:.2f}"


def times_table(cases: list[tuple[Link, int]]) -> Iterator[str]:
    yield _row("link", "tp", *(model.name for model in MODELS))
    yield _row("---", "---:", *("---:" for _ in MODELS))
    for link, ranks in cases:
        served = [n for n in (*BATCHES, PREFILL) if link is not PEER or n < PREFILL]
        slower = [[_slower(model, n, ranks, link) for n in served] for model in MODELS]
        yield _row(link.name, ranks, *(", ".join(f"{x:+.0f}" for x in of) for of in slower))


def _slower(model: Model, rows: int, ranks: int, link: Link) -> float:
    """Percent."""
    reduces, gathers = times(model, rows, ranks, link)
    products = layer_us(model, rows, ranks)
    return 100 * ((gathers + products) / (reduces + products) - 1)


PAGE = """# What a layout costs, on paper

**Nothing on this page is measured.** `python kernels/bench/layout_costs.py` computes it, for bf16. Measured:
[two GPUs](fix-path.md#two-gpus), [the gather by stores](peer-gather.md), [a rank's products](shard-products.md).

For a row-parallel product (o_proj, down_proj; y[M, N] of x[M, K], R ranks) an engine adds up partial results; the kernels gather
input and output, for the bits of one rank. Bytes that a rank receives per row (two nodes of 8: each network card):

    all-reduce                    2(R-1)/R 2N        (2N/8)           1 wait of the device; sequence parallelism 2
    gathers                       (R-1)/R (2K+2N)    ((2K+2N)/2/8)    2
    with sequence parallelism     (R-1)/R (2K+2N/R+2N)                3

Megatron also exchanges both weights once a forward: (R-1)/R 2KN/R bytes each.

Bytes of gathers / of all-reduces, any tp: {bytes}.

By how many percent gathers and products take longer than all-reduces and products, at 1, 64, 256 and, except by stores, 8,192 rows; an upper bound: nothing overlaps, attention is left out.
**Assumed**: NVLink 360 GB/s a direction (of 450); NCCL 15 µs; by stores an engine's own all-reduce 6 µs, our gather 5;
between nodes 40 GB/s a GPU (a 400 Gbit/s card), an all-reduce 40 µs, a gather 30; products at 600 TFLOP/s or 3.0 TB/s of weights, whichever is slower.

{times}

In decode latency decides: four waits a layer instead of two. In prefill bytes decide: K of down_proj is 3 to 5 times N. Across two nodes o_proj costs the same where K = N, down_proj 2 to 3 times as much. At tp=1 and in FSDP nothing is gathered.
"""


def page() -> str:
    cases = [(NCCL, 2), (PEER, 2), (NCCL, 8), (PEER, 8), (NODES, 16)]
    return PAGE.format(
        bytes=", ".join(ratios()),
        times="\n".join(times_table(cases)),
    )


if __name__ == "__main__":
    print(page(), end="")
