"""The tree of folders in ARCHITECTURE.md is the tree on disk."""

import re
import subprocess
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]


def described(text: str) -> set[str]:
    """Folders of the fenced block whose lines are `name/`, two spaces a level."""
    block = next(b for b in text.split("```")[1::2] if re.search(r"^  \S+/ ", b, re.MULTILINE))
    found, above = set(), []
    for line in block.strip("\n").splitlines():
        match = re.match(r"((?:  )*)([\w.-]+)/(?: |$)", line)
        assert match, line
        above = [*above[: len(match[1]) // 2], match[2]]
        found.add("/".join(above))
    return found


def on_disk() -> set[str]:
    """Folders that hold a file which git knows, but hidden ones and those below `tests`."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    folders = {p for name in done.stdout.split() for p in PurePosixPath(name).parents}
    names = {p.as_posix() for p in folders if (ROOT / p).is_dir()}
    return {n for n in names if not n.startswith((".", "tests/"))}


def test_the_tree_is_the_one_on_disk() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert described(text) == on_disk()


def test_a_missing_and_an_invented_folder_are_seen() -> None:
    text = "```\na/   one\n  b/\nc/  two\n  d/  x\n```"
    assert described(text) == {"a", "a/b", "c", "c/d"}


def test_the_tests_mirror_the_packages() -> None:
    tests = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name[0] not in "._"}
    package = {p.name for p in (ROOT / "rlk_align").iterdir() if (p / "__init__.py").is_file()}
    assert package - {"__pycache__"} <= tests
    others = "architecture browser compiled fix_path fixtures fuzz gpu kernels mutation"
    others += " outside_engine real_runs support"
    assert tests <= package | {*others.split()}
