"""What the user asked for: engine specs and run settings, checked before anything starts."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlk_align.data import data_path
from rlk_align.engines import EngineInfo, engine_info
from rlk_align.errors import BadOption, ModelError

DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
}
EDGES = ("decode_vs_prefill", "prefill_vs_train", "decode_vs_train")

Report = Callable[[str, int, int], None]
"""How long work tells its progress: (stage, done, total); total 0 where nothing is counted."""

COMMON_OPTIONS: dict[str, type] = {
    "dtype": str,
    "device": str,
    "model": str,
    "python": str,
    "patch": str,
    "timeout": float,
}
"""What every engine takes. `patch=module:function` is called with the loaded model; `timeout` is
in seconds, after which an engine that stands still is given up."""

LAUNCH_OPTIONS = ("timeout", "port")
"""Options that change how an engine is started, and nothing that it computes."""

Option = str | int | float | bool


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`NAME[:key=value,...]`, e.g. `vllm:dtype=bfloat16`."""

    name: str
    options: dict[str, Option] = field(default_factory=dict)

    @property
    def info(self) -> EngineInfo:
        return engine_info(self.name)

    @property
    def ranks(self) -> int:
        """How many processes of ours the engine runs in."""
        return int(self.options.get(self.info.ranks, 1)) if self.info.ranks else 1

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes that compute, ours or the engine's own, as they call themselves."""
        ranks = self.ranks if self.info.ranks else int(self.options.get("tp", 1))
        return tuple(f"rank {r}" for r in range(ranks)) if ranks > 1 else ("the engine",)

    @property
    def device(self) -> str | None:
        """What the engine is to compute on; None leaves it the choice."""
        return str(self.options["device"]) if "device" in self.options else None

    @property
    def computed(self) -> "EngineSpec":
        """Without what only says how it is started."""
        kept = {k: v for k, v in self.options.items() if k not in LAUNCH_OPTIONS}
        return EngineSpec(self.name, kept)

    def __str__(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @classmethod
    def parse(cls, text: str) -> "EngineSpec":
        """Raises UnknownEngine or BadOption, naming what is known."""
        name, _, rest = text.partition(":")
        known = COMMON_OPTIONS | engine_info(name).options
        options: dict[str, Option] = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            if key not in known:
                raise BadOption(
                    f"engine {name!r} has no option {key!r}", f"known: {', '.join(sorted(known))}"
                )
            if not equals or not value:
                raise BadOption(f"engine {name!r}: option {key!r} needs a value: {key}=VALUE")
            if key in options:
                raise BadOption(f"engine {name!r}: option {key!r} is given twice")
            options[key] = _convert(name, key, value, known[key])
        return cls(name, options)


def _convert(engine: str, key: str, value: str, kind: type) -> Option:
    where = f"engine {engine!r}: {key}={value}"
    if kind is int:
        if not re.fullmatch(r"[0-9]+", value) or int(value) == 0:
            raise BadOption(f"{where}: a positive whole number is wanted")
        return int(value)
    if kind is float:
        if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", value) or float(value) <= 0:
            raise BadOption(f"{where}: a positive number is wanted")
        return float(value)
    if kind is bool:
        if value.lower() not in ("1", "0", "true", "false"):
            raise BadOption(f"{where}: 1 or 0 is wanted")
        return value.lower() in ("1", "true")
    if key == "dtype":
        if value not in DTYPES:
            raise BadOption(f"{where}: unknown dtype; choose from {', '.join(DTYPES)}")
        return DTYPES[value]
    if key == "patch" and not re.fullmatch(r"[\w.]+:\w+", value):
        raise BadOption(f"{where}: module:function is wanted")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePlan:
    """Which values a capture keeps; digests and statistics are kept for every site."""

    budget: int = 8 * 10**9
    """Bytes of values that one capture may hold."""
    layers: tuple[int, int] | None = None
    """First and last layer whose values are kept; None is all."""
    sites: tuple[str, ...] = ()
    """Sites, or operators such as `attn`, whose values are kept; empty is all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRequest:
    """Everything that decides what one engine is asked to do."""

    engine: EngineSpec
    model: str
    prompts: Path
    max_new_tokens: int = 32
    seed: int = 0
    trace: TracePlan = TracePlan()
    passes: tuple[str, ...] = ("decode", "prefill")
    """The observed passes, in order; `decode` samples, `prefill` scores."""
    production: bool = False
    """Whether to score once more in the engine's un-tapped production mode."""

    @property
    def model_path(self) -> str:
        return str(self.engine.options.get("model", self.model))


def default_model() -> str:
    """The embedded model's folder."""
    return str(data_path("model"))


def resolve_model(name: str) -> Path:
    """The folder of a checkpoint: a local path, or a hub id, downloaded when needed.

    Raises ModelError where neither exists.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path.resolve()
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelError(
            f"no model at {name}",
            "give a folder with config.json and safetensors weights, or a hub id ORG/NAME",
        )
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{name} is no local folder, and the hub did not give it: {error}",
            "check the spelling and the network, or download it first",
        ) from error


def fingerprint(*parts: object) -> str:
    """A short stable name for a combination of settings."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint_files(folder: Path) -> str:
    """A short name for the contents of the model's files in `folder`."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".model", ".txt") and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(1 << 22):
                    digest.update(chunk)
    return digest.hexdigest()
