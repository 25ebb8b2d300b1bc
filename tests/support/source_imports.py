"""What the modules of a package import, read from their sources."""

import ast
from pathlib import Path
from typing import TypeGuard


def modules(package: Path) -> dict[str, Path]:
    """Dotted name of each module of a package -> its file."""
    named = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST, known: set[str]) -> set[str]:
    """Modules imported anywhere below `tree`, inside functions and for the type checker alone too;
    `known`: the names that are modules of the package."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
        elif is_lazy(node):
            found.add(ast.literal_eval(node.args[0]))
    return found


def is_lazy(node: ast.AST | None) -> TypeGuard[ast.Call]:
    """Whether the node imports a module at its first use."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_module"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of an import circle, or []."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for other in sorted(graph.get(name, ())):
                if found := visit(other, (*above, name)):
                    return found
            done.add(name)
        return []

    return next(filter(None, (visit(name, ()) for name in graph)), [])
