"""Who may import whom, read from the source: the arrows of the design, and no others."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from source_imports import circle, imports, modules, parsed

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlk_align"
MODULES = modules(PACKAGE)


@cache
def imported() -> dict[str, set[str]]:
    """Module -> what it imports. Only the process that runs these tests reads the sources."""
    return {name: imports(parsed(path), set(MODULES)) for name, path in MODULES.items()}


def own_imports(module: str) -> set[str]:
    return {m for m in imported()[module] if m.split(".")[0] == "rlk_align"}


def test_the_reader_of_imports_sees_them() -> None:
    found = imported()["rlk_align.cli.gate"]
    assert {"rlk_align.cli.options", "rlk_align.api.judging", "typer"} <= found
    assert "rlk_align.pipeline" in imported()["rlk_align.cli.compare"]
    assert "huggingface_hub" in imported()["rlk_align.model.checkpoint"]
    # It imports that one for the type checker alone.
    assert "rlk_align.model.sites" in imported()["rlk_align.selftest.faults.fault"]


def test_imports_have_no_circle() -> None:
    assert not circle({name: own_imports(name) - {name} for name in MODULES})


def inside(module: str, *parents: str) -> bool:
    names = tuple(f"rlk_align.{p}" for p in parents)
    return any(module == n or module.startswith(f"{n}.") for n in names)


RULES = {
    # Who: what of the tool it may import.
    "errors": (),
    "data": (),
    "files": (),
    "text": (),
    "torch_file": ("text", "errors"),
    "progress": ("text",),
    "version": (),
    "moments": (),
    "interval": ("moments",),
    "noise": ("interval",),
    "tail": (),
    "results": (),
    "comparison_table": ("files", "text", "errors"),
    "logs.dumps": ("logs.dumps", "trace", "results", "files", "progress", "text", "errors"),
    "logs.readers": ("logs.readers", "logs.dumps", "progress", "text", "torch_file", "errors"),
    "logs.writers": ("logs.writers", "logs.readers.missing", "logs.dumps", "files", "errors"),
    "logs.diagnose": (
        *(
            "logs.diagnose",
            "logs.dumps",
            "interval",
            "noise",
            "tail",
            "data",
            "files",
            "text",
            "errors",
        ),
    ),
    "logs.rescore": (
        *("logs.rescore", "logs.diagnose", "logs.dumps", "compare.metrics", "interval"),
        *("trace", "model", "results", "text", "errors"),
    ),
    "logs.replay": (
        *("logs.replay", "logs.dumps", "judge.verdict", "trace", "model", "results"),
        "errors",
    ),
    "logs.monitor": (
        *("logs.monitor", "logs.readers", "logs.dumps", "interval", "moments"),
        "noise",
        *("logs.diagnose.contract", "logs.diagnose.fill_values", "logs.diagnose.repeats"),
        *("trace.run", "trace.run_folder", "progress", "text", "errors"),
    ),
    "model": ("model", "results", "data", "files", "text", "errors"),
    "trace": ("trace", "model", "results", "comparison_table", "files", "text", "errors"),
    # The list of faults checks an option; `selftest.planting` is for `planting.py` and the worker.
    "engines": (
        *("engines", "selftest.faults", "selftest.planting"),
        *("trace", "model", "results", "files", "text", "errors"),
    ),
    "selftest.faults": ("selftest.faults", "model.sites", "errors"),
    "selftest.formulas": ("selftest.formulas", "selftest.planting"),
    "selftest.planting": (
        *("selftest.planting", "selftest.faults", "engines.common", "engines.base", "model"),
        "errors",
    ),
    "selftest": (
        *(
            "selftest",
            "probe.referee",
            "probe.explain_logprobs",
            "capture",
            "engines",
            "compare",
            "judge",
        ),
        *("trace", "model", "results", "progress", "errors"),
    ),
    "capture": ("capture", "engines", "trace", "model", "progress", "version", "errors"),
    "compare": (
        *(
            "compare",
            "weights.adapter",
            "weights.quantiser",
            "weights.quantiser_words",
            "interval",
            "noise",
            "trace",
            "model",
        ),
        *("results", "comparison_table", "progress", "errors"),
    ),
    "probe": (
        *("probe", "capture", "engines", "compare", "judge", "trace", "model"),
        *("results", "progress", "errors"),
    ),
    "judge": (
        *("judge", "model.operators", "data", "results", "noise", "tail", "files", "text"),
        "errors",
    ),
    "report": (
        *("report", "logs.diagnose", "logs.monitor.record", "logs.monitor.history"),
        *("logs.rescore.record", "logs.rescore.words", "logs.replay.record", "logs.dumps.record"),
        *("interval", "judge"),
        *("probe.record", "probe.unit_record", "probe.attribution_record"),
        *("probe.perturbation_record", "trace.run", "model.operators"),
        *("weights.findings", "modules.record", "results", "comparison_table", "version"),
        *("text", "errors"),
    ),
    "modules": (
        *("modules", "probe.referee", "capture", "compare", "judge", "engines.common.modules"),
        *("report.modules_json", "trace", "model", "results", "progress", "text", "errors"),
    ),
    "weights": (
        *("weights", "compare.parity_weights", "engines.common", "engines.megatron.layout"),
        *("engines.megatron.experts", "engines.megatron.places", "trace", "model", "progress"),
        *("text", "errors"),
    ),
    "record": ("record", "engines", "trace", "model", "results", "text", "torch_file", "errors"),
    "record.train": ("record.train", "record.shared", "engines", "trace", "model", "errors"),
    "record.rollout": ("record.rollout", "record.shared", "engines", "trace", "model", "errors"),
    "record.shared": ("record.shared", "engines", "trace", "model", "results", "errors"),
    "record.imports": (
        *("record.imports", "record.shared", "engines.common", "engines.manifest"),
        *("engines.row_checks", "trace", "model", "results", "text", "torch_file", "errors"),
    ),
    "record.merge": ("record.merge", "record.shared", "trace", "model", "results", "errors"),
    "pipeline": (
        *("capture", "compare", "probe", "judge", "report", "trace", "model"),
        *("results", "progress", "errors"),
    ),
    "api": (
        *("api", "pipeline", "modules", "capture", "compare", "probe.record", "judge", "report"),
        *("engines", "record"),
        *("logs.rescore", "logs.replay", "logs.diagnose", "logs.dumps", "logs.readers"),
        *("trace", "model", "data", "results", "comparison_table", "progress", "text", "errors"),
    ),
}
PUBLIC = ("api.public", "api.loaded", "errors", "judge.regression", "judge.verdict")
"""Where the names of `rlk_align` itself are from."""
ENGINE_FOLDERS = {
    # Of the engines' folders: which others it may import.
    "common": ("common", "spec", "process.ranks"),
    "process": ("process", "common", "spec"),
    "hf": ("hf", "common", "process", "base", "forward_engine", "spec", "info"),
    "deepspeed": ("deepspeed", "hf", "common", "process", "base", "spec", "info"),
    "vllm": ("vllm", "common", "process", "base", "spec", "info"),
    "sglang": ("sglang", "common", "process", "base", "spec", "info"),
    "megatron": ("megatron", "common", "process", "base", "spec", "info"),
}


@pytest.mark.parametrize("who", RULES)
def test_a_module_imports_only_what_lies_below_it(who: str) -> None:
    allowed = RULES[who]
    members = [m for m in MODULES if inside(m, who)]
    assert members
    for module in members:
        wrong = {m for m in own_imports(module) if m != module and not inside(m, *allowed)}
        assert not wrong, f"{module} imports {sorted(wrong)}"


def test_every_part_of_the_package_has_a_rule() -> None:
    parts = {m.split(".")[1] for m in MODULES if m != "rlk_align"}
    assert parts == {*(rule.split(".")[0] for rule in RULES), "cli", "__main__"}
    logs = {p.name for p in (PACKAGE / "logs").iterdir() if (p / "__init__.py").is_file()}
    assert {f"logs.{name}" for name in logs} == {rule for rule in RULES if rule.startswith("logs.")}
    assert own_imports("rlk_align") == {f"rlk_align.{m}" for m in (*PUBLIC, "version")}


@pytest.mark.parametrize("folder", ENGINE_FOLDERS)
def test_an_engines_folder_imports_no_other_engines(folder: str) -> None:
    allowed = [f"engines.{name}" for name in ENGINE_FOLDERS[folder]]
    members = [m for m in MODULES if inside(m, f"engines.{folder}")]
    assert members
    for module in members:
        wrong = {m for m in own_imports(module) if inside(m, "engines") and not inside(m, *allowed)}
        assert not wrong, f"{module} imports {sorted(wrong)}"


def test_engines_import_of_the_selftest_the_list_of_faults_alone() -> None:
    for module in (m for m in MODULES if inside(m, "engines")):
        allowed = ["selftest.faults"]
        if module.endswith(".planting") or module == "rlk_align.engines.worker":
            allowed.append("selftest.planting")
        used = {m for m in own_imports(module) if inside(m, "selftest")}
        wrong = {m for m in used if not inside(m, *allowed)}
        assert not wrong, f"{module} imports {sorted(wrong)}"
        planting = {m for m in own_imports(module) if re.fullmatch(r".*engines\.\w+\.planting", m)}
        # An engine around another one's model plants in its places.
        assert not planting or module.endswith(".planting"), f"{module} imports {sorted(planting)}"


def test_every_folder_of_the_engines_has_a_rule() -> None:
    assert ENGINE_FOLDERS.keys() == {
        p.name for p in (PACKAGE / "engines").iterdir() if (p / "__init__.py").is_file()
    }


def test_only_patch_imports_the_kernels() -> None:
    for module, found in imported().items():
        if module != "rlk_align.engines.patch":
            assert not [m for m in found if m.split(".")[0] == "rlk_kernels"], module


def loaded(*modules: str) -> dict[str, set[str]]:
    """What each of these loads that those before it have not, in one fresh interpreter."""
    code = (
        "import importlib, json, sys\n"
        "names, before = {}, set()\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    names[module] = sorted(sys.modules.keys() - before)\n"
        "    before = {*sys.modules}\n"
        "print(json.dumps(names))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {module: set(names) for module, names in json.loads(done.stdout).items()}


HEAVY = {"torch", "transformers", "vllm", "triton", "rlk_kernels", "safetensors.torch"}
LIGHT = (
    *("judge.verdict", "judge.contract", "results", "report.verdict", "report.verdict_json"),
    *("logs.diagnose.explain", "report.explained_json", "report.explained"),
    *("logs.writers.step_file", "logs.writers.trl", "logs.writers.verl"),
    *(
        "logs.dumps.imported_run",
        "logs.readers.importing",
        "logs.readers.miles",
        "logs.readers.jsonl",
    ),
    *("report.source", "report.html.page", "report.html.several", "report.model_explorer"),
    *("record", "record.vllm", "record.sglang", "record.shared.layout"),
    "record.imports.formats",
    *("trace.run", "trace.schema", "engines.registry", "engines.spec", "engines.tested"),
    *("capture.request", "model.checkpoint", "model.edges", "model.shape", "model.prompts"),
    *("model.sites", "model.operators", "progress", "text", "errors", "data", "cli.main"),
    *("api.public", "api.loaded", "api.judging", "api.pair", "api.single"),
    *("report.weights", "report.rescored", "report.document_terminal", "report.rescored_json"),
    *("api.rescoring", "api.modules", "cli.modules", "cli.compare", "cli.weights"),
    *(
        "api.imports",
        "cli.import_",
        "api.replaying",
        "cli.replay",
        "report.replayed",
        "logs.replay.request",
    ),
)
"""What judges and parses."""


def test_judging_and_parsing_need_no_torch() -> None:
    found = loaded(*(f"rlk_align.{module}" for module in LIGHT))
    assert {module: names & HEAVY for module, names in found.items() if names & HEAVY} == {}


def test_the_package_itself_loads_next_to_nothing() -> None:
    found = loaded("rlk_align")["rlk_align"]
    assert not found & {*HEAVY, "pydantic", "pyarrow", "numpy", "rich", "typer"}
    assert "rlk_align.api.public" in found


def test_an_engines_module_does_not_load_the_engine() -> None:
    # vLLM's settings must be in the environment before vLLM is imported.
    engines = ("rlk_align.engines.hf.engine", "rlk_align.engines.vllm.engine")
    found = loaded("rlk_align.results", *engines, "rlk_align.cli.main", "rlk_align.engines.worker")
    everything = set().union(*found.values())
    assert not everything & {"transformers", "vllm"}
    # Faults are planted only where they are asked for.
    assert not [m for m in everything if inside(m, "selftest.planting", "selftest.formulas")]
    # The spy sees what is there, and who loaded it.
    assert [module for module, names in found.items() if names & HEAVY] == [engines[0]]
    assert engines[1] in found[engines[1]]
