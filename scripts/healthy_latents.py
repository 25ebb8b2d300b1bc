#!/usr/bin/env python3
"""Makes 20 small models with latent attention that differ in shape and training, for healthy runs.

    python scripts/healthy_latents.py --out models --workers 2
    python scripts/healthy_runs.py --models models --out runs --workers 2
    python scripts/healthy_report.py --models models --runs runs --out table.md --by family,pair

A seed decides all of a model. vLLM on a CPU takes these widths alone; a plain rope, and the routers
of sparse layers of deepseek_v2 and deepseek_v3, are faults of its own there.
"""

import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from healthy_models import EMBEDDED, POSITIONS, ModelSpec, make_or_list  # noqa: E402

SEEDS = range(20)
KINDS = (
    *("deepseek_v3 dense", "glm4_moe_lite sparse", "deepseek_v3 sparse", "deepseek_v2 sparse"),
    *("deepseek_v3 dense", "glm4_moe_lite sparse", "deepseek_v3 sparse", "deepseek_v2 dense"),
)
"""The family of successive seeds, and whether layers behind the first are sparse."""
STEPS = 8
"""Of training, for about a third of the models."""
LATENT, ROTATED = 512, 64


GROUPED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
GREEDY = {
    **{"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "num_experts_per_tok": 2},
}
"""How routers choose: vLLM reads these settings, and transformers has defaults of other values."""


def latent(seed: int) -> ModelSpec:
    draw = random.Random(seed)
    family, _, kind = KINDS[seed % len(KINDS)].partition(" ")
    layers, heads = draw.choice((2, 3, 5)), draw.choice((2, 4, 8))
    factor = draw.choice((4.0, 16.0, 32.0))
    more: dict[str, Any] = {
        "q_lora_rank": draw.choice((48, 96, 192)),
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROTATED,
        "qk_nope_head_dim": draw.choice((32, 64, 128)),
        "v_head_dim": draw.choice((32, 64, 128)),
        "initializer_range": draw.choice((0.02, 0.05, 0.1)),
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": draw.choice((0.707, 1.0))},
            "mscale_all_dim": draw.choice((0.707, 1.0)),
            "original_max_position_embeddings": int(POSITIONS / factor),
        },
        "first_k_dense_replace": layers,
        **(GREEDY if family == "deepseek_v2" else GROUPED),
    }
    if family == "deepseek_v2":
        # As in DeepSeek-V2-Lite.
        more["q_lora_rank"] = draw.choice((None, more["q_lora_rank"]))
    if kind == "sparse":
        dense = draw.choice((0, 1))
        more |= {"n_routed_experts": draw.choice((8, 16)), "first_k_dense_replace": dense}
        more |= {"num_experts_per_tok": draw.choice((2, 3))}
        more |= {"moe_intermediate_size": draw.choice((64, 96))}
        if family == "glm4_moe_lite":
            more |= {"n_group": 1, "topk_group": 1}
            more["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
        if family == "deepseek_v3":
            # Megatron adds up as many scores of a group as a token has experts of it.
            more |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    return ModelSpec(
        name=f"latent-{seed:02}-{family}-{kind}",
        family=family,
        hidden=draw.choice((96, 128, 192, 256)),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=ROTATED,
        inner=draw.choice((256, 448)),
        vocabulary=draw.choice((1024, 4096)),
        # vLLM 0.32 does not load a tied head of a model with latents.
        tied=draw.random() < 0.3 and kind == "sparse" and family != "glm4_moe_lite",
        stored="bfloat16",
        tokenizer=EMBEDDED,
        steps=STEPS if draw.random() < 0.35 else 0,
        seed=seed,
        more=more,
    )


if __name__ == "__main__":
    make_or_list([latent(seed) for seed in SEEDS], __doc__)
