"""All embedded prompts with sampled continuations, every site and every log-prob, bit for bit:
vLLM's decode, its re-prefill in whatever batches, HF, FSDP2 and Megatron in whatever layouts.

Apart from `make test` because it takes minutes: `make test-fix-path`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cli, Outcome, capture_of, command_line, require_engine

from rlk_align.data import data_path

TRAINING = (
    *("hf", "hf:batch=7,padding=right", "hf:batch=7,padding=left", "fsdp:dp=2"),
    *("megatron", "megatron:batch=7,padding=left", "megatron:batch=64,padding=right"),
    *("megatron:input=packed", "megatron:batch=1"),
)
SCORING = (
    *("max_num_seqs=1", "max_num_seqs=2", "max_num_seqs=7", "max_num_seqs=64"),
    *("max_num_batched_tokens=64", "enable_prefix_caching=1", "block_size=128"),
)
IN_FP32 = (
    *("hf", "hf:batch=7,padding=left", "fsdp:dp=2", "megatron", "megatron:input=packed"),
    *("max_num_seqs=7", "max_num_batched_tokens=64"),
)
"""Several times slower."""


def by_dtype(cases: tuple[str, ...]) -> list[tuple[str, str]]:
    """(case, dtype)."""
    return [(c, "bfloat16") for c in cases] + [(c, "float32") for c in cases if c in IN_FP32]


LAYER = (
    *("attn_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope"),
    *("attn", "o_proj", "mlp_norm", "gate_proj", "up_proj", "act", "down_proj"),
)
OPERATORS = ("embed", *LAYER, "final_norm", "logits", "logprob")
TOGETHER = {
    # Left to an engine with the first of those that it computes by one product or one function.
    "hf": {"k_rope"},
    "megatron": {"k_proj", "v_proj", "up_proj", "k_rope"},
    "vllm": {"k_proj", "v_proj", "up_proj", "k_rope"},
}
ALIKE = {
    # What an engine's own computes as the profile says anyway: a copy, and on CPUs vLLM's rotation.
    "hf": {"embed"},
    "megatron": {"embed"},
    "vllm": {"embed", "q_rope"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of this module's runs lie: what one captured, the next takes."""
    return tmp_path_factory.mktemp("fix-path")


@pytest.fixture(scope="module")
def compare(folder: Path) -> Cli:
    inner = command_line(folder)

    def run(*args: object) -> Outcome:
        model = ("--model", data_path("model"))
        return inner("compare", *model, *args, "--contract", "bitwise", shared=False)

    return run


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Callable[[str], Path]:
    """The run in which vLLM sampled with the kernels, by dtype."""
    inner = command_line(folder, "command")

    def capture(dtype: str) -> Path:
        require_engine("vllm")
        run = folder / f"sampled-{dtype}"
        if not run.exists():
            engine = f"vllm:dtype={dtype},kernels=rlk"
            done = inner("capture", "--engine", engine, "-o", run, shared=False)
            assert done.code == 0, done.err
        return run

    return capture


def assert_equal(done: Outcome, edges: set[str]) -> None:
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.first is None
    assert done.verdict["tokens"] > 1500
    assert set(done.verdict["edges"]) == edges
    for edge in done.verdict["edges"].values():
        assert edge["tokens"] == done.verdict["tokens"]
        assert edge["bit_mismatches"] == 0
        assert edge["max_abs_dlogp"] == 0.0
        assert edge["ratio_max"] == 1.0
    coverage = done.verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 500_000
    assert coverage["unpaired"] == []


@pytest.mark.parametrize(("train", "dtype"), by_dtype(TRAINING))
def test_rollout_is_training(
    compare: Cli, folder: Path, sampled: Callable[[str], Path], train: str, dtype: str
) -> None:
    name, _, options = train.partition(":")
    require_engine(name)
    spec = f"{name}:" + ",".join(filter(None, [options, f"dtype={dtype}", "kernels=rlk"]))
    rollout, run = f"replay:path={sampled(dtype)}", folder / "run"
    done = compare("--rollout", rollout, "--train", spec, "--run-dir", run)
    assert_equal(done, {"decode_vs_prefill", "prefill_vs_train", "decode_vs_train"})
    for role in ("rollout", "train"):
        assert set(capture_of(run, role).record.kernels.values()) == {"torch"}


@pytest.mark.parametrize(("options", "dtype"), by_dtype(SCORING))
def test_vllm_scores_the_same_in_every_batch(
    compare: Cli, folder: Path, sampled: Callable[[str], Path], options: str, dtype: str
) -> None:
    done = compare(
        *("--rollout", f"replay:path={sampled(dtype)}", "--run-dir", folder / "scored"),
        *("--train", f"vllm:dtype={dtype},kernels=rlk,{options}"),
        *("--edges", "prefill_vs_train,decode_vs_train"),
    )
    assert_equal(done, {"prefill_vs_train", "decode_vs_train"})


@pytest.mark.parametrize("train", ["hf", "fsdp:dp=2", "megatron"])
def test_without_the_kernels_there_is_drift(compare: Cli, folder: Path, train: str) -> None:
    """The control group: the same command."""
    require_engine("vllm")
    require_engine(train.partition(":")[0])
    done = compare("--rollout", "vllm", "--train", train, "--run-dir", folder / "off")
    assert done.code == 1
    assert done.verdict is not None
    edges = done.verdict["edges"]
    assert edges["decode_vs_train"]["bit_mismatches"] > 1000
    assert edges["decode_vs_train"]["max_abs_dlogp"] > 1e-3
    assert done.first is not None


@pytest.mark.parametrize(
    ("engine", "op"),
    [(e, op) for e in TOGETHER for op in OPERATORS if op not in TOGETHER[e]],
)
def test_the_operator_that_is_left_is_named(
    compare: Cli, folder: Path, sampled: Callable[[str], Path], engine: str, op: str
) -> None:
    require_engine(engine)
    done = compare(
        *("--rollout", f"replay:path={sampled('bfloat16')}", "--run-dir", folder / "left"),
        *("--train", f"{engine}:kernels=rlk,except={op}", "--edges", "prefill_vs_train"),
        # Values are not needed to name it.
        *("--sites", "logprob"),
    )
    if op in ALIKE[engine]:
        assert done.code == 0, done.out
        assert done.first is None
    else:
        assert done.code == 1
        assert done.first is not None, "nothing differs"
        assert done.first.rpartition(".")[2] == op
    own = [s for s, kind in capture_of(folder / "left", "train").record.kernels.items()
           if kind == "own"]  # fmt: skip
    assert op in {s.rpartition(".")[2] for s in own}
