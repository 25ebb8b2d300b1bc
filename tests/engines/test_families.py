"""The table of `reports/families.md` names tests that exist, most of them pairs of
`tests/real_runs/test_healthy_pairs.py`; and a bias that vLLM ignores is reported."""

import ast
import importlib.util
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from command import Cli, require_engine, values
from pair_models import Model

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS.parent / "reports" / "families.md"
SCALED = {"rope_theta": 10000.0, "factor": 4.0}
TRAIN = {"hf": "hf:attn=eager", "fsdp": "fsdp:dp=2,attn=eager"}


@pytest.mark.parametrize("train", ["hf", "fsdp"])
def test_vllm_leaves_out_a_bias_of_qwen3(
    cli: Cli, few_prompts: Path, tmp_path: Path, train: str
) -> None:
    """vLLM's dynamic rope equals HF's up to the length of the context."""
    require_engine("vllm")
    rope = SCALED | {"rope_type": "dynamic"}
    biased = Model("qwen3", {"attention_bias": True, "rope_parameters": rope})
    model, run = biased.stored(tmp_path, "dynamic", "float32"), tmp_path / "run"
    done = cli(
        *("compare", "--model", model, "--prompts", few_prompts, "--max-new-tokens", 6),
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


@cache
def known_tests() -> dict[str, list[Path]]:
    """Name of a test -> the files that define it."""
    found: dict[str, list[Path]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(path)
    return found


@cache
def cases(path: Path, function: str) -> set[str]:
    """The ids in pytest of a test whose parameters are strings."""
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
    """The cells of a table that name no test, or a test of another kind than the cell says."""
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
        ("off-mistral-float32-vllm-hf]", "off-mistal-float32-vllm-hf]"),
        ("off-mistral-float32-vllm-hf]", "mistral-off-float32-vllm-hf]"),
        ("test_a_pair_is_healthy[off-mistral", "test_no_pair_is_healthy[off-mistral"),
        ("refused: ", ""),
        ("`test_a_pair_is_healthy[off-mistral-float32-vllm-hf]`", "yes"),
    ],
)
def test_a_cell_that_names_none_is_found(given: str, planted: str) -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert given in text
    assert wrong_cells(text.replace(given, planted, 1))
