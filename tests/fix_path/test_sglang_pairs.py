"""The real SGLang against trainers and vLLM, with the kernels in both: no bit differs, at any site
of any row, however SGLang schedules the requests."""

from pathlib import Path

import pytest
import sglang_env
from bit_equal import assert_equal
from command import Cli, require_engine, write_few_prompts
from random_model import write_random_model

pytestmark = [sglang_env.needed, pytest.mark.timeout(600)]

SCHEDULES = {
    "": "",
    "chunks": "chunked_prefill_size=32,page_size=16,max_running_requests=3",
    "cached prefixes": "radix_cache=1",
}
whole = pytest.mark.whole_matrix


@pytest.mark.parametrize(
    ("schedule", "other", "dtype", "model"),
    [
        ("chunks", "hf", "bfloat16", "embedded"),
        pytest.param("", "hf", "float32", "embedded", marks=whole),
        pytest.param("cached prefixes", "megatron", "bfloat16", "embedded", marks=whole),
        pytest.param("chunks", "megatron", "float32", "embedded", marks=whole),
        pytest.param("", "fsdp:dp=2", "bfloat16", "embedded", marks=whole),
        pytest.param("chunks", "vllm", "bfloat16", "embedded", marks=whole),
        pytest.param("chunks", "hf", "bfloat16", "sparse", marks=whole),
        pytest.param("cached prefixes", "megatron", "float32", "sparse", marks=whole),
        pytest.param("", "vllm", "bfloat16", "sparse", marks=whole),
        pytest.param("chunks", "hf", "bfloat16", "llama", marks=whole),
        pytest.param("cached prefixes", "megatron", "float32", "llama", marks=whole),
        pytest.param("", "hf", "float32", "qwen2", marks=whole),
        pytest.param("chunks", "vllm", "bfloat16", "qwen2", marks=whole),
    ],
)
def test_no_bit_differs(
    cli: Cli, folder: Path, schedule: str, other: str, dtype: str, model: str
) -> None:
    engine = other.partition(":")[0]
    require_engine(engine)
    made, sparse = folder / f"{model}-{dtype}", model == "sparse"
    if model != "embedded" and not made.exists():
        write_random_model(made, **sglang_env.MODELS[model], dtype=dtype)
    sglang = sglang_env.sglang(",".join(filter(None, (f"dtype={dtype}", SCHEDULES[schedule]))))
    beside = f"{other}{',' if ':' in other else ':'}dtype={dtype}"
    rollout, train = (beside, sglang) if engine == "vllm" else (sglang, beside)
    done = cli(
        *("compare", "--rollout", f"{rollout},kernels=rlk", "--train", f"{train},kernels=rlk"),
        *("--contract", "bitwise", "--max-new-tokens", 8, "--run-dir", folder / "run"),
        *("--prompts", write_few_prompts(folder / "few.jsonl")),
        *(() if model == "embedded" else ("--model", made)),
    )
    assert_equal(done, 40, sparse=sparse)


@whole
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
