"""The planted faults by name, and the value `NAME@STRENGTH@rankN` of an engine's option `fault`.

A new fault is an entry in a module of this folder, and a formula in `selftest.formulas`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlk_align.errors import BadOption
from rlk_align.selftest.faults.attention import ATTENTION, CACHE, ROPE
from rlk_align.selftest.faults.delta_net import DELTA_NETS
from rlk_align.selftest.faults.fault import Fault
from rlk_align.selftest.faults.latent import LATENT
from rlk_align.selftest.faults.layer import ACTIVATIONS, NORMS, PROJECTIONS, RESIDUALS
from rlk_align.selftest.faults.model_ends import EMBEDDINGS, INPUTS, LOGITS, LOGPROBS, WEIGHTS
from rlk_align.selftest.faults.sparse import ROUTING
from rlk_align.selftest.faults.state_space import STATE_SPACES

_GROUPS = {
    "norm": NORMS,
    "rope": ROPE,
    "attention": ATTENTION,
    "cache": CACHE,
    "projection": PROJECTIONS,
    "activation": ACTIVATIONS,
    "residual": RESIDUALS,
    "latent attention": LATENT,
    "recurrence": DELTA_NETS,
    "state space": STATE_SPACES,
    "routing": ROUTING,
    "embedding": EMBEDDINGS,
    "logits": LOGITS,
    "logprob": LOGPROBS,
    "weights": WEIGHTS,
    "input": INPUTS,
}
"""Operator class -> its faults; `routing` are those of sparse layers."""
FAULTS = {
    name: replace(fault, op_class=op_class)
    for op_class, faults in _GROUPS.items()
    for name, fault in faults.items()
}


_LIKE = {"deepspeed": "hf", "fsdp": "hf", "sglang": "vllm"}
"""Engine -> the one whose faults it can have: their models have the same operators in the same
places."""
_ONLY_SCORES = ("deepspeed", "fsdp")
"""Engines of these that cannot have the faults of decode steps."""


def planted_as(engine: str) -> str:
    """The engine in whose places faults are planted."""
    return _LIKE.get(engine, engine)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A fault of the catalogue with a strength."""

    name: str
    fault: Fault
    strength: float
    """The strength in the fault's unit; 0 if the fault has no strength."""
    rank: int | None = None
    """The only rank with the fault; None means every rank."""

    def on(self, rank: int) -> bool:
        """Whether this rank has the fault."""
        return self.rank in (None, rank)

    def needs(self, engine: str) -> dict[str, str]:
        """Returns the options without which the fault cannot be planted in an engine, or changes
        nothing."""
        spec = next(s for s in self.fault.engines if s.partition(":")[0] == planted_as(engine))
        written = f"{spec.partition(':')[2]},{self.fault.both}"
        return dict(item.split("=") for item in written.split(",") if item)

    def __str__(self) -> str:
        usual = self.fault.strength is None or self.strength == self.fault.strength.default
        strength = "" if usual else f"@{self.strength:g}"
        return f"{self.name}{strength}" + ("" if self.rank is None else f"@rank{self.rank}")


def faults_of(engine: str) -> dict[str, Fault]:
    """Returns the faults that can be planted in an engine."""
    return {
        name: fault
        for name, fault in FAULTS.items()
        if planted_as(engine) in (spec.partition(":")[0] for spec in fault.engines)
        if not fault.decode or engine not in _ONLY_SCORES
    }


def choose(engine: str, text: str) -> Chosen:
    """Parses `NAME`, `NAME@STRENGTH`, `NAME@rankN` or `NAME@STRENGTH@rankN`. Raises BadOption."""
    name, *more = text.split("@")
    where = f"engine {engine!r}: fault={text}"
    if name not in FAULTS:
        raise BadOption(f"{where} is unknown", f"choose from {', '.join(faults_of(engine))}")
    fault = FAULTS[name]
    rank = None
    if more and (found := re.fullmatch(r"rank([0-9]{1,6})", more[-1])):
        rank = int(found[1])
        more.pop()
    if not more:
        return Chosen(name, fault, fault.strength.default if fault.strength else 0.0, rank)
    if fault.strength is None:
        raise BadOption(f"{where}: it has no strength", f"write fault={name}, or {name}@rank1")
    (number, *others) = more
    if others or not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", number) or float(number) <= 0:
        raise BadOption(
            f"{where}: give a positive number as the strength, then a rank, as in {name}@0.1@rank1",
            f"its unit: {fault.strength.unit}; by default {fault.strength.default:g}",
        )
    return Chosen(name, fault, float(number), rank)


def check_fault(engine: str, options: Mapping[str, object]) -> None:
    """Raises BadOption if an engine's options exclude the fault that they name."""
    chosen, known = choose(engine, str(options["fault"])), faults_of(engine)
    where = f"engine {engine!r}: fault={chosen}"
    if chosen.name not in known:
        what = f"it can have {', '.join(known)}" if known else "it supports no planted fault"
        raise BadOption(f"{where} cannot be planted there", what)
    needed = chosen.needs(engine)
    if "experts" in needed and options.get("kernels") == "rlk":
        raise BadOption(
            f"{where} is in a product of transformers, and the kernels compute the experts",
            "leave kernels=rlk out",
        )
    why = chosen.fault.not_beside_kernels.get(planted_as(engine))
    if why and options.get("kernels") == "rlk":
        raise BadOption(f"{where} cannot be planted beside the kernels: {why}", "kernels=off")
    lacking = [f"{k}={v}" for k, v in needed.items() if str(options.get(k)) != v]
    if lacking:
        raise BadOption(f"{where} needs {', '.join(lacking)}")
    idle, _, value = chosen.fault.idle.partition("=")
    if idle and str(options.get(idle)) == value:
        raise BadOption(f"{where} changes nothing with {idle}={value}", f"leave {idle} out")
    if wrong := _wrong_rank(chosen, engine, options):
        raise BadOption(f"{where}: {wrong}")
    if options.get("spec") == "te":
        raise BadOption(
            f"{where} can only be planted in Megatron's local spec", "leave spec=te out"
        )


def _wrong_rank(chosen: Chosen, engine: str, options: Mapping[str, object]) -> str:
    """Why this rank alone cannot have the fault; empty if it can, or if every rank has the
    fault."""
    sizes = {key: int(str(options.get(key, 1))) for key in ("tp", "cp", "pp", "ep", "dp")}
    tp, cp, ranks = sizes["tp"], sizes["cp"], math.prod(sizes.values())
    if chosen.fault.kind == "boundaries" and cp > 1:
        return f"with cp={cp} sequences end where ranks can share them: leave cp out"
    if chosen.rank is None:
        return ""
    if chosen.rank >= ranks:
        known = ", ".join(f"rank{r}" for r in range(ranks))
        layout = ",".join(f"{key}={n}" for key, n in sizes.items() if n > 1 or key == "tp")
        return f"with {layout} there is {known if ranks > 1 else 'one rank: leave @rank out'}"
    if chosen.fault.kind in ("positions", "boundaries"):
        return "it is in the input of all ranks: leave @rank out"
    reported = ("logprob", "logits") if engine == "vllm" else ("logprob",)
    if chosen.rank % tp and chosen.fault.site in reported:
        first = chosen.rank - chosen.rank % tp
        return (
            f"rank {first} alone reports {chosen.fault.site}: write @rank{first}, or leave @rank "
            "out"
        )
    return ""
