"""Every import of our own names resolves, also one inside a function that only the whole matrix, a
GPU or a user runs; read from the source, so that no engine is needed."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import source_imports

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rlk_align", "kernels", "tests", "scripts", "examples")
PACKAGES = ("rlk_align", "rlk_kernels")
SHARED = tuple(
    ROOT / name for name in ("", "kernels", "tests/support", "scripts", "tests/outside_engine")
)
"""What stands in the path of every file; a script's own folder does too."""
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "kernels/README.md"])
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@functools.cache
def found_in(folder: Path, module: str) -> Path | None:
    """The file of a module, or the folder of a package without `__init__.py`."""
    path = folder.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py", path)
    return next((file for file in files if file.exists()), None)


parsed = functools.cache(source_imports.parsed)


@functools.cache
def defined(path: Path) -> frozenset[str]:
    """The names at a module's top level, those below its `if`, `try` and `with` included, and those
    of a literal dict that its `__getattr__` looks into."""
    names = {"__doc__", "__file__", "__name__"}
    tree = parsed(path)
    lazy = any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body)
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif lazy and isinstance(node, ast.Dict):
            names |= {str(k.value) for k in node.keys if isinstance(k, ast.Constant)}
        todo += ast.iter_child_nodes(node)
    return frozenset(names)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements below `tree`, without their expressions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from statements(node)


def unresolved(tree: ast.AST, folder: Path) -> Iterator[str]:
    """What of ours `tree` imports and does not exist, for a file in `folder`."""
    own = () if (folder / "__init__.py").exists() else (folder,)
    for node in statements(tree):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            wanted = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            first = module.partition(".")[0]
            bases = [base for base in (*own, *SHARED) if found_in(base, first)]
            if not bases and first not in PACKAGES:
                continue  # an installed package
            if not any(resolves(base, module, name) for base in bases):
                yield f"{node.lineno}: {module}{name and f'.{name}'}"


def resolves(base: Path, module: str, name: str) -> bool:
    path = found_in(base, module)
    if path is None or not name:
        return path is not None
    return found_in(base, f"{module}.{name}") is not None or (
        path.is_file() and name in defined(path)
    )


def test_every_import_of_ours_resolves() -> None:
    assert len(FILES) > 500
    wrong = [
        f"{path.relative_to(ROOT)}:{found}"
        for path in FILES
        for found in unresolved(parsed(path), path.parent)
    ]
    assert not wrong


def test_every_import_in_the_docs_resolves() -> None:
    blocks = [(page, code) for page in PAGES for code in BLOCK.findall(page.read_text("utf-8"))]
    assert len(blocks) > 10
    wrong = [
        f"{page.relative_to(ROOT)}, python block, line {found}"
        for page, code in blocks
        for found in unresolved(ast.parse(code), ROOT)
    ]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        # The import that only the whole matrix ran.
        "def f():\n    from rlk_align.engines.megatron.weights import all_gather",
        "from rlk_align import LoadedRuns",
        "from rlk_kernels.integrations.megatron import use_kernel",
        "from rlk_kernels.parallel import gradient",
        "import rlk_kernels.parallel.gradient",
        "from gloo_ranks import on_rank",
        "from rlk_aligned import compare\nfrom rlk_align.nowhere import compare",
    ],
)
def test_a_wrong_name_is_noticed(code: str) -> None:
    assert len(list(unresolved(ast.parse(code), ROOT / "tests"))) == 1


def test_names_that_exist_are_found() -> None:
    code = """
import rlk_align.engines.megatron.grid, torch, no_such_package
from rlk_align import LoadedRun, compare
from rlk_align.engines.process.ranks import all_gather
from rlk_kernels.parallel import gradients
from gloo_ranks import on_ranks
"""
    assert list(unresolved(ast.parse(code), ROOT / "tests")) == []
