"""Faults in the real SGLang beside the kernels: each is named. Healthy pairs are those of
`engine_pairs.py`."""

from pathlib import Path

import pytest
import sglang_env
from command import Cli, write_few_prompts
from random_model import write_random_model

pytestmark = [sglang_env.needed, pytest.mark.whole_matrix, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("fault", "site", "sparse"),
    [
        ("norm-eps", "layers.0.attn_norm", False),
        ("attn-scale", "layers.3.attn", False),
        ("act-gelu", "layers.1.act", False),
        ("expert-flipped", "layers.2.experts", True),
        ("expert-missing", "layers.2.moe_out", True),
    ],
)
def test_a_fault_beside_the_kernels_is_named(
    cli: Cli, folder: Path, fault: str, site: str, sparse: bool
) -> None:
    model = folder / "sparse-3-layers"
    if sparse and not model.exists():
        settings = sglang_env.EVERY_LAYER_SPARSE | {"num_hidden_layers": 3, "dtype": "bfloat16"}
        write_random_model(model, **settings)
    done = cli(
        *("compare", "--rollout", sglang_env.sglang(f"kernels=rlk,fault={fault}")),
        *("--train", "hf:kernels=rlk", "--edges", "prefill_vs_train", "--max-new-tokens", 8),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--run-dir", folder / "fault"),
        *(("--model", model) if sparse else ()),
    )
    assert done.code == 1, done.out + done.err
    assert done.first == site, done.out
