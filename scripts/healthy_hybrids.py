#!/usr/bin/env python3
"""Makes 20 small hybrids that differ in shape, decays and training, for healthy runs.

    python scripts/healthy_hybrids.py --out models --workers 2
    python scripts/healthy_runs.py --models models --out runs --workers 2
    python scripts/healthy_report.py --models models --runs runs --out table.md --by family,pair

A seed decides all of a model.
"""

import itertools
import math
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from healthy_models import EMBEDDED, ModelSpec, make_or_list  # noqa: E402

SEEDS = range(20)
KINDS = ("qwen3_5_text", "qwen3_next", "qwen3_next", "qwen3_5_moe_text")
"""The family of successive seeds; the first qwen3_next of them has dense layers alone."""
DECAYS = ((-8.0, -2.0), (-6.0, 1.0), (-1.0, 2.7))
"""Ranges of A_log at first: slow decays, those of trained models, and transformers' own fast ones.
"""
STEPS = 12
"""Of training, for about a quarter of the models: transformers' own code of the rule is slow."""
PREFIX = 256
"""Tokens whose keys and values in a layer are as large as a state, or larger: vLLM caches a prefix
of as many."""


def hybrid(seed: int) -> ModelSpec:
    draw, kind = random.Random(seed), seed % len(KINDS)
    family, sparse = KINDS[kind], kind > 1
    layers, heads = draw.choice((4, 4, 8)), draw.choice((4, 8))
    # vLLM 0.32 on a CPU takes no other widths, and only equal ones.
    key_heads, dim = draw.choice((1, 2, 4)), draw.choice((64, 128))
    value_heads = key_heads * draw.choice((1, 2, 4))
    attentions = itertools.product((1, 2, heads), (32, 64, 128, 256))
    state = value_heads * dim * dim
    kv_heads, head_dim = draw.choice([a for a in attentions if math.prod(a) * PREFIX >= state])
    more: dict[str, Any] = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "partial_rotary_factor": draw.choice((0.25, 0.5)),
        "initializer_range": draw.choice((0.02, 0.05, 0.1)),
    }
    if family == "qwen3_next":
        more["mlp_only_layers"] = [*range(1, layers, 2)] if sparse else [*range(layers)]
    if sparse:
        more |= {"num_experts": draw.choice((8, 16)), "num_experts_per_tok": draw.choice((2, 3))}
        more |= {"moe_intermediate_size": draw.choice((64, 96))}
        more |= {"shared_expert_intermediate_size": draw.choice((64, 160))}
    return ModelSpec(
        name=f"hybrid-{seed:02}-{family}",
        family=family,
        hidden=draw.choice((96, 128, 192, 256)),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=draw.choice((256, 448)),
        vocabulary=draw.choice((1024, 4096)),
        # vLLM 0.32 does not load a tied head of qwen3_next.
        tied=family != "qwen3_next" and draw.random() < 0.5,
        stored="bfloat16",
        tokenizer=EMBEDDED,
        steps=STEPS if draw.random() < 0.25 else 0,
        seed=seed,
        decays=draw.choice(DECAYS),
        more=more,
    )


if __name__ == "__main__":
    make_or_list([hybrid(seed) for seed in SEEDS], __doc__)
