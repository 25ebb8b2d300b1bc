"""One HF side under msprobe, and what msprobe names in a pair: for compare_msprobe.py."""

import csv
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.hf.places import hf_places
from rlk_align.engines.hf.planting import HFOperators
from rlk_align.engines.spec import EngineSpec
from rlk_align.model.checkpoint import default_model, resolve_model
from rlk_align.model.families import read_shape
from rlk_align.model.prompts import TokenBatch
from rlk_align.selftest.faults.catalogue import choose
from rlk_align.selftest.planting.live_operators import plant

TASKS = {"checksums": "md5", "statistics": "statistics", "tensors": ""}
"""What msprobe dumps -> its `summary_mode`."""
ANALYSIS = ["-da"]
"""Its search for the first difference; without it, it writes a table of all nodes."""


@dataclass(frozen=True, slots=True)
class Side:
    """An HF engine, and the operator at which a fault sits or, in its twin, might sit."""

    attention: str
    fault: str | None = None
    faulty: bool = False

    @property
    def spec(self) -> str:
        return f"hf:attn={self.attention}" + (f",fault={self.fault}" if self.faulty else "")


def planted(engine: HFEngine, side: Side) -> None:
    """Plants the fault, or in its twin nothing, so that msprobe sees the same calls on both sides:
    the formula's own calls are hidden, and its result leaves through one visible call."""
    from msprobe.core.common.runtime import Runtime

    assert side.fault is not None
    chosen = choose("hf", side.fault)
    operators = HFOperators(engine, chosen)
    replace = operators.replace_operator

    def visibly(site: str, formula: Callable[..., torch.Tensor]) -> None:
        def planted_result(unit: Any) -> torch.Tensor:
            was, Runtime.is_running = Runtime.is_running, False
            value = formula(unit).to(unit.result.dtype) if side.faulty else unit.result
            Runtime.is_running = was
            return value * 1

        replace(site, planted_result)

    operators.replace_operator = visibly  # type: ignore[method-assign]
    if chosen.fault.kind == "computation" or side.faulty:
        plant(operators, chosen)


def dump(side: Side, task: str, tokens: Path, folder: Path) -> None:
    """One teacher-forced pass under msprobe, forward only, modules and torch's calls (`mix`)."""
    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    model = resolve_model(default_model())
    engine = HFEngine(EngineSpec.parse(f"hf:attn={side.attention}"), model, read_shape(model))
    engine.open()
    if side.fault is not None:
        planted(engine, side)
    name = "tensor" if task == "tensors" else "statistics"
    options: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["forward"]}
    if TASKS[task]:
        options["summary_mode"] = TASKS[task]
    folder.mkdir(parents=True)
    config = {"task": name, "dump_path": str(folder), "rank": [], "step": [], "level": "mix"}
    (folder / "config.json").write_text(json.dumps(config | {name: options}))
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    debugger.start(model=engine.model)
    engine.score(TokenBatch.load(tokens), None, lambda _done: None)
    debugger.stop()
    places = {p.module: p.sites[0] for p in hf_places(engine.model) if p.end == "output"}
    (folder / "places.json").write_text(json.dumps(places))
    # `compare -da` looks for folders of ranks alone, and one process writes none.
    (process,) = (folder / "step0").iterdir()
    process.rename(process.with_name("rank0"))


def compare_command(faulty: Path, clean: Path, out: Path) -> list[str]:
    """`msprobe compare`, its table."""
    words = ["msprobe", "compare", "-tp", str(faulty / "step0"), "-gp", str(clean / "step0")]
    return [*words, "-o", str(out)]


def says(pair: tuple[Side, Side], task: str, tokens: Path, site: str | None) -> dict[str, Any]:
    """What msprobe names in a pair, by `-da` and by its table: of the two the one that is exact, or
    that names anything; and what it kept of the pair."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        log, clean, faulty = folder / "log", folder / "clean", folder / "faulty"
        for side, at in zip(pair, (clean, faulty), strict=True):
            _forked(dump, side, task, tokens, at, log=log)
        answers = []
        for by, flags in (("-da", ANALYSIS), ("table", [])):
            out = folder / f"out{by}"
            out.mkdir()
            _forked(_msprobe, [*compare_command(faulty, clean, out), *flags], log=log)
            answers.append(_named(out, faulty, site) | {"by": by, "out_bytes": size_of(out)})
        size = sum(size_of(at / "step0") for at in (clean, faulty))
        found = max(answers, key=lambda a: (a["exact"], a["node"] is not None))
        return found | {"dump_bytes": size}


def _forked(work: Callable[..., None], *given: Any, log: Path) -> None:
    """Work in a process that has everything imported, and no hook of another dump."""

    def run() -> None:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work(*given)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"msprobe failed: {log.read_text()[-2000:]}")


def _msprobe(words: list[str]) -> None:
    from msprobe.msprobe import main

    sys.argv = words
    main()


def _named(out: Path, dumped: Path, site: str | None) -> dict[str, Any]:
    """The first node that a comparison calls different, and whether it is the planted operator:
    its module, a call inside that, or the call that gives the operator's result."""
    node = _first_difference(out)
    if node is None:
        return {"node": None, "exact": False}
    rank = dumped / "step0" / "rank0"
    parent = json.loads((rank / "construct.json").read_text()).get(node)
    stacks = json.loads((rank / "stack.json").read_text()).values()
    stack = next((lines for nodes, lines in stacks if node in nodes), [])
    module = _module_path(node if node.startswith("Module.") else parent)
    places = json.loads((dumped / "places.json").read_text())
    exact = any("in planted_result" in line for line in stack) or places.get(module) == site
    return {"node": node, "module": module, "exact": exact and site is not None}


def _first_difference(out: Path) -> str | None:
    """Of `-da` the node that it names; of a table the first output with a warning or an error."""
    for path in out.glob("diff_analyze_*.json"):
        return next(iter(json.loads(path.read_text()).values()))[0]["op_name"]
    for path in out.glob("compare_result_*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                name, output, _ = row["NPU Name"].rpartition(".output.")
                if output and row["Result"] in ("warning", "error"):
                    return name
    return None


def _module_path(node: str | None) -> str:
    """`Module.model.layers.0.mlp.Qwen3MLP.forward.1` -> `model.layers.0.mlp`."""
    named_class = (node or "").removeprefix("Module.").rpartition(".forward.")[0]
    return named_class.rpartition(".")[0]


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    # One dump in a process of its own, as it is timed.
    given, task, tokens, folder = json.loads(sys.argv[1])
    dump(Side(**given), task, Path(tokens), Path(folder))
