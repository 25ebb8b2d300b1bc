"""Products of published models, drawn at random, and products of random widths.

Tiles are tuned on random widths (`widths_at_random`) and judged by the widths of models
(`products`): the two share no draw.
"""

import random
from typing import NamedTuple

DENSE = {
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64),
    "Llama-3.2-3B": (3072, 8192, 24, 8, 128),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128),
    "Llama-3.1-70B": (8192, 28672, 64, 8, 128),
    "Llama-2-7B": (4096, 11008, 32, 32, 128),
    "Llama-2-13B": (5120, 13824, 40, 40, 128),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128),
    "Qwen2.5-3B": (2048, 11008, 16, 2, 128),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128),
    "Qwen2.5-14B": (5120, 13824, 40, 8, 128),
    "Qwen2.5-32B": (5120, 27648, 40, 8, 128),
    "Qwen2.5-72B": (8192, 29568, 64, 8, 128),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128),
    "Qwen3-1.7B": (2048, 6144, 16, 8, 128),
    "Qwen3-4B": (2560, 9728, 32, 8, 128),
    "Qwen3-8B": (4096, 12288, 32, 8, 128),
    "Qwen3-14B": (5120, 17408, 40, 8, 128),
    "Qwen3-32B": (5120, 25600, 64, 8, 128),
    "Mistral-7B": (4096, 14336, 32, 8, 128),
    "Mistral-Nemo-12B": (5120, 14336, 32, 8, 128),
    "Mistral-Small-24B": (5120, 32768, 32, 8, 128),
    "Mistral-Large-123B": (12288, 28672, 96, 8, 128),
    "GLM-4-9B": (4096, 13696, 32, 2, 128),
    "GLM-4-32B": (6144, 23040, 48, 2, 128),
    "DeepSeek-LLM-7B": (4096, 11008, 32, 32, 128),
    "DeepSeek-Coder-33B": (7168, 19200, 56, 8, 128),
}
"""model -> (hidden size, MLP size, query heads, KV heads, head size)."""

OTHERS = {
    "Qwen3-30B-A3B": {
        "qkv": (5120, 2048),
        "o": (2048, 4096),
        "expert gate_up": (1536, 2048),
        "expert down": (2048, 768),
    },
    "Qwen3-235B-A22B": {
        "qkv": (9216, 4096),
        "o": (4096, 8192),
        "expert gate_up": (3072, 4096),
        "expert down": (4096, 1536),
    },
    "GLM-4.5-Air": {
        "qkv": (14336, 4096),
        "o": (4096, 12288),
        "expert gate_up": (2816, 4096),
        "expert down": (4096, 1408),
    },
    "DeepSeek-V2-Lite": {
        "q": (3072, 2048),
        "kv_a": (576, 2048),
        "kv_b": (4096, 512),
        "o": (2048, 2048),
        "gate_up": (21888, 2048),
        "expert down": (2048, 1408),
    },
    "DeepSeek-V3": {
        "q_a": (1536, 7168),
        "q_b": (24576, 1536),
        "kv_a": (576, 7168),
        "kv_b": (32768, 512),
        "o": (7168, 16384),
        "gate_up": (36864, 7168),
        "down": (7168, 18432),
        "expert gate_up": (4096, 7168),
        "expert down": (7168, 2048),
    },
}
"""model -> layer -> (N, K) of the weight."""


class Product(NamedTuple):
    """y[M, N] = x[M, K] @ weight[N, K]^T."""

    m: int
    n: int
    k: int
    name: str = ""


def published() -> dict[str, dict[str, tuple[int, int]]]:
    """model -> layer -> (N, K); q, k and v are one product, and so are gate and up."""
    shapes = {}
    for model, (hidden, mlp, queries, kv, dim) in DENSE.items():
        shapes[model] = {
            "qkv": ((queries + 2 * kv) * dim, hidden),
            "o": (hidden, queries * dim),
            "gate_up": (2 * mlp, hidden),
            "down": (hidden, mlp),
        }
    return shapes | OTHERS


def rows_at_random(random_: random.Random, least: float = 0, most: float = 14) -> int:
    """A number between 2**least and 2**most, uniform in its logarithm: any number, a multiple of 8
    or 128, or a power of 2."""
    of = random_.choice((1, 1, 1, 8, 128, 0))
    m = 2 ** random_.uniform(least, most)
    if of == 0:
        return 2 ** round(random_.uniform(least, most))
    return min(16384, max(1, round(m / of) * of))


def products(seed: int, count: int) -> list[Product]:
    """Different layers of published models with random numbers of rows."""
    random_, models, products = random.Random(seed), published(), {}
    while len(products) < count:
        model = random_.choice(list(models))
        layer = random_.choice(list(models[model]))
        n, k = models[model][layer]
        m = rows_at_random(random_)
        products.setdefault((m, n, k), Product(m, n, k, f"{model} {layer}"))
    return list(products.values())


def widths_at_random(seed: int, count: int) -> list[Product]:
    """Products of random widths, which are multiples of 64: N from 256 to 65536, K from 512 to
    32768."""
    random_, products = random.Random(seed), []
    while len(products) < count:
        n = round(2 ** random_.uniform(8, 16) / 64) * 64
        k = round(2 ** random_.uniform(9, 15) / 64) * 64
        if 2**19 <= n * k <= 2**29:  # as weights of layers are
            narrow = random_.random() < 0.7  # where the choice of the tile matters most
            m = rows_at_random(random_, 5, 12) if narrow else rows_at_random(random_)
            products.append(Product(m, n, k))
    return products
