"""Who imports whom in rlk_kernels, read from the source: the arrows between its folders."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from source_imports import circle, imports, is_lazy, modules, parsed

MODULES = modules(Path(__file__).resolve().parents[2] / "kernels" / "rlk_kernels")
BELOW = {
    # Folder: the folders it may import besides itself and the files beside them.
    "numerics": (),
    "matmul": ("numerics",),
    "ops": ("numerics", "matmul"),
    "losses": ("numerics", "matmul", "ops"),
    "parallel": ("numerics", "ops"),
    "integrations": ("parallel",),
}
ROOT = tuple(
    f"rlk_kernels.{name}"
    for name in (
        *("ahead", "backend", "block_fp8", "compile_request", "compile_server", "cuda"),
        *(
            "custom_op",
            "device",
            "errors",
            "launching",
            "memory",
            "nvrtc",
            "private_api",
            "sources",
        ),
    )
)
"""The files that stand in no folder; every folder may import them."""
ENGINES = {
    **{"vllm": {"vllm"}, "sglang": {"sglang"}},
    **{"megatron": {"megatron"}, "hf": {"transformers"}},
}
"""Folder of `integrations`: the engine that it alone imports."""
FRAMEWORKS = {"trl": {"trl", "transformers", "vllm"}, "verl": {"verl", "hydra"}}
"""Folder of `integrations`: the packages that a framework's switch imports. It puts other
integrations' kernels into the framework's engines."""


@cache
def trees() -> dict[str, ast.Module]:
    """Module -> its source. Only the process that runs these tests reads it."""
    return {name: parsed(path) for name, path in MODULES.items()}


@cache
def imported() -> dict[str, set[str]]:
    """Module -> what it imports."""
    return {name: imports(tree, set(MODULES)) for name, tree in trees().items()}


def at_the_top(tree: ast.Module) -> ast.Module:
    """The module without what is imported by its functions, and lazily."""
    later = ast.FunctionDef | ast.ClassDef
    now = [n for n in tree.body if not isinstance(n, later) and not any(map(is_lazy, ast.walk(n)))]
    return ast.Module(body=now, type_ignores=[])


def folder(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_imports_have_no_circle():
    assert not circle(imported())


def test_a_circle_through_a_function_is_noticed():
    text = {"a": "import b", "b": "def f():\n    from c import g", "c": 'm = lazy_module("a")'}
    graph = {name: imports(ast.parse(code), set(text)) for name, code in text.items()}
    assert circle(graph) == ["a", "b", "c", "a"]
    assert not circle(graph | {"c": set()})


@pytest.mark.parametrize("name", sorted(BELOW))
def test_a_folder_imports_what_lies_below_it(name):
    members = [m for m in MODULES if folder(m) == name]
    assert members
    for module in members:
        own = {m for m in imported()[module] if m.split(".")[0] == "rlk_kernels"}
        # The integrations use the public names, as everybody else does.
        free = (*ROOT, "rlk_kernels") if name == "integrations" else ROOT
        wrong = {m for m in own if folder(m) not in (name, *BELOW[name]) and m not in free}
        assert not wrong, f"{module} imports {sorted(wrong)}"


def test_every_folder_has_its_arrows():
    folders = {folder(m) for m in MODULES if "." in m} - {m.split(".")[1] for m in ROOT}
    assert folders == set(BELOW)


def integration(module: str) -> str:
    """The folder of `integrations` that a module lies in."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["integrations"] and len(parts) > 2 else ""


def test_only_torch_and_triton_are_imported_and_by_an_integration_its_own_engine():
    homes = ENGINES | FRAMEWORKS
    assert set(homes) <= {integration(m) for m in MODULES}
    for module, found in imported().items():
        third = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)
        own = homes.get(integration(module), set())
        assert third <= {"torch", "triton", "rlk_kernels"} | own, f"{module}: {third}"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_not_imported_with_its_switch(name):
    """Settings are checked without it, and no engine's integration needs the switch."""
    package = f"rlk_kernels.integrations.{name}"
    for module in {package, f"{package}.hooks", f"{package}.settings"} & MODULES.keys():
        top = imports(at_the_top(trees()[module]), set(MODULES))
        assert not {m.split(".")[0] for m in top} & (FRAMEWORKS[name] | {"torch"})
    users = {integration(m) for m in MODULES if {integration(n) for n in imported()[m]} >= {name}}
    assert users <= {name}


