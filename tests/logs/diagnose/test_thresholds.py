"""The numbers that decide a diagnosis are in the contract for runs, and not in the code."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlk_align.logs
from rlk_align.logs.diagnose.contract import built_in_thresholds

LOGS = Path(rlk_align.logs.__file__).parent
FILES = sorted((LOGS / "diagnose").glob("*.py"))
PLAIN = (0, 1, 2, -1)
TRANSPARENT = ("abs", "exp", "float", "int", "log", "max", "maximum", "min", "minimum")
"""Functions whose value is a number of its arguments."""
STATISTICS = {
    "part > 2 / 3",
    "part < 1 / 3",
    "e.q >= 0.0001",
    "e.q < 0.05",
    "e.q >= 0.1",
    "e.q < 0.9",
    "len(picked) == SHOWN",
    "(estimate.value + estimate.low) / 2 > limit",
    "2 * count > counts.compared",
    "sum((p.tokens for p in parts)) > 2 * most",
}
"""Comparisons that are part of what a statistic is, and are stated in its words, or that choose
what is shown: a cause beside a diagnosis that holds, a suspicion beside one that does not, how much
is kept in memory. None of them says when a diagnosis holds."""


def decided_in_code(source: str, constants: dict[str, object]) -> list[str]:
    """The comparisons of a module with a number that is not in PLAIN: in the comparison, in a
    constant of the module, or in a local variable that the number is multiplied into. A 2 that
    multiplies or divides counts, too."""
    tree = ast.parse(source)
    named = {name for name, value in constants.items() if name.isupper() and _is_number(value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _has_number(node.value, named, deep=False):
            named |= {x.id for x in node.targets if isinstance(x, ast.Name)}
    found = []
    for node in ast.walk(tree):
        for operand in _compared(node):
            if _has_number(operand, named):
                found.append(ast.unparse(node))
    return list(dict.fromkeys(found))


def _compared(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        yield node.left
        yield from node.comparators
    elif isinstance(node, ast.Call) and _called(node) == "above":
        yield from node.args


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)


def _has_number(node: ast.AST, named: set[str], deep: bool = True) -> bool:
    """Whether a value has such a number in it; inside of calls and subscripts too where `deep`."""
    if isinstance(node, ast.Constant):
        return _is_number(node.value)
    if isinstance(node, ast.Name):
        return node.id in named
    if isinstance(node, ast.Subscript):
        return deep and _has_number(node.value, named)
    if isinstance(node, ast.Call):
        inside = [node.func, *(node.args if _called(node) in TRANSPARENT else ())]
        return deep and any(_has_number(x, named) for x in inside)
    if not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Attribute):
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        twos = (isinstance(x, ast.Constant) and x.value == 2 for x in (node.left, node.right))
        return any(twos) or any(_has_number(x, named, deep) for x in (node.left, node.right))
    return any(_has_number(x, named, deep) for x in ast.iter_child_nodes(node))


def _is_number(value: object) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(x, int | float) and x not in PLAIN for x in values)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_comparison_has_a_number_of_its_own(path: Path) -> None:
    package = "rlk_align.logs.diagnose"
    module = package if path.stem == "__init__" else f"{package}.{path.stem}"
    constants = vars(importlib.import_module(module))
    source = path.read_text(encoding="utf-8")
    assert set(decided_in_code(source, constants)) <= STATISTICS


@pytest.mark.parametrize(
    ("line", "planted"),
    [
        ("far = e.size > 2.5", True),
        ("far = e.size > 3 * median", True),
        ("far = e.size > FAR * median", True),
        ("bound = 0.6 * total\nfar = e.size > bound", True),
        ("far = e.size < max(3, count)", True),
        ("found = share(1, 2).above(0.02)", True),
        ("far = -0.05 > e.d", True),
        ("far = e.size > np.abs(e.d) / 2", True),
        ("far = 2 * e.size > median", True),
        ("far = e.size[:, 5] > median + 2", False),
        ('far = e.size > threshold("routing.factor") * median', False),
    ],
)
def test_a_planted_number_is_found(line: str, planted: bool) -> None:
    assert bool(decided_in_code(line, {"FAR": 6.0})) == planted


def test_the_code_and_the_contract_have_the_same_thresholds() -> None:
    known = built_in_thresholds()
    subjects = "|".join({name.partition(".")[0] for name in known})
    used = set()
    for path in LOGS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= set(re.findall(rf"^(?:{subjects})\.[a-z0-9-]+$", node.value))
    assert used == known.keys()
