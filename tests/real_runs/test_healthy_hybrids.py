"""Hybrids in engines with their own kernels: engines drift at the borders of chunks, of cut
prefills and of cached prefixes, and no healthy pair raises an alarm."""

from pathlib import Path

import pytest
from command import Cli, Outcome, command_line, require_engine
from covering import pairwise
from hybrids import CACHED_FAMILIES, behind_a_cached_prefix, cached_tokens, long_prompts
from pair_models import MODELS

from rlk_align.engines.common.experts import BY_EXPERT
from rlk_align.engines.vllm.delta_net import HIDDEN_IN_DECODE

CUT = "vllm:max_num_batched_tokens=37,max_num_seqs=3"
PAIRS = pairwise(
    ("qwen3_5", "qwen3_next", "qwen3_5_moe"),
    (CUT, "vllm", "hf"),
    ("fsdp:dp=2", "hf:attn=eager", "hf:batch=4,padding=left"),
)
DEFAULT = {("qwen3_5", CUT, "fsdp:dp=2")}
"""What runs beside the whole matrix; the next test adds a sparse model behind a cached prefix."""


def case(*values: str, default: bool) -> object:
    marks = () if default else pytest.mark.whole_matrix
    return pytest.param(*values, id="-".join(values), marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


def assert_healthy(done: Outcome, rollout: str, sparse: bool) -> None:
    assert done.code == 0, done.out + done.err
    verdict = done.verdict
    assert verdict is not None
    assert verdict["precheck"]["tokens"] == verdict["precheck"]["weights"] == "equal"
    assert verdict["breaches"] == []
    assert all(of["over_budget"] == [] for of in verdict["divergences"].values())
    assert verdict["edges"]["decode_vs_train"]["tokens"] > 40
    assert verdict["edges"]["decode_vs_train"]["bit_mismatches"] > 0
    hidden = {*HIDDEN_IN_DECODE, *(BY_EXPERT if sparse else ())} if "vllm" in rollout else set()
    assert {x["site"].rpartition(".")[2] for x in verdict["coverage"]["unpaired"]} == hidden
    assert verdict["coverage"]["fraction"] == 1


@pytest.mark.parametrize(
    ("name", "rollout", "train"), [case(*pair, default=pair in DEFAULT) for pair in PAIRS]
)
def test_a_pair_is_healthy_at_the_borders_of_chunks(
    cli: Cli, folder: Path, name: str, rollout: str, train: str
) -> None:
    require_engine(rollout.partition(":")[0])
    done = cli(
        *("compare", "--model", MODELS[name].stored(folder, name, "bfloat16")),
        *("--prompts", long_prompts(folder, 1), "--max-new-tokens", 12),
        *("--rollout", rollout, "--train", train, "--run-dir", folder / "run"),
    )
    assert_healthy(done, rollout, MODELS[name].sparse)


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("family", "train"),
    [
        ("qwen3_next", "hf:batch=4,padding=left"),
        *((family, "fsdp:dp=2") for family in CACHED_FAMILIES),
    ],
)
def test_a_pair_is_healthy_behind_a_cached_prefix(
    cli: Cli, folder: Path, family: str, train: str
) -> None:
    done = behind_a_cached_prefix(cli, folder, family, "block_size=64,max_num_seqs=1", train)
    assert_healthy(done, "vllm", family == "qwen3_next")
    assert cached_tokens(folder) == {1: 128, 2: 128, 3: 128}
