"""Every engine on models that differ in what a config.json can say: the rows of
`reports/families.md`, and that the table names tests that there are.

A model has several of them, because a start of vLLM takes longer than all that it then computes.
"""

import ast
import importlib.util
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from command import Cli, capture_of, require_engine, values
from random_model import write_random_model

from rlk_align.model.prompts import TokenBatch

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS.parent / "reports" / "families.md"
SCALED = {"rope_theta": 10000.0, "factor": 4.0}
WINDOW = 8
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "dtype": "float32",
        "rope_parameters": SCALED | {"rope_type": "yarn", "original_max_position_embeddings": 64},
        "attention_bias": True,
        "mlp_bias": True,
        # hidden / heads is 24.
        "hidden_size": 96,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "vocab_size": 1031,
    },
    "mistral": {
        "model_type": "mistral",
        "dtype": "float32",
        "rope_parameters": SCALED | {"rope_type": "linear"},
        "sliding_window": WINDOW,
    },
    "qwen2": {
        "model_type": "qwen2",
        "dtype": "float16",
        "rope_parameters": SCALED
        | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 2.0}
        | {"original_max_position_embeddings": 64},
    },
    # What vLLM refuses on a CPU.
    "qwen3": {
        "model_type": "qwen3",
        "dtype": "float32",
        "head_dim": 24,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
ROLLOUT = {"qwen3": "hf:attn=eager"}
TRAIN = {"hf": "hf:attn=eager", "fsdp": "fsdp:dp=2,attn=eager", "megatron": "megatron:tp=2"}
SHORT = ("--max-new-tokens", 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a random model, once for all tests."""
    folder = tmp_path_factory.mktemp("families")

    def make(name: str, **settings: Any) -> Path:
        if not (folder / name).exists():
            write_random_model(folder / name, **settings)
        return folder / name

    return make


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "train", ["hf", pytest.param("fsdp", marks=pytest.mark.whole_matrix), "megatron"]
)
def test_engines_agree(
    cli: Cli,
    few_prompts: Path,
    tmp_path: Path,
    model: Callable[..., Path],
    name: str,
    train: str,
) -> None:
    rollout = ROLLOUT.get(name, "vllm")
    for engine in (rollout.partition(":")[0], train):
        require_engine(engine)
    run = tmp_path / "run"
    done = cli(
        *("compare", "--model", model(name, **MODELS[name]), "--prompts", few_prompts, *SHORT),
        *("--rollout", rollout, "--train", TRAIN[train], "--run-dir", run),
    )
    verdict = done.verdict
    assert verdict is not None, done.err
    assert verdict["precheck"]["mismatches"] == []
    assert verdict["dtype"] == MODELS[name]["dtype"]
    assert verdict["controls"]["noise_floor"] == {"rollout": "bitwise", "train": "bitwise"}
    assert verdict["coverage"]["paired"] == verdict["coverage"]["expected"] > 0
    assert verdict["coverage"]["unpaired"] == []
    assert done.code == 0, done.out
    batch = TokenBatch.load(capture_of(run, "rollout").folder / "tokens.parquet")
    assert min(len(s.ids) for s in batch.samples) > WINDOW


@pytest.mark.parametrize("train", ["hf", "fsdp"])
def test_vllm_leaves_out_a_bias_of_qwen3(
    cli: Cli, few_prompts: Path, tmp_path: Path, model: Callable[..., Path], train: str
) -> None:
    """And it turns a dynamic rope as HF does, up to the longest sequence that there may be."""
    require_engine("vllm")
    settings = {
        "model_type": "qwen3",
        "dtype": "float32",
        "attention_bias": True,
        "rope_parameters": SCALED | {"rope_type": "dynamic"},
    }
    run = tmp_path / "run"
    done = cli(
        *("compare", "--model", model("dynamic", **settings), "--prompts", few_prompts, *SHORT),
        *("--rollout", "vllm", "--train", TRAIN[train], "--run-dir", run),
        *("--allow-mismatch", "weights"),
    )
    assert done.verdict is not None, done.err
    lost = ["layers.0.o_proj.bias", "layers.1.o_proj.bias"]
    assert [m["name"] for m in done.verdict["precheck"]["mismatches"]] == lost
    assert done.code == 1, done.out

    def difference(site: str) -> float:
        a, b = (values(run, side, site).double() for side in ("rollout", "train"))
        return ((a - b).norm() / b.norm()).item()

    assert max(difference(f"layers.0.{op}") for op in ("q_rope", "k_rope", "attn")) <= 2e-6
    assert difference("layers.0.o_proj") > 0.1


def known_tests() -> dict[str, list[Path]]:
    """Name of a test -> the files that have it."""
    found: dict[str, list[Path]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(path)
    return found


def cases(path: Path, function: str) -> set[str]:
    """The ids that pytest gives a test whose parameters are texts."""
    spec = importlib.util.spec_from_file_location(f"table_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    marks = [m for m in getattr(module, function).pytestmark if m.name == "parametrize"]
    # The lowest decorator is the first mark, and pytest names its parameter first.
    # A case with a mark is a ParameterSet.
    values = ([getattr(case, "values", [case])[0] for case in m.args[1]] for m in marks)
    return {"-".join(ids) for ids in product(*values)}


def wrong_cells(text: str) -> list[str]:
    """The cells of a table that name no test, or one that does not do what the cell says."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line[:1] == "|"]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert head == ["", "hf", "fsdp", "vllm (CPU)", "megatron"]
    known, wrong = known_tests(), []
    for name, *row in rows:
        assert len(row) == 4, name
        for cell in row:
            match = re.fullmatch(r"(refused: )?`(test_\w+)\[(.+)\]`", cell)
            files = known.get(match[2], []) if match else []
            refusal = [f.name == "test_early.py" for f in files]
            if not match or refusal != [bool(match[1])] or match[3] not in cases(*files, match[2]):
                wrong.append(f"{name}: {cell}")
    return wrong


def test_every_cell_of_the_table_names_a_test() -> None:
    assert wrong_cells(TABLE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("given", "planted"),
    [
        ("test_engines_agree[hf-mistral]", "test_engines_agree[hf-mistal]"),
        ("test_engines_agree[hf-mistral]", "test_engines_agree[mistral-hf]"),
        ("test_engines_agree[hf-mistral]", "test_engines_do_agree[hf-mistral]"),
        ("refused: ", ""),
        ("`test_engines_agree[hf-mistral]`", "yes"),
    ],
)
def test_a_cell_that_names_none_is_found(given: str, planted: str) -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert given in text
    assert wrong_cells(text.replace(given, planted, 1))
