"""The shapes of the benchmarks: each operator's sizes in three models."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

LINEAR = {
    "Llama-3-8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "Qwen3-0.6B": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
    },
    "Qwen3-8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
    },
}
"""model -> layer -> (N, K) of the weight."""

HEADS = {"Llama-3-8B and Qwen3-8B": (32, 8, 128), "Qwen3-0.6B": (16, 8, 128)}
"""model -> (query heads, KV heads, head size)."""

PREFILL = ((4, 4096), (2, 8192), (1, 16384))
"""(sequences, tokens of each)."""

DECODE = ((1, 4096), (8, 4096), (64, 1024), (64, 4096), (128, 4096), (1, 32768))
"""(sequences, context of each)."""
