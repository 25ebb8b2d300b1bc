"""One optimiser step in the trainer, its weights synced to the live vLLM: every bit is equal again,
and a layer that was left stale is named."""

import shutil
from pathlib import Path

import pytest
import torch
from bit_equal import Bits
from conftest import Cli, Outcome, command_line, require_engine, write_few_prompts

from rlk_align.data import data_path

PATCHES = Path(__file__).resolve().parents[1] / "cli"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("update")


@pytest.fixture(scope="module")
def stepped(folder: Path) -> Path:
    """The embedded model after one step of AdamW, computed with the kernels."""
    from rlk_kernels.integrations import hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype=torch.float32)
    hf.use_kernels(model.train())
    ids = torch.randint(2, 1000, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = model(ids, use_cache=False).logits[:, :-1]
    logprobs = hf.token_logprobs(logits.flatten(0, 1), ids[:, 1:].flatten())
    advantage = torch.tensor([1.0, -1.0]).repeat_interleave(39)
    (-(logprobs * advantage).mean()).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    new = folder / "stepped"
    shutil.copytree(data_path("model"), new)
    model.to(torch.bfloat16).save_pretrained(new)
    return new


@pytest.fixture(scope="module")
def compare(folder: Path, stepped: Path) -> Cli:
    """vLLM loads the old weights and is given the new ones; the trainer has them."""
    require_engine("vllm")
    inner = command_line(folder)
    prompts = write_few_prompts(folder / "few.jsonl")

    def run(*args: object, train: str = "hf", stale: str = "", tp: int = 1) -> Outcome:
        old, env = data_path("model"), {"PYTHONPATH": str(PATCHES), "RLK_TEST_NEW": str(stepped)}
        return inner(
            *("compare", "--model", stepped, "--prompts", prompts, "--max-new-tokens", 8),
            *("--rollout", f"vllm:kernels=rlk,tp={tp},model={old},patch=patches:update_weights"),
            *("--train", f"{train}{',' if ':' in train else ':'}kernels=rlk"),
            *("--contract", "bitwise", *args),
            env=env | {"RLK_TEST_STALE": stale},
            # Variables decide what these captures hold.
            shared=False,
        )

    return run


@pytest.mark.parametrize("train", ["hf", "megatron"])
def test_a_weight_update_keeps_every_bit(compare: Cli, folder: Path, train: str) -> None:
    require_engine(train)
    done = compare("--run-dir", folder / "synced", train=train)
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["precheck"]["mismatches"] == []
    assert all(e["bit_mismatches"] == 0 for e in done.verdict["edges"].values())


@pytest.mark.parametrize(
    ("stale", "weights", "first"),
    [
        ("layers.2.", "layers.2.q_proj", "layers.2.q_proj"),
        ("layers.3.mlp.down_proj", "layers.3.down_proj", "layers.3.down_proj"),
    ],
)
def test_a_stale_layer_is_named(
    compare: Cli, folder: Path, stale: str, weights: str, first: str
) -> None:
    done = compare("--run-dir", folder / f"stale-{len(stale)}", stale=stale)
    assert done.code == 4
    assert done.verdict is not None
    named = [m["name"] for m in done.verdict["precheck"]["mismatches"]]
    assert weights in named
    assert all(stale.split(".")[1] == name.split(".")[1] for name in named)
    across = compare(
        "--run-dir", folder / f"stale-{len(stale)}", "--allow-mismatch", "weights", stale=stale
    )
    assert across.first == first, across.out
    assert across.verdict is not None
    assert across.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 0


@pytest.mark.whole_matrix
def test_ranks_get_their_share_of_an_update(compare: Cli, folder: Path) -> None:
    """Of row-parallel products by rows, where a trainer's rank has columns."""
    done = compare("--run-dir", folder / "shared", train="megatron:tp=2", tp=2)
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert all(e["bit_mismatches"] == 0 for e in done.verdict["edges"].values())


@pytest.mark.whole_matrix
def test_a_stale_shard_is_named_with_its_rank(compare: Cli, folder: Path) -> None:
    stale = "rank 1: layers.3.mlp.down_proj"
    done = compare("--run-dir", folder / "stale-shard", stale=stale, tp=2)
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    (mismatch,) = done.verdict["precheck"]["mismatches"]
    assert mismatch["name"] == "layers.3.down_proj"
    assert mismatch["ranks"] == [1]


def test_weights_reloaded_into_the_live_vllm_keep_every_bit(vllm_bits: Bits, stepped: Path) -> None:
    """Between two rollouts, by vLLM's `reload_weights`, as its weight transfer loads a layer."""
    on = {"kernels": "registered", "options": {"enable_prefix_caching": True}}
    cases = [
        on | {"name": "before"},
        on | {"name": "reloaded", "reload": str(stepped)},
        on | {"name": "fresh", "model": str(stepped)},
    ]
    found = vllm_bits(cases, few=True)
    for what in ("tokens", "decode", "prefill"):
        assert found["reloaded"][what] == found["fresh"][what]
    assert found["reloaded"]["decode"] == found["reloaded"]["prefill"]
    assert found["reloaded"]["decode"] != found["before"]["decode"]
