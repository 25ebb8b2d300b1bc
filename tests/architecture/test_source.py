"""What the source may not contain, and what every part of it must have."""

import ast
import re
from pathlib import Path

from source_imports import parsed

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "rlk_align").rglob("*.py"))
TREES = {path: parsed(path) for path in FILES}


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def test_folders_that_are_no_packages() -> None:
    """A top-level kernels/__init__.py would hide the package that transformers imports."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
    for folder in ("kernels", "contracts", "fixtures", "reports"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_the_packages_are_packages() -> None:
    assert (ROOT / "rlk_align" / "__init__.py").is_file()
    assert (ROOT / "kernels" / "rlk_kernels" / "__init__.py").is_file()
    for path in FILES:
        assert (path.parent / "__init__.py").is_file(), path


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_executes_text_or_unpickles() -> None:
    wrong = []
    for path, tree in TREES.items():
        for call in calls(tree):
            name = ast.unparse(call.func)
            if name in ("eval", "exec", "compile", "__import__", "os.system"):
                wrong.append(f"{where(path, call)}: {name}")
            for keyword in call.keywords:
                value = getattr(keyword.value, "value", None)
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and value:
                    wrong.append(f"{where(path, call)}: {keyword.arg}")
            tensors_only = any(ast.unparse(k) == "weights_only=True" for k in call.keywords)
            if name == "torch.load" and not tensors_only:
                wrong.append(f"{where(path, call)}: {name}")
        for node in ast.walk(tree):
            names = [a.name for a in getattr(node, "names", ()) if isinstance(a, ast.alias)]
            if names == ["UnpicklingError"]:
                continue  # an error to catch loads nothing
            names.append(getattr(node, "module", None) or "")
            if {n.split(".")[0] for n in names} & {"pickle", "cloudpickle", "dill", "marshal"}:
                wrong.append(f"{where(path, node)}: {names}")
    assert not wrong


def numeric(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def test_tolerances_live_in_contracts() -> None:
    """No number for atol or rtol, be it passed, assigned, a default or in a dict."""
    wrong = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            pairs: list[tuple[str | None, ast.AST | None]] = []
            if isinstance(node, ast.keyword):
                pairs = [(node.arg, node.value)]
            elif isinstance(node, ast.Assign):
                pairs = [(ast.unparse(t), node.value) for t in node.targets]
            elif isinstance(node, ast.AnnAssign):
                pairs = [(ast.unparse(node.target), node.value)]
            elif isinstance(node, ast.arguments):
                positional = [*node.posonlyargs, *node.args]
                defaults = [None] * (len(positional) - len(node.defaults)) + list(node.defaults)
                pairs = [(a.arg, d) for a, d in zip(positional, defaults, strict=True)]
                pairs += [
                    (a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)
                ]
            elif isinstance(node, ast.Dict):
                pairs = [
                    (getattr(k, "value", None), v)
                    for k, v in zip(node.keys, node.values, strict=True)
                ]
            for name, value in pairs:
                word = str(name).rpartition(".")[2].lower()
                if word in ("atol", "rtol", "tol", "tolerance") and value and numeric(value):
                    wrong.append(f"{where(path, node)}: {name}")
        for call in calls(tree):
            if re.search(r"\b(allclose|isclose|assert_close)$", ast.unparse(call.func)):
                wrong.append(f"{where(path, call)}: {ast.unparse(call.func)}")
    assert not wrong


RIDES_ALONG = ("record/rollout/server.py", "record/rollout/live_pass.py")
"""Modules that run inside a user's server, which goes on serving: any error ends the recording of a
step, whose folder then has the reason."""


def test_no_handler_catches_everything_in_silence() -> None:
    """`except Exception` must raise again, or leave the process with a report."""
    wrong = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            name = ast.unparse(node.type) if node.type else ""
            if name in ("", "Exception", "BaseException"):
                ends = any(isinstance(n, ast.Raise) for n in ast.walk(node)) or any(
                    ast.unparse(c.func) == "sys.exit" for c in calls(node)
                )
                if not ends and not path.as_posix().endswith(RIDES_ALONG):
                    wrong.append(where(path, node))
    assert not wrong


def test_every_public_name_has_a_docstring() -> None:
    wrong = []
    for path, tree in TREES.items():
        if not ast.get_docstring(tree):
            wrong.append(f"{path.relative_to(ROOT)}")
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any(ast.unparse(d) == "overload" for d in node.decorator_list):
                continue  # the function itself says it
            if not node.name.startswith("_") and not ast.get_docstring(node):
                wrong.append(f"{where(path, node)}: {node.name}")
    assert not wrong


def test_errors_are_a_tree_with_codes() -> None:
    from rlk_align import errors

    kinds = [
        e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.RlkError)
    ]
    assert {e.exit_code for e in kinds} == {2, 3, 130}
    leaves = {e.__name__ for e in kinds if not e.__subclasses__()}
    # A worker hands its error over by name.
    assert leaves <= errors.ERRORS.keys()
    listing = errors.__doc__ or ""
    assert all(e.__name__ in listing for e in kinds)
