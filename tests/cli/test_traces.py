"""Captures made apart, compared and judged without an engine; and captures that were damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Cli, command_line, write_few_prompts
from safetensors.torch import load_file, save_file

ARGS = ("--max-new-tokens", 6)
EDGE = ("--edges", "prefill_vs_train")
NO_ENGINES = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "vllm"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sampled capture `a`, and another engine's scores of its tokens, `b`."""
    folder = tmp_path_factory.mktemp("captured")
    cli = command_line(folder)
    prompts = write_few_prompts(folder / "few.jsonl")
    args = ("--engine", "hf:attn=eager", "-o", folder / "a", "--prompts", prompts, *ARGS)
    assert cli("capture", *args).code == 0
    done = cli("capture", "--engine", "hf:attn=sdpa", "-o", folder / "b", "--tokens", folder / "a")
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def pair(captured: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of both, to be compared or damaged."""
    a, b = (shutil.copytree(captured / name, tmp_path / name) for name in "ab")
    return a, b


def traces(run: Path) -> Path:
    return next((run / "captures").iterdir())


def test_compare_and_gate_without_any_engine(cli: Cli, pair, tmp_path: Path) -> None:
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(NO_ENGINES)
    env = {"PYTHONPATH": str(hide)}
    run = tmp_path / "compared"
    done = cli("compare", *pair, "--run-dir", run, env=env, real=True)
    assert done.code == 0, done.out + done.err
    assert done.first == "layers.0.attn"
    gated = cli("gate", run, env=env, real=True)
    assert gated.verdict == done.verdict
    assert cli("gate", "@last", env=env, real=True).code == 0
    strict = cli("gate", run, "--contract", "bitwise", env=env, real=True)
    assert strict.code == 1
    assert strict.verdict["contract"]["id"] == "bitwise"


def test_gate_derives_a_comparison_again(cli: Cli, pair, tmp_path: Path) -> None:
    run = tmp_path / "compared"
    done = cli("compare", *pair, "--run-dir", run)
    again = cli("gate", run, "--recompute")
    assert again.code == 0
    assert again.verdict == done.verdict
    forged = json.loads((run / "comparison.json").read_text())
    forged["edges"][0]["metrics"]["max_abs_dlogp"] *= 2
    (run / "comparison.json").write_text(json.dumps(forged))
    refused = cli("gate", run)
    assert refused.code == 3
    assert "comparison.json" in refused.err
    assert cli("gate", run, "--recompute").verdict == done.verdict
    flip_a_bit(traces(pair[1]) / "prefill/rows.parquet")
    assert cli("gate", run, "--recompute").code == 3


def test_a_capture_takes_an_earlier_comparison_away(cli: Cli, pair, tmp_path: Path) -> None:
    run = tmp_path / "compared"
    assert cli("compare", *pair, "--run-dir", run).code == 0
    args = ("--engine", "hf:attn=sdpa", "-o", run, "--tokens", pair[0])
    assert cli("capture", *args).code == 0
    done = cli("gate", run)
    assert done.code == 2
    assert "single capture" in done.err


def test_a_capture_against_itself_says_so(cli: Cli, pair, tmp_path: Path) -> None:
    copied = shutil.copytree(pair[0], tmp_path / "copy")
    for other in (pair[0], copied):
        done = cli("compare", pair[0], other)
        assert done.code == 0, done.out + done.err
        assert "both sides are the same capture" in done.out
    assert "one and the same" not in cli("compare", *pair, *EDGE).out


def test_gate_refuses_what_it_cannot_judge(cli: Cli, pair, tmp_path: Path) -> None:
    single = cli("gate", pair[0])
    assert single.code == 2
    assert "single capture" in single.err
    nothing = cli("gate", tmp_path / "nowhere")
    assert nothing.code == 2
    assert cli("gate", "@last", cwd=tmp_path / "a").code == 2


def test_two_samplings_differ_by_their_tokens(cli: Cli, pair, few_prompts: Path, tmp_path) -> None:
    other = tmp_path / "other"
    cli("capture", "--engine", "hf", "-o", other, "--prompts", few_prompts, *ARGS, "--seed", 7)
    done = cli("compare", pair[0], other)
    assert done.code == 4
    assert done.verdict["precheck"]["tokens"] == "mismatch"
    allowed = cli("compare", pair[0], other, "--allow-mismatch", "tokens", *EDGE)
    assert allowed.verdict["divergence"]["first_bitwise"]["site"] != "embed"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def change_a_value(path: Path) -> None:
    tensors = load_file(path)
    tensors["layers.3.act"][0, 0] += 1
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("prefill/values-00000.safetensors", change_a_value),
        ("prefill/values-00000.safetensors", flip_a_bit),
        ("prefill/rows.parquet", flip_a_bit),
        ("prefill/pass.json", truncate),
        ("trace.json", truncate),
        ("trace.json", Path.unlink),
        ("tokens.parquet", truncate),
        ("weights.parquet", flip_a_bit),
        ("prompts.jsonl", truncate),
        ("checksums.json", truncate),
        ("checksums.json", Path.unlink),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_damaged_traces(cli: Cli, pair, name: str, damage: Callable[[Path], None]) -> None:
    damage(traces(pair[1]) / name)
    done = cli("compare", *pair, *EDGE)
    assert done.code == 3, done.out + done.err
    assert "Traceback" not in done.err
    assert name.rpartition("/")[2] in done.err


def test_values_for_a_few_sites_only(cli: Cli, pair, few_prompts: Path, tmp_path: Path) -> None:
    c = tmp_path / "c"
    args = ("--prompts", few_prompts, "-o", c, "--layers", "1-2", "--sites", "attn,o_proj")
    assert cli("capture", "--engine", "hf:attn=eager", *args, *ARGS).code == 0
    kept = load_file(traces(c) / "prefill/values-00000.safetensors")
    wanted = {f"layers.{i}.{op}" for i in (1, 2) for op in ("attn", "o_proj")}
    assert set(kept) == wanted | {"logprob"}
    done = cli("compare", c, pair[1], "--edges", "prefill_vs_train")
    assert done.code == 0, done.out + done.err
    assert done.first == "layers.0.attn", "digests are of every site"


def test_an_edge_whose_pass_was_never_captured_is_inconclusive(cli: Cli, pair) -> None:
    every = cli("compare", pair[1], pair[1])
    assert every.code == 4
    assert "no decode pass" in every.out


def test_a_pass_that_was_removed_is_noticed(cli: Cli, pair) -> None:
    shutil.rmtree(traces(pair[0]) / "decode")
    done = cli("compare", *pair, *EDGE)
    assert done.code == 3
    assert "decode/pass.json is missing" in done.err
