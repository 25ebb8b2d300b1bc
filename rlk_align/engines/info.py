"""What can be known of an engine without importing it."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlk_align.model.families import ModelShape

OptionValue = str | int | float | bool
Asked = Callable[[str], OptionValue | None]
"""What an option is, by its name: as given, or its default."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an engine spec."""

    kind: type = str
    default: OptionValue | None = None
    """What it is where it is not given; None leaves it to the engine."""
    choices: tuple[str, ...] = ()
    """The values that it may have; empty for any of its kind."""
    starts_only: bool = False
    """Whether it says how the engine is started, and nothing of what it computes."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine, as the command line, `doctor` and the parent process know it."""

    target: str
    """`module:class` of the engine."""
    package: str = ""
    """The Python package it needs; empty for none."""
    install: str = ""
    """How to get that package."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Options of its own, beside the ones that every engine takes."""
    ranks: tuple[str, ...] = ()
    """The options whose product says in how many processes of ours it runs; empty where in one."""
    own_ranks: str = ""
    """The option that says how many ranks the engine starts itself."""
    samples: bool = True
    """Whether it can sample, or only scores what another engine sampled."""
    compiles: bool = False
    """Whether users run it compiled: its un-tapped production mode is then measured on GPUs."""
    spare_positions: int = 0
    """Positions of the model's context that the engine needs for itself."""
    fused: tuple[tuple[str, str], ...] = ()
    """Pairs of operators that it computes as one, the second reading the first's output: which of
    the two a difference comes from cannot be told."""
    patch: str = ""
    """`module:class` of the `engines.patch.Patch` by which `kernels=rlk` puts our kernels into it;
    empty if our kernels do not run in it."""
    planting: str = ""
    """`module:function` that plants a fault: it takes the live engine and the chosen fault, and
    returns an `ExitStack` that removes the fault. It is empty if the engine supports no fault."""
    one_kernel: tuple[frozenset[str], ...] = ()
    """Operators that it computes by one product, or one function: `except` leaves them together."""
    builds_on: tuple[str, ...] = ()
    """Engines of `engines/` whose sources it computes with too."""
    tested: tuple[str, ...] = ()
    """Distributions of `engines.tested` that its adapter depends on."""
    waits: tuple[str, ...] = ()
    """Parts of the paths of its code that waits for another process."""
    conflict: Callable[[Mapping[str, OptionValue]], str | None] = lambda options: None
    """What is wrong with these options together; None where nothing is."""
    check: Callable[[Asked, dict[str, Any], ModelShape], None] = lambda option, config, shape: None
    """Raises an RlkError where options or config.json ask for what it cannot run."""

    @property
    def missing(self) -> str:
        """The first package that it needs and that is not installed; empty where all are."""
        needed = (self.package, "torch") if self.package else ()
        return next((name for name in needed if not _installed(name)), "")

    @property
    def installed(self) -> bool:
        return not self.missing


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # The package's parent is not there either.
        return False
