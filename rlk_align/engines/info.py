"""What is known about an engine without importing it."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlk_align.model.quantised import FP8Weights
from rlk_align.model.shape import ModelShape
from rlk_align.results import Quantisation

OptionValue = str | int | float | bool
ReadOption = Callable[[str], OptionValue | None]
"""Returns the value of an option: the one that the user wrote, or the default."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an engine spec."""

    kind: type = str
    default: OptionValue | None = None
    """The value if the user writes none; None leaves the choice to the engine."""
    choices: tuple[str, ...] = ()
    """The allowed values; empty if every value of its kind is allowed."""
    starts_only: bool = False
    """Whether the option only affects how the engine is started, and not what it computes."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine as the command line, `doctor` and the parent process see it."""

    target: str
    """`module:class` of the engine."""
    package: str = ""
    """The Python package that it needs; empty if it needs none."""
    install: str = ""
    """The command that installs the package."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """The engine's own options, beside those that every engine takes."""
    ranks: tuple[str, ...] = ()
    """The options whose product is the number of processes that rlk-align starts; empty for one."""
    modules: str = ""
    """`module:class` of the engine for `compare --modules`, which runs a model of any family; empty
    if the engine does not support it."""
    own_ranks: str = ""
    """The option that sets how many ranks the engine starts itself."""
    samples: bool = True
    """Whether it can sample, or only score responses that another engine sampled."""
    compiles: bool = False
    """Whether users run it compiled, or with CUDA graphs: its un-tapped production mode is then
    measured on GPUs."""
    spare_positions: int = 0
    """The number of positions of the model's context that the engine reserves."""
    fused: tuple[tuple[str, str], ...] = ()
    """Pairs of operators that it computes as one, the second reading the first's output. A
    difference cannot be traced to one operator of such a pair."""
    patch: str = ""
    """`module:class` of the `engines.patch.BasePatch` that `kernels=rlk` uses; empty if our kernels
    do not run in this engine."""
    planting: str = ""
    """`module:function` that plants a fault: it takes the live engine and the chosen fault, and
    returns an `ExitStack` that removes the fault. It is empty if the engine supports no fault."""
    one_kernel: tuple[frozenset[str], ...] = ()
    """Groups of operators that it computes together, to which `except` applies as a whole."""
    builds_on: tuple[str, ...] = ()
    """Other engines of `engines/` whose sources it also computes with."""
    tested: tuple[str, ...] = ()
    """Distributions of `engines.tested` that its adapter depends on."""
    worker_needs: tuple[str, ...] = ()
    """Requirements of its worker in an environment of its own, `python=`, that are wider than
    rlk-align's: the engine pins an older version."""
    stand_ins: tuple[str, ...] = ()
    """Packages that it imports and does not call: where one is missing, its worker puts an empty
    module in its place, and says so."""
    loads_lora: bool = False
    """Whether it computes with a LoRA adapter, `lora=PATH`."""
    lacks_lora: str = ""
    """Why it does not, if that is known."""
    merges_lora: bool = False
    """Whether it can merge an adapter into its weights, `merged=1`."""
    mixes_lora: bool = False
    """Whether it computes requests with different adapters, and without one, in one batch."""
    lora_package: str = ""
    """The package that it needs for an adapter; empty if it needs none."""
    largest_lora_rank: int = 0
    """The largest rank of an adapter that it supports; 0 for any."""
    reads_fp8: frozenset[Quantisation] = frozenset()
    """The formats of checkpoints in fp8 that it loads."""
    check_fp8: Callable[[ReadOption, FP8Weights, ModelShape], None] = lambda *_: None
    """Raises an RlkError for a checkpoint in one of these formats that it cannot run."""
    takes_decoder: bool = False
    """Whether it runs the decoder of a checkpoint that also sees images."""
    rounds_with: str = ""
    """The feature of an x86 processor without which its own kernels cut off the lower 16 bits of
    float32 numbers instead of rounding them to bfloat16; empty if they always round."""
    waits: tuple[str, ...] = ()
    """Substrings of the paths of its code that waits for another process."""
    conflict: Callable[[Mapping[str, OptionValue]], str | None] = lambda options: None
    """Says why these options contradict each other; None if they do not."""
    check: Callable[[ReadOption, dict[str, Any], ModelShape], None] = lambda *_: None
    """Raises an RlkError if the options or config.json ask for something it cannot run."""

    @property
    def missing(self) -> str:
        """The first package that it needs and that is not installed; empty if all are installed."""
        needed = (self.package, "torch") if self.package else ()
        return next((name for name in needed if not _installed(name)), "")

    @property
    def installed(self) -> bool:
        return not self.missing


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # The parent package is missing as well.
        return False
