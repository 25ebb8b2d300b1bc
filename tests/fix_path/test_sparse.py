"""Sparse models with the kernels in every engine: no bit differs, at any site, and no token goes to
another expert. The embedded one is Qwen3-MoE; Mixtral, weights that do not add up to 1, sizes that
vLLM's own kernels do not take, and GLM-4.5's corrected scores, groups and shared experts are small
random ones."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from bit_equal import Bits
from command import Cli, Outcome, command_line, require_engine, write_few_prompts
from sparse_models import RANDOM, SPARSE, assert_no_bit_differs, model_of

MODELS = ("sparse", *RANDOM)
EVERY = [
    ("hf", "hf:batch=4,padding=left", "fsdp:dp=2"),
    ("megatron", "megatron:dispatcher=alltoall,batch=6", "megatron:input=packed"),
    ("vllm", "vllm:max_num_seqs=2,max_num_batched_tokens=64,enable_prefix_caching=1"),
]
DEFAULT = {
    ("sparse", "bfloat16", "hf:batch=4,padding=left"),
    ("sparse", "bfloat16", "megatron:dispatcher=alltoall,batch=6"),
    ("mixtral", "float32", "megatron:input=packed"),
    ("odd-sizes", "bfloat16", "hf:batch=4,padding=left"),
    ("corrected", "bfloat16", "megatron:dispatcher=alltoall,batch=6"),
}
"""What is tested by default."""
MATRIX = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.whole_matrix)
    for case in itertools.product(MODELS, ("bfloat16", "float32"), itertools.chain(*EVERY))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models and the runs lie: what one captured, the next takes."""
    return tmp_path_factory.mktemp("sparse")


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


def compared(cli: Cli, folder: Path, name: str, rollout: str, train: str) -> Outcome:
    for engine in (rollout, train):
        require_engine(engine.partition(":")[0])
    return cli(
        *("compare", "--model", model_of(folder, name), "--contract", "bitwise"),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", 12),
        *("--rollout", rollout, "--train", train, "--run-dir", folder / "run"),
    )


@pytest.mark.parametrize(("name", "dtype", "train"), MATRIX)
def test_no_bit_differs(cli: Cli, folder: Path, name: str, dtype: str, train: str) -> None:
    spec = f"{train}{',' if ':' in train else ':'}dtype={dtype},kernels=rlk"
    done = compared(cli, folder, name, f"vllm:dtype={dtype},kernels=rlk", spec)
    assert_no_bit_differs(done)


@pytest.mark.whole_matrix
def test_without_the_kernels_there_is_drift(cli: Cli, folder: Path) -> None:
    """The control group: the same command."""
    done = compared(cli, folder, "sparse", "vllm", "megatron")
    assert done.code == 1
    assert done.verdict is not None
    assert done.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 30
    assert done.first is not None


BATCHES: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"{n} at a time": {"max_num_seqs": n} for n in (1, 2, 7, 64)},
    "chunks of 40": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "prefix caching": {"enable_prefix_caching": True},
}


@pytest.mark.whole_matrix
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_the_batch(vllm_bits: Bits, dtype: str) -> None:
    common = {"kernels": "registered", "model": str(SPARSE)}
    cases = [
        common | {"name": name, "options": {"dtype": dtype} | options}
        for name, options in BATCHES.items()
    ]
    answers = vllm_bits(cases)
    first = answers["default"]
    assert len(first["decode"]) == 64
    assert {"route", "grouped_linear", "combine_experts"} <= set(first["ran"])
    for name, one in answers.items():
        assert one["decode"] == one["prefill"], name
        for what in ("tokens", "decode", "prefill"):
            assert one[what] == first[what], name


def test_no_operator_of_a_sparse_layer_is_left_to_the_engine(cli: Cli, folder: Path) -> None:
    done = compared(cli, folder, "sparse", "hf:kernels=rlk,except=moe_out+attn", "hf")
    assert done.code == 2
    assert "moe_out cannot be left to the engine" in done.err
    done = compared(cli, folder, "corrected", "hf:kernels=rlk,except=shared_act", "hf")
    assert done.code == 2
    assert "shared_act cannot be left to the engine" in done.err
