"""Flags that several commands share, and what turns their text into values."""

import re
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.data import data_path
from rlk_align.engines.registry import engine_info, require_installed
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import default_model
from rlk_align.model.edges import EDGES
from rlk_align.results import EdgeName, Kind
from rlk_align.text import line, printable
from rlk_align.trace.run import RUNS, Run, fingerprint

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="M",
        help="Checkpoint folder or hub id.",
        show_default="the embedded model; a replay's own",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="F",
        help="JSON Lines or text, one prompt a line.",
        show_default="the embedded prompts",
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", metavar="N", min=1, help="Tokens to sample after each prompt."
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the sampling.")]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="D", help="The run's folder.", show_default="below rlk-runs"),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Capture again what is already captured.")]
Layers = Annotated[
    str | None, typer.Option("--layers", metavar="A-B", help="Keep values of these layers only.")
]
Sites = Annotated[
    str | None,
    typer.Option("--sites", metavar="S,...", help="Keep values of these sites or operators only."),
]
TraceBudget = Annotated[
    str,
    typer.Option("--trace-budget", metavar="SIZE", help="Values that one capture may hold."),
]
ContractName = Annotated[
    str | None,
    typer.Option(
        "--contract",
        metavar="C",
        help="Built-in id or TOML file.",
        show_default="by the lower-precision dtype",
    ),
]
JsonOutput = Annotated[
    list[str] | None,
    typer.Option("--output", metavar="FMT=PATH", help="Also write the findings: json=PATH."),
]
Output = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        metavar="FMT=PATH",
        help="Also write the verdict, as json, markdown, junit, github or html; PATH - is stdout.",
    ),
]


Rollout = Annotated[
    str | None,
    typer.Option(
        "--rollout",
        metavar="SPEC",
        help="Rollout engine, NAME[:key=value,...].",
        show_default="vllm, else hf",
    ),
]
Train = Annotated[
    str | None,
    typer.Option(
        "--train",
        metavar="SPEC",
        help="Training engine, NAME[:key=value,...].",
        show_default="megatron, else hf",
    ),
]
Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="rlk|off",
        help="Put rlk_kernels under every operator of the engines.",
        show_default="off",
    ),
]
AllowMismatch = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-mismatch",
        metavar="KIND",
        help="Measure across: tokens, weights or attributes.",
    ),
]
Edges = Annotated[
    str | None,
    typer.Option("--edges", metavar="E,...", help="Edges to judge.", show_default="all three"),
]
Production = Annotated[
    bool | None,
    typer.Option(
        "--production/--no-production",
        help="Also score in the rollout engine's compiled mode.",
        show_default="on GPUs",
    ),
]
Attribute = Annotated[
    bool,
    typer.Option("--attribute", help="Also say what each introducer contributes to the log-probs."),
]


def command_line() -> list[str]:
    """The command as it was given; what is not text as an escape."""
    return ["rlk-align", *map(printable, sys.argv[1:])]


def capture_request(
    engine: EngineSpec,
    model: str | None,
    prompts: Path | None,
    max_new_tokens: int,
    seed: int,
    trace: TracePlan,
    passes: tuple[str, ...],
    production: bool,
) -> CaptureRequest:
    """What one engine is asked to do, with the embedded model and prompts by default.

    Raises BadOption for a name of nothing.
    """
    if model == "":
        raise BadOption("--model is empty", "leave it out for the embedded model")
    return CaptureRequest(
        engine=engine,
        model=model or default_model(),
        prompts=prompts or data_path("prompts.jsonl"),
        max_new_tokens=max_new_tokens,
        seed=seed,
        trace=trace,
        passes=passes,
        production=production,
    )


def engine_spec(text: str, kernels: str | None) -> EngineSpec:
    """An engine's spec; `kernels` for one that does not say itself. Raises UnknownEngine,
    BadOption, or MissingDependency for an engine that is not installed."""
    check_kernels(kernels)
    spec = EngineSpec.parse(text)
    if spec.option("python") is None:
        require_installed(spec.name)
    if kernels is None or "kernels" in spec.options or spec.name == "replay":
        return spec
    return EngineSpec.parse(f"{text}{',' if spec.options else ':'}kernels={kernels}")


def check_kernels(wanted: str | None) -> None:
    """Raises BadOption for what `--kernels` cannot be: another option, say, whose name it took."""
    if wanted not in (None, "rlk", "off"):
        raise BadOption(
            f"--kernels {wanted!r} is unknown",
            "choose rlk or off; operators are left in a spec, as in vllm:kernels=rlk,except=attn",
        )


def without_kernels(text: str) -> str:
    """The same engine without them, as a spec."""
    spec = EngineSpec.parse(text)
    kept = {k: v for k, v in spec.options.items() if k not in ("kernels", "except")}
    return str(EngineSpec(spec.name, kept))


def warn(warnings: list[str]) -> None:
    """Says on stderr what the user should know before an engine starts."""
    console = Console(stderr=True, highlight=False)
    for warning in warnings:
        console.print(line(f"warning: {warning}"), soft_wrap=True)


def default_rollout() -> str:
    """vLLM where it is installed, else HF."""
    return "vllm" if engine_info("vllm").installed else "hf"


def default_train() -> str:
    """Megatron-core where it is installed, else HF."""
    return "megatron" if engine_info("megatron").installed else "hf"


def trace_plan(budget: str, layers: str | None, sites: str | None) -> TracePlan:
    """Raises BadOption for a flag that cannot be read."""
    return TracePlan(
        budget=parse_size(budget), layers=parse_layers(layers), sites=tuple(names(sites))
    )


def parse_size(text: str) -> int:
    """`8GB`, `500 MiB`, `1e9` ... in bytes. Raises BadOption."""
    number, unit = r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)", r"(?:([KMGT])(i?))?B?"
    match = re.fullmatch(rf"{number}\s*{unit}", text, re.IGNORECASE)
    if not match or not 0 < float(match[1]) < 1e30:
        raise BadOption(f"--trace-budget {text!r}: a size is wanted", "for example 8GB or 500MB")
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """`0-3` or `2`. Raises BadOption."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise BadOption(f"--layers {text!r}: A-B is wanted", "for example 0-3")
    return int(match[1]), int(match[2] or match[1])


def parse_edges(text: str | None) -> tuple[EdgeName, ...]:
    """Edges in their own order; None is all. Raises BadOption for an unknown one."""
    if text is None:
        return EDGES
    wanted = names(text)
    unknown = [e for e in wanted if e not in EDGES]
    if unknown or not wanted:
        raise BadOption(f"--edges {text!r} is unknown", f"choose from {', '.join(EDGES)}")
    return tuple(e for e in EDGES if e in wanted)


def parse_kinds(items: list[str] | None) -> tuple[Kind, ...]:
    """Mismatches to measure across. Raises BadOption for an unknown one."""
    known = get_args(Kind)
    for item in items or []:
        if item not in known:
            raise BadOption(f"--allow-mismatch {item!r} is unknown", f"choose: {', '.join(known)}")
    return tuple(k for k in known if k in (items or []))


def names(text: str | None) -> list[str]:
    """Of a comma-separated list."""
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def choose_run(run_dir: Path | None, kind: str, *settings: object) -> Run:
    """The given folder, or one named after the settings, so that a rerun finds it again.

    Raises BadOption for a name of nothing.
    """
    if run_dir is not None and not str(run_dir).strip("."):
        raise BadOption("a run needs a folder of its own", "name one")
    return Run(run_dir or RUNS / f"{kind}-{fingerprint(*settings)}")
