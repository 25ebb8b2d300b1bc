"""The functions on real engines, and the example of docs/python.md, run."""

import os
import re
from pathlib import Path

import captures
import pytest
import warm
from command import said_by

BLOCKS = re.findall(
    r"```python\n(.*?)```",
    (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8"),
    re.DOTALL,
)
TEST = "import sys, pytest; sys.exit(pytest.main(['-p', 'no:cacheprovider', '--basetemp=tests']))"


def run(code: str, cwd: Path) -> str:
    """What a Python process says that ends well; its engines start warm, and it takes captures that
    other tests have made."""
    shared = str(Path(os.environ[warm.FOLDER]) / "captures")
    return said_by("command", ["-c", code], {captures.FOLDER: shared}, cwd, timeout=400)


@pytest.mark.whole_matrix
def test_the_pages_example_is_a_test_of_ten_lines_that_passes(
    few_prompts: Path, tmp_path: Path
) -> None:
    example, figures = BLOCKS
    assert len([line for line in example.splitlines() if line]) <= 10
    (tmp_path / "test_mine.py").write_text(example)
    assert "1 passed" in run(TEST, tmp_path)
    pytest.importorskip("pandas")
    *first, last = figures.splitlines()
    shown = "\n".join(["import pandas, rlk_align", *first, f"print({last})"])
    said = run(shown, tmp_path)
    # eager and sdpa part at the attention core.
    assert "\nattn " in said
    less = f"prompts={str(few_prompts)!r}, max_new_tokens=6"
    stricter = example.replace("run_dir=run", f"contract='bitwise', {less}, run_dir=run")
    (tmp_path / "test_mine.py").write_text(stricter)
    with pytest.raises(AssertionError, match="1 failed"):
        run(TEST, tmp_path)


CAPTURES = """
import rlk_align
a = rlk_align.capture("hf", "a", prompts="few.jsonl", max_new_tokens=6)
b = rlk_align.capture("hf", out="b", tokens=a)
verdict = rlk_align.compare(a, b, edges="prefill_vs_train", contract="bitwise")
assert verdict.status == "pass", verdict
replayed = rlk_align.compare(
    rollout=f"replay:path={a}", train="hf", edges="prefill_vs_train", contract="bitwise"
)
assert replayed.status == "pass", replayed
# At most 12 tokens, and 32 are needed: they are measured all the same.
few = rlk_align.compare(rollout="hf", train="hf", prompts="few.jsonl", max_new_tokens=2)
assert few.status == "inconclusive", few
assert "sampled tokens, " in few.doubts[0], few.doubts
assert few.comparison.edges
print("done", a, rlk_align.load_run("@last", "bitwise").verdict.status)
"""


def test_captures_are_made_and_compared(few_prompts: Path, tmp_path: Path) -> None:
    assert few_prompts.parent == tmp_path
    assert run(CAPTURES, tmp_path).split()[:2] == ["done", "a"]