@pytest.mark.parametrize("name", ENGINES)
def test_an_integration_imports_its_engine_when_it_is_used_and_no_other(name):
    package = f"rlk_kernels.integrations.{name}"
    top = imports(at_the_top(trees()[package]), set(MODULES))
    packages = {e for names in ENGINES.values() for e in names} | FRAMEWORKS.keys()
    assert not {m.split(".")[0] for m in top} & packages
    for module in MODULES:
        if integration(module) == name:
            others = {integration(m) for m in imported()[module]} & (
                ENGINES.keys() | FRAMEWORKS.keys()
            )
            others -= {name}
            assert not others, f"{module} imports {sorted(others)}"


def test_nothing_else_imports_the_integrations():
    for module, found in imported().items():
        if folder(module) != "integrations":
            assert not {m for m in found if folder(m) == "integrations"}, module


def private_parts(tree: ast.AST) -> set[str]:
    """What is reached into of torch and Triton: names with an underscore, and Triton's runtime."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first in ("torch", "forward_ad") and any(re.match("_[^_]", x) for x in rest):
                found.add(name)
            if first == "triton" and rest[:1] in (["runtime"], ["knobs"], ["backends"]):
                found.add(name)
            if rest[-1:] and rest[-1] in ("_init_fn", "_qualname", "_data"):
                found.add(name)
    return found


def test_one_module_reaches_into_private_parts_of_torch_and_triton():
    assert private_parts(trees()["rlk_kernels.private_api"])
    for module, tree in trees().items():
        if module != "rlk_kernels.private_api" and folder(module) != "integrations":
            assert not private_parts(tree), module


@pytest.mark.parametrize(
    "code",
    [
        "import torch._C",
        "from torch._library.custom_ops import OPDEFS",
        "x = torch._C._cuda_getDevice()",
        "forward_ad._current_level",
        "from triton.runtime.cache import get_cache_manager",
        "triton.knobs.runtime",
        "op._init_fn(x)",
        "os.environ._data",
    ],
)
def test_a_private_part_is_noticed(code):
    assert private_parts(ast.parse(code))
    assert not private_parts(ast.parse("import torch.library\ntriton.language.dot(self._own)"))


def needs_triton() -> set[str]:
    """Modules that cannot be imported without Triton."""
    tops = {name: imports(at_the_top(tree), set(MODULES)) for name, tree in trees().items()}
    found = {name for name, top in tops.items() if {m.split(".")[0] for m in top} & {"triton"}}
    while True:
        more = {name for name, top in tops.items() if top & found} - found
        if not more:
            return found
        found |= more


PORTABLE = ("operator", "portable", "tiles", "split", "plan", "options", "workspace", "tree")
"""What a file is called that plans, checks or computes without Triton."""


def test_what_runs_without_triton_never_imports_it_at_the_top():
    found = needs_triton()
    assert "rlk_kernels.matmul.kernels" in found
    assert "rlk_kernels.ops.linear_logp.launch" in found
    for module in MODULES:
        name = module.split(".")[-1]
        package = MODULES[module].name == "__init__.py"
        if package or module in ROOT or (name in PORTABLE and ".hopper." not in module):
            assert module not in found, module


def test_the_tool_and_the_kernels_name_the_same_tritons() -> None:
    from rlk_kernels.device import GLUON_TRITON

    from rlk_align.engines.tested import TESTED

    (major, minor), (_, behind) = GLUON_TRITON
    assert TESTED["triton"] == (f"{major}.{minor}", f"{major}.{behind - 1}")
