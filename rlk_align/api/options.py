"""Parses the text of flags, and supplies their defaults."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, get_args

from rlk_align.capture.recording import Recording, Side, parse_side
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.engines.registry import engine_info, require_installed
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import default_model
from rlk_align.model.edges import EDGES
from rlk_align.results import EdgeName, Kind
from rlk_align.text import printable
from rlk_align.trace.records import load_record
from rlk_align.trace.run import Run, fingerprint
from rlk_align.trace.run_folder import RUNS
from rlk_align.trace.schema import TraceRecord

Warn = Callable[[str], None]
"""Receives warnings before an engine starts."""


def command(name: str, runs: Sequence[str], request: Any) -> tuple[str, ...]:
    """Returns the command line that is equivalent to a dataclass whose fields are flags."""
    words = ["rlk-align", name, *runs]
    for field in fields(request):
        value, flag = getattr(request, field.name), f"--{field.name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False and field.default is None:
            words.append(f"--no-{flag.removeprefix('--')}")
        elif value != field.default:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [flag, str(item)]
    return tuple(map(printable, words))


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureOptions:
    """The flags that control how engines are captured."""

    model: str | None = None
    kernels: str | None = None
    prompts: Path | Sequence[Any] | None = None
    """A file, or the prompts themselves."""
    max_new_tokens: int = 32
    seed: int = 0
    fresh: bool = False
    layers: str | None = None
    sites: str | None = None
    trace_budget: str = "8GB"

    @property
    def plan(self) -> TracePlan:
        """The values to keep. Raises BadOption for a flag that cannot be parsed."""
        return TracePlan(
            budget=parse_size(self.trace_budget),
            layers=parse_layers(self.layers),
            sites=tuple(names(self.sites)),
        )

    def request(
        self,
        engine: EngineSpec,
        plan: TracePlan,
        passes: tuple[str, ...],
        prompts: Path,
    ) -> CaptureRequest:
        """Returns the request for one engine; the default model is the embedded one. Raises
        BadOption for an empty name of a model."""
        if self.model == "":
            raise BadOption("--model is empty", "omit it for the embedded model")
        return CaptureRequest(
            engine=engine,
            model=self.model or default_model(),
            prompts=prompts,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            trace=plan,
            passes=passes,
        )

    def recorded_by(self, trace: Path) -> Self:
        """Returns these options with the model and the prompts of a trace where they are not set,
        so that both sides use those of the capture."""
        model, prompts = self.model, self.prompts
        if model is None:
            model = load_record(TraceRecord, trace / "trace.json").model
        if prompts is None:
            prompts = trace / "prompts.jsonl"
        return replace(self, model=model, prompts=prompts)


def side(text: str, kernels: str | None) -> Side:
    """Parses an engine or a recording; `kernels` applies to an engine whose spec does not set them.
    Raises UnknownEngine, BadOption, and MissingDependency for an engine that is not installed."""
    check_kernels(kernels)
    parsed = parse_side(text)
    if isinstance(parsed, Recording):
        return parsed
    if parsed.option("python") is None:
        require_installed(parsed.name)
    if kernels is None or "kernels" in parsed.options:
        return parsed
    return EngineSpec.parse(f"{text}{',' if parsed.options else ':'}kernels={kernels}")


def check_sampling(max_new_tokens: int, seed: int) -> None:
    """Raises BadOption for numbers outside their ranges."""
    if max_new_tokens < 1:
        raise BadOption(f"--max-new-tokens {max_new_tokens}: must be 1 or more")
    if seed < 0:
        raise BadOption(f"--seed {seed}: must be 0 or more")


def check_kernels(wanted: str | None) -> None:
    """Raises BadOption for an unknown value of `--kernels`."""
    if wanted not in (None, "rlk", "off"):
        raise BadOption(
            f"--kernels {wanted!r} is unknown",
            "choose rlk or off; a spec leaves operators to the engine: "
            "vllm:kernels=rlk,except=attn",
        )


def without_kernels(spec: EngineSpec) -> str:
    """Returns the spec of the same engine without the kernels."""
    options = {k: v for k, v in spec.options.items() if k not in ("kernels", "except")}
    return str(EngineSpec(spec.name, options))


def default_rollout() -> str:
    """Returns vLLM where it is installed, else HF."""
    return "vllm" if engine_info("vllm").installed else "hf"


def default_train() -> str:
    """Returns Megatron-core where it is installed, else HF."""
    return "megatron" if engine_info("megatron").installed else "hf"


def parse_size(text: str) -> int:
    """Parses `8GB`, `500 MiB`, `1e9` ... into bytes. Raises BadOption."""
    number, unit = r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)", r"(?:([KMGT])(i?))?B?"
    match = re.fullmatch(rf"{number}\s*{unit}", text, re.IGNORECASE)
    if not match or not 0 < float(match[1]) < 1e30:
        raise BadOption(f"--trace-budget {text!r}: not a size", "for example 8GB or 500MB")
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """Parses `0-3` or `2`. Raises BadOption."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise BadOption(f"--layers {text!r}: not of the form A-B", "for example 0-3")
    return int(match[1]), int(match[2] or match[1])


def parse_edges(text: str | None) -> tuple[EdgeName, ...]:
    """Returns the named edges in their fixed order; None means all. Raises BadOption for an unknown
    edge."""
    if text is None:
        return EDGES
    wanted = names(text)
    unknown = [e for e in wanted if e not in EDGES]
    if unknown or not wanted:
        raise BadOption(f"--edges {text!r} is unknown", f"choose from {', '.join(EDGES)}")
    return tuple(e for e in EDGES if e in wanted)


def parse_kinds(items: Sequence[str] | None) -> tuple[Kind, ...]:
    """Returns the allowed kinds of mismatch. Raises BadOption for an unknown kind."""
    known = get_args(Kind)
    for item in items or []:
        if item not in known:
            raise BadOption(f"--allow-mismatch {item!r} is unknown", f"choose: {', '.join(known)}")
    return tuple(k for k in known if k in (items or []))


def names(text: str | None) -> list[str]:
    """Splits a comma-separated list."""
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def specs(text: str | None) -> list[str]:
    """Splits a comma-separated list of engine specs. `vllm:tp=2,dtype=float32,hf` has two: an item
    with a `=` is an option of the engine before it."""
    engines: list[str] = []
    for item in names(text):
        if engines and ":" in engines[-1] and re.match("[^:=]+=", item):
            engines[-1] += f",{item}"
        else:
            engines.append(item)
    return engines


def choose_run(run_dir: Path | None, kind: str, *settings: object) -> Run:
    """Returns the folder `run_dir`, or one named after the settings, so that a rerun uses the same.
    Raises BadOption for an empty name."""
    if run_dir is not None and not str(run_dir).strip("."):
        raise BadOption("a run needs a folder of its own", "name one")
    return Run(run_dir or RUNS / f"{kind}-{fingerprint(*settings)}")
