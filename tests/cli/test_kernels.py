"""`kernels=rlk` in the real engines, through the command line: what it excludes, refuses and shows.
That no bit differs with it: tests/fix_path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Cli, Outcome, capture_of, command_line, require_engine, write_few_prompts
from family_models import family_model
from pair_models import MODELS

from rlk_align.api.pair import Pair
from rlk_align.cli.compare import _prepared_beside

PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of this module's runs lie: what one captured, the next takes."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def compare(folder: Path) -> Cli:
    prompts = write_few_prompts(folder / "few.jsonl")
    inner = command_line(folder)

    def run(*args: object, **more: object) -> Outcome:
        few = ("--prompts", prompts, "--max-new-tokens", 6, "--run-dir", folder / "run")
        return inner("compare", *few, *args, "--contract", "bitwise", **more)

    return run


def kinds(folder: Path, role: str) -> dict[str, str]:
    return capture_of(folder / "run", role).record.kernels


@pytest.mark.parametrize(
    ("train", "excluded", "first"),
    [
        ("hf", "up_proj", "layers.0.up_proj"),
        ("megatron", "act", "layers.0.act"),
        pytest.param("fsdp", "logits", "logits", marks=pytest.mark.whole_matrix),
        ("hf", "logprob", "logprob"),
    ],
)
def test_an_excluded_operator_is_named(
    compare: Cli, folder: Path, train: str, excluded: str, first: str
) -> None:
    require_engine("vllm")
    require_engine(train)
    spec = f"{train}:kernels=rlk,except={excluded}"
    done = compare("--rollout", "vllm:kernels=rlk", "--train", spec)
    assert done.code == 1
    assert done.first == first, done.out
    stock = {site for site, kind in kinds(folder, "train").items() if kind == "own"}
    assert {site.rpartition(".")[2] for site in stock} == {excluded}


def test_vllms_own_attention_is_named_in_it(compare: Cli) -> None:
    require_engine("vllm")
    done = compare(
        *("--rollout", "vllm:kernels=rlk,except=attn", "--train", "hf:kernels=rlk"),
        *("--edges", "prefill_vs_train"),
    )
    assert done.first == "layers.0.attn", done.out


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("compute_down_proj_elsewhere", "the kernels are in place for layers.1.down_proj and were"),
        ("give_down_proj_back", "layers.1.down_proj is still computed by the engine"),
    ],
)
def test_what_does_not_run_is_an_error_and_no_mixture(compare: Cli, patch: str, says: str) -> None:
    specs = ("--rollout", f"hf:kernels=rlk,patch=patches:{patch}", "--train", "hf:kernels=rlk")
    done = compare(*specs, env=PATCHES)
    assert done.code == 3, done.out
    assert says in done.err
    assert done.verdict is None


ROPE = {"rope_theta": 1e4, "factor": 4.0}
LISTS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
WITHOUT: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dynamic": (
        "hf",
        {"rope_parameters": ROPE | {"rope_type": "dynamic"}},
        ("rope_type=dynamic", "its frequencies follow the longest sequence of a batch"),
    ),
    "longrope": (
        "vllm",
        {"rope_parameters": ROPE | LISTS | {"rope_type": "longrope"}},
        ("rope_type=longrope", "its scale follow the longest sequence of a batch"),
    ),
    "partial": (
        "vllm",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ("partial_rotary_factor=0.5", "whole heads"),
    ),
    "no factor": (
        "hf",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
        ("rope_type=yarn without a factor",),
    ),
    "act": ("megatron", {"hidden_act": "gelu"}, ("hidden_act=gelu",)),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_what_has_no_kernel_is_refused_before_anything_starts(
    compare: Cli, model_copy, case: str
) -> None:
    engine, config, says = WITHOUT[case]
    require_engine(engine)
    model, spec = model_copy(config=config), f"{engine}:kernels=rlk"
    sides = ("vllm", "hf") if engine == "vllm" else ("hf", engine)
    specs = [spec if name == engine else name for name in sides]
    done = compare("--model", model, "--rollout", specs[0], "--train", specs[1])
    assert done.code == 2, done.out + done.err
    said = " ".join(done.err.split())
    assert f"engine '{engine}': kernels=rlk does not support {says[0]}" in said
    assert all(words in said for words in says)


def test_captures_with_kernels_lie_beside_those_without(compare: Cli, folder: Path) -> None:
    for kernels in ("rlk", "off", "rlk"):
        sides = ("--rollout", f"hf:kernels={kernels}", "--train", f"hf:kernels={kernels}")
        done = compare(*sides, "--edges", "prefill_vs_train")
        assert done.code in (0, 1), done.err
        assert bool(kinds(folder, "train")) == (kernels == "rlk")
        asked = done.verdict["engines"]["train"]["options"]
        assert asked == ({"kernels": "rlk"} if kernels == "rlk" else {})
    assert "capture already exists" in done.err
    again = ("--rollout", f"replay:path={folder / 'run'}", "--train", "hf")
    done = compare(*again, "--kernels", "off", "--run-dir", folder / "mixed")
    assert done.code == 2
    assert "was captured with kernels=rlk" in " ".join(done.err.split())


def test_an_operator_that_the_model_has_not_cannot_be_left(compare: Cli, model_copy) -> None:
    model = model_copy(config={"model_type": "llama"})
    spec = "hf:kernels=rlk,except=attn+q_norm"
    done = compare("--model", model, "--rollout", spec, "--train", "hf:kernels=rlk")
    assert done.code == 2, done.out + done.err
    assert "this model has no q_norm" in done.err


def test_drift_is_shown_without_and_with_the_kernels(compare: Cli, folder: Path) -> None:
    page = folder / "both.html"
    specs = ("--rollout", "hf:attn=sdpa", "--train", "hf:attn=eager")
    done = compare(*specs, "--kernels", "rlk")
    assert done.code == 2, "attn is the engines' own"
    require_engine("megatron")
    done = compare("--rollout", "hf", "--train", "megatron", "--kernels", "rlk",
                   "--output", f"html={page}")  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert done.verdict["engines"]["train"]["options"] == {"kernels": "rlk"}
    shown = [line.split() for line in done.out.splitlines() if line.strip()]
    # The verdict is the one with the kernels; below it, one line each, and the drift.
    assert shown[0][0] == "PASS"
    [off, on] = [line for line in shown if line[:1] == ["kernels"]]
    assert (off[1:3], on[1:3]) == (["off", "FAIL"], ["rlk", "PASS"])
    assert [line[0] for line in shown].count("FAIL") == 0
    # The rollout may be a capture that another test has made.
    assert "kernels off: train: " in done.err
    after = [line for line in shown[shown.index(on) :] if line[1:2] == ["off"] or line[0] == "rlk"]
    assert len(after) == 6
    assert [line[-1] for line in after if line[0] == "rlk"] == ["0"] * 3
    assert int(next(line for line in after if line[0] == "prefill_vs_train")[-1]) > 0
    text = page.read_text(encoding="utf-8")
    assert "kernels-off" in text
    assert "hf:kernels=rlk" in text
    plain = capture_of(folder / "run" / "kernels-off", "train")
    assert plain.record.kernels == {}


def test_what_an_engine_computes_with_the_kernels_only_is_not_compared_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    require_engine("vllm")
    sides = Pair(rollout="vllm", train="hf", run_dir=tmp_path / "run")
    refused = replace(sides, model=str(family_model(tmp_path, "minimax_m2")))
    assert _prepared_beside(refused, []) is None
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing is compared without the kernels: vllm does not support model_type" in said
    capped = replace(sides, model=str(family_model(tmp_path, "gemma2")))
    assert _prepared_beside(capped, []) is None
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing is compared without the kernels: attn=sdpa ignores attn_logit_soft" in said
    assert _prepared_beside(sides, []) is not None
    assert "nothing is compared" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "excluded", "refused"),
    [
        ("sparse", "moe_out+attn", "moe_out"),
        ("corrected", "shared_act", "shared_act"),
        ("qwen3_5", "delta+out_proj+act", "delta, out_proj"),
    ],
)
def test_no_operator_of_a_sparse_layer_or_a_delta_net_is_left_to_the_engine(
    compare: Cli, folder: Path, name: str, excluded: str, refused: str
) -> None:
    model = MODELS[name].stored(folder, name, "bfloat16")
    spec = f"hf:kernels=rlk,except={excluded}"
    done = compare("--model", model, "--rollout", spec, "--train", "hf")
    assert done.code == 2
    assert f"{refused} cannot be excluded" in done.err
