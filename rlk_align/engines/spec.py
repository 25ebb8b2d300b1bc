"""An engine spec, `NAME[:key=value,...]`: parsed once, checked before anything starts."""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from rlk_align.engines.common.kernels import REPLACEABLE, parse_excluded
from rlk_align.engines.info import EngineInfo, Option, OptionValue
from rlk_align.engines.registry import ENGINES, engine_info
from rlk_align.errors import BadOption
from rlk_align.selftest.faults.catalogue import check_fault, choose

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

COMMON_OPTIONS = {
    "dtype": Option(default="auto"),
    "device": Option(),
    "model": Option(),
    "python": Option(),
    "patch": Option(),
    "fault": Option(),
    "kernels": Option(default="off", choices=("off", "rlk")),
    "except": Option(),
    "lora": Option(),
    "merged": Option(bool, default=False),
    "timeout": Option(float, default=600.0, starts_only=True),
}
"""The options that every engine takes. `patch=module:function` is called with the loaded model.
`fault=NAME@STRENGTH@rankN` plants a fault of `selftest.faults`, on all ranks or on one alone.
`kernels=rlk` makes the engine compute with our kernels, except for the operators of
`except=OPERATOR+OPERATOR`. `lora=PATH` is an adapter in PEFT's layout, which `merged=1` adds to the
weights. An engine that makes no progress for `timeout` seconds is ended."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`NAME[:key=value,...]`, e.g. `vllm:dtype=bfloat16`."""

    name: str
    options: dict[str, OptionValue] = field(default_factory=dict)
    """The options that the user wrote."""

    @property
    def info(self) -> EngineInfo:
        return engine_info(self.name)

    def option(self, key: str) -> OptionValue | None:
        """The value that the user wrote, or the default; None leaves the choice to the engine."""
        if key in self.options:
            return self.options[key]
        return (COMMON_OPTIONS | dict(self.info.options))[key].default

    @property
    def ranks(self) -> int:
        """How many processes rlk-align starts for the engine."""
        return self._product(self.info.ranks)

    @property
    def processes(self) -> tuple[str, ...]:
        """The names under which the processes that compute report their heartbeats."""
        own = self.info.own_ranks
        ranks = self._product(self.info.ranks or ((own,) if own else ()))
        return tuple(f"rank {r}" for r in range(ranks)) if ranks > 1 else ("the engine",)

    def _product(self, counted: tuple[str, ...]) -> int:
        return math.prod(int(self.option(key) or 1) for key in counted)

    @property
    def device(self) -> str | None:
        """The device to compute on; None leaves the choice to the engine."""
        device = self.option("device")
        return None if device is None else str(device)

    def dtype(self, checkpoint: str) -> str:
        """The dtype to compute in, for a checkpoint of this dtype."""
        dtype = str(self.option("dtype"))
        return checkpoint if dtype == "auto" else dtype

    def canonical(self, checkpoint: str) -> "EngineSpec":
        """The equivalent spec without defaults, its options sorted: for a bf16 checkpoint
        `vllm:tp=1,dtype=bf16` is `vllm`."""
        chosen = {
            k: v for k, v in sorted(self.options.items()) if v != self._default(k, checkpoint)
        }
        return EngineSpec(self.name, chosen)

    def _default(self, key: str, checkpoint: str) -> OptionValue | None:
        if key == "dtype":
            return "auto" if self.options[key] == "auto" else checkpoint
        return EngineSpec(self.name).option(key)

    @property
    def computed(self) -> "EngineSpec":
        """The spec without the options that only affect how the engine is started."""
        known = COMMON_OPTIONS | dict(self.info.options)
        chosen = {k: v for k, v in self.options.items() if not known[k].starts_only}
        return EngineSpec(self.name, chosen)

    def plus(self, text: str) -> "EngineSpec":
        """The spec with the options `key=value,...` added. Raises BadOption if the spec has another
        value for one of them, or if `parse` refuses them."""
        who, known = f"engine {self.name!r}", COMMON_OPTIONS | dict(self.info.options)
        added = dict(given_options(who, text, known))
        for key, value in added.items():
            if key in self.options and str(self.options[key]) != value:
                raise BadOption(
                    f"{who} has {key}={self.options[key]}, and {key}={value} is needed",
                    f"leave {key} out",
                )
        return EngineSpec.parse(str(EngineSpec(self.name, {**self.options, **added})))

    def __str__(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @classmethod
    def parse(cls, text: str) -> "EngineSpec":
        """Raises UnknownEngine or BadOption, which list the known names."""
        name, _, rest = text.partition(":")
        info = engine_info(name)
        known = COMMON_OPTIONS | dict(info.options)
        options = {
            key: _convert(name, key, value, known[key])
            for key, value in given_options(f"engine {name!r}", rest, known)
        }
        _check_kernels(name, options, info)
        _check_lora(name, options, info)
        if conflict := info.conflict(options):
            raise BadOption(f"engine {name!r}: {conflict}")
        if "fault" in options:
            check_fault(name, options)
        return cls(name, options)


def given_options(who: str, text: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """The options of `key=value,...`. Raises BadOption for an option that is unknown, has no value
    or is repeated; `who` names the engine in the error."""
    parsed: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in known:
            fix = f"known: {', '.join(sorted(known))}"
            if "except" in parsed and key in REPLACEABLE:
                fix = f"join operators with +: except={parsed['except']}+{key}"
            raise BadOption(f"{who} has no option {key!r}", fix)
        if not equals or not value:
            raise BadOption(f"{who}: option {key!r} needs a value: {key}=VALUE")
        if key in parsed:
            raise BadOption(f"{who}: option {key!r} is given twice")
        parsed[key] = value
        yield key, value


def _check_kernels(name: str, options: dict[str, OptionValue], info: EngineInfo) -> None:
    wanted = options.get("kernels") == "rlk"
    if wanted and not info.patch:
        raise BadOption(
            f"engine {name!r} does not support kernels=rlk: its EngineInfo names no patch"
        )
    if "except" in options and not wanted:
        raise BadOption(f"engine {name!r}: except={options['except']} needs kernels=rlk as well")


def _check_lora(name: str, options: dict[str, OptionValue], info: EngineInfo) -> None:
    if "lora" in options and not info.loads_lora:
        able = ", ".join(other for other in ENGINES if engine_info(other).loads_lora)
        raise BadOption(
            f"engine {name!r} does not support lora={options['lora']}"
            + (f": {info.lacks_lora}" if info.lacks_lora else ""),
            f"engines that compute with an adapter: {able}; or give it a merged checkpoint",
        )
    if options.get("merged") and "lora" not in options:
        raise BadOption(f"engine {name!r}: merged=1 needs lora=PATH as well")
    if options.get("merged") and not info.merges_lora:
        raise BadOption(
            f"engine {name!r} does not merge adapters", "give it a merged checkpoint, model=PATH"
        )


def _convert(engine: str, key: str, value: str, option: Option) -> OptionValue:
    where = f"engine {engine!r}: {key}={value}"
    if option.kind is int:
        if not re.fullmatch(r"[0-9]+", value) or int(value) == 0:
            raise BadOption(f"{where}: must be a positive whole number")
        return int(value)
    if option.kind is float:
        if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", value) or float(value) <= 0:
            raise BadOption(f"{where}: must be a positive number")
        return float(value)
    if option.kind is bool:
        if value.lower() not in ("1", "0", "true", "false"):
            raise BadOption(f"{where}: must be 1 or 0")
        return value.lower() in ("1", "true")
    if option.choices and value not in option.choices:
        raise BadOption(f"{where} is unknown", f"choose from {', '.join(option.choices)}")
    if key == "fault":
        return str(choose(engine, value))
    if key == "except":
        try:
            return "+".join(sorted(parse_excluded(value)))
        except ValueError as error:
            known = ", ".join(REPLACEABLE)
            raise BadOption(f"{where}: not an operator: {error}", f"known: {known}") from error
    if key == "dtype":
        if value not in DTYPES:
            raise BadOption(f"{where}: unknown dtype; choose from {', '.join(DTYPES)}")
        return DTYPES[value]
    if key == "device" and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", value):
        raise BadOption(f"{where} is unknown", "choose cpu, cuda or cuda:N")
    if key == "patch" and not re.fullmatch(r"[\w.]+:\w+", value):
        raise BadOption(f"{where}: must be module:function")
    return value
