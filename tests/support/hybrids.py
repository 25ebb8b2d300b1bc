"""Hybrids compared at the borders where their bugs live: prompts of several chunks, and prefixes
that vLLM takes from its cache."""

import json
from pathlib import Path

from command import Cli, Outcome, capture_of, require_engine
from pair_models import GATED, HYBRID
from random_model import write_random_model

LENGTHS = (5, 37, 64, 65, 100, 150)
"""Of prompts: within the first chunk, at its border, and in the third one."""


def long_prompts(folder: Path, each: int) -> Path:
    """Prompts of each of `LENGTHS`, by ids."""
    rows = [
        {"id": f"{length}-{n}", "ids": [1 + (7 * n + 31 * i) % 1000 for i in range(length)]}
        for length in LENGTHS
        for n in range(each)
    ]
    path = folder / f"long-{each}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SMALL_BLOCKS = {"head_dim": 128, "num_key_value_heads": 4}
"""Keys and values so large that a block of vLLM's cache, which is as large as a state, has few
tokens."""
CACHED_FAMILIES = {
    "qwen3_5_text": HYBRID | SMALL_BLOCKS,
    "qwen3_next": HYBRID | GATED | SMALL_BLOCKS,
}


def behind_a_cached_prefix(
    cli: Cli, folder: Path, family: str, rollout: str, train: str, *more: str
) -> Outcome:
    """Four prompts of up to 180 tokens, which begin with the same 164 ones."""
    require_engine("vllm")
    model = folder / f"cached-{family}"
    if not model.exists():
        settings = CACHED_FAMILIES[family]
        write_random_model(model, True, model_type=family, dtype="bfloat16", **settings)
    rows = [[1 + (31 * i + (i >= 170 - 2 * n) * n) % 1000 for i in range(180)] for n in range(4)]
    prompts = folder / "cached.jsonl"
    lines = (json.dumps({"id": str(n), "ids": ids}) + "\n" for n, ids in enumerate(rows))
    prompts.write_text("".join(lines))
    return cli(
        *("compare", "--model", model, "--prompts", prompts, "--max-new-tokens", 16),
        *("--rollout", f"vllm:enable_prefix_caching=1,{rollout}", "--train", train),
        *("--run-dir", folder / "cached", "--fresh", *more),
    )


def cached_tokens(folder: Path) -> dict[int, int]:
    return capture_of(folder / "cached", "rollout").read_pass("decode").record.cached
