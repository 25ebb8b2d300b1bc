"""The contract of a run: the limits of diagnoses and of monitored steps, and the thresholds of the
signs of a fault, with their reasons and sources."""

import hashlib
import tomllib
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rlk_align.data import data_path
from rlk_align.errors import ContractError
from rlk_align.files import read_text
from rlk_align.logs.diagnose.record import Name
from rlk_align.tail import Tail, TailLimit
from rlk_align.text import complaint

Words = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Bound = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Dtype = Literal["bfloat16", "float16", "float32"]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_LIMITED: tuple[Name, ...] = (
    *("misaligned", "mask-shifted", "missing", "low-precision", "wrong-token", "logprob-scaled"),
    *("temperature", "truncation", "turn-boundary", "packing", "rope", "stale-cache"),
    *("stale-weights", "decode-state", "routing", "dropout", "numerics"),
)
NEEDED = (*((name, None) for name in _LIMITED), ("missing", "null"), ("numerics", "negligible"))
"""The (diagnosis, statistic) that every contract limits; None is the statistic of the diagnosis
itself. Quantisation is limited, too, once for each dtype."""
OPTIONAL: frozenset[tuple[Name, str | None]] = frozenset(
    {
        *(("duplicated", None), ("duplicated", "chance"), ("missing", "rescored")),
        *(("stale-weights", "labels"), ("dropout", "repeat"), ("truncation", "kept-mass")),
    }
)
"""The (diagnosis, statistic) that contracts of an earlier version lack. The diagnosis is then
omitted, or uses the limit that was used before."""
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")


class _Limit(TailLimit, BaseModel):
    """The fields that limits of a run and limits of a step share."""

    model_config = _STRICT

    fail: Bound
    tail: Tail | None = None
    """For the largest value of N tokens (see `fail_at`)."""
    why: Words
    source: Words
    """`published: …`, `measured: …` or `derived: …`."""


Statistic = Literal["null", "rescored", "chance", "labels", "repeat", "negligible", "kept-mass"]


class RunLimit(_Limit):
    """A diagnosis holds if the whole interval of its statistic is above `fail`."""

    diagnosis: Name
    statistic: Statistic | None = None
    dtype: Dtype | None = None
    floor: Bound | None = None
    """For a statistic in multiples of c: the smallest c that counts as its unit."""
    healthy: Bound | None = None
    """The largest value of healthy runs."""


class StepLimit(_Limit):
    """A bound on a metric of one step. A value beyond the bound, or a NaN, breaks it, and `why` is
    the meaning of such a value."""

    name: Words
    metric: Literal[
        "ratio_error", "c", "excess", "k3", "mean_abs", "outliers", "missing_share", "duplicated"
    ]
    """`missing_share` is a share of the scored tokens, and `duplicated` a share of the groups. If
    k3 is not known, `k3` is k2, or else k1: all three estimate one KL divergence."""
    warn: Bound


class TrendLimits(BaseModel):
    """The limits of a rise of k2, in multiples of its own earlier values."""

    model_config = _STRICT

    warn: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """A rise reaches at least this many times the level before it."""
    fail: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """A rise fails if it reaches this many times the level before it."""
    spread: Bound
    """A rise is also beyond this many standard deviations of the steps before it."""
    smallest: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """A rise also reaches at least this k2, scaled by (1 − p)²."""
    slow_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """A slow rise reaches at least this many times the level of the run's first steps."""
    source: Words


class Threshold(BaseModel):
    """The value from which on a quantity counts as a sign of a fault."""

    model_config = _STRICT

    name: Words
    """`SUBJECT.QUANTITY`, e.g. `misaligned.tokens`."""
    value: Annotated[float, Field(allow_inf_nan=False)]
    why: Words
    source: Words
    """The source of a limit, or `chosen: …`."""


class RunContract(BaseModel):
    """The limits on the mismatch between the two sides of a run."""

    model_config = _STRICT

    kind: Literal["run"]
    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
    description: Words
    min_tokens: Annotated[int, Field(ge=1)]
    """With fewer compared tokens nothing is concluded."""
    limits: list[RunLimit]
    steps: list[StepLimit]
    trend: TrendLimits
    thresholds: list[Threshold] = []
    """A threshold that is left out has the value of the built-in contract."""

    @cached_property
    def sha256(self) -> str:
        """A digest of its content, without comments and layout."""
        return hashlib.sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()

    def limit(self, name: Name, statistic: str | None = None, dtype: Dtype | None = None) -> float:
        """Returns the bound of a diagnosis."""
        return self._limits[name, statistic, dtype].fail

    def single_token(self, dtype: Dtype) -> RunLimit | None:
        """Returns the limit on the largest error of a token; None in contracts of an earlier
        version."""
        return self._limits.get(("single-token", None, dtype))

    def threshold(self, name: str) -> float:
        """Returns the value of a threshold."""
        return self._thresholds[name]

    def asks(self, name: Name, statistic: str | None = None) -> bool:
        """Whether the contract has this limit, which is one of OPTIONAL."""
        return (name, statistic, None) in self._limits

    @cached_property
    def _limits(self) -> dict[tuple[Name, str | None, Dtype | None], RunLimit]:
        return {(x.diagnosis, x.statistic, x.dtype): x for x in self.limits}

    @cached_property
    def _thresholds(self) -> dict[str, float]:
        return built_in_thresholds() | {x.name: x.value for x in self.thresholds}

    def model_post_init(self, _context: object) -> None:
        """Raises ValueError for a limit that is missing, and for a limit or a threshold that is
        unknown or given twice."""
        self._check_limits()
        names = [x.name for x in self.thresholds]
        for name in names:
            if name not in built_in_thresholds():
                raise ValueError(f"the threshold {name!r} is unknown")
            if names.count(name) > 1:
                raise ValueError(f"the threshold {name!r} is given twice")

    def _check_limits(self) -> None:
        wanted = {(*key, None) for key in NEEDED} | {("quantisation", None, d) for d in DTYPES}
        names = {x.name for x in self.steps}
        if len(self._limits) != len(self.limits) or len(names) != len(self.steps):
            raise ValueError("a limit is given twice")
        optional = {(*key, None) for key in OPTIONAL} | {("single-token", None, d) for d in DTYPES}
        limited = self._limits.keys() - optional
        wrong = [f"the limit of {' '.join(filter(None, x))} is missing" for x in wanted - limited]
        wrong += [f"the limit of {' '.join(filter(None, x))} is unknown" for x in limited - wanted]
        if wrong:
            raise ValueError("; ".join(sorted(wrong)))
        self._check_single_tokens()

    def _check_single_tokens(self) -> None:
        of_tokens = [x for x in self.limits if x.diagnosis == "single-token"]
        if len(of_tokens) not in (0, len(DTYPES)):
            raise ValueError("single-token is limited in some dtypes, and not in others")
        if any((x.floor is not None) != (x.diagnosis == "single-token") for x in self.limits):
            raise ValueError("a floor belongs to single-token, and only there")
        excess = [x for x in self.steps if x.metric == "excess"]
        if excess and not of_tokens:
            raise ValueError(f"the step {excess[0].name!r} needs the limits of single-token")
        if any(x.tail and x not in (*of_tokens, *excess) for x in (*self.limits, *self.steps)):
            raise ValueError("a tail belongs to the largest error of a token, and only there")


RUN_CONTRACT = "run"
"""The name of the contract for runs that is built in."""


@cache
def built_in_thresholds() -> dict[str, float]:
    """Returns the thresholds of the built-in contract, which are all that exist, by name."""
    document = tomllib.loads(read_text(data_path("contracts") / "run.toml"))
    return {x["name"]: x["value"] for x in document["thresholds"]}


def load_run_contract(name: str = RUN_CONTRACT) -> RunContract:
    """Loads the built-in contract for runs, or a TOML file by path. Raises ContractError."""
    path = data_path("contracts") / "run.toml" if name == RUN_CONTRACT else Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise ContractError(
            f"unknown contract for runs: {name!r}", "built in: run; or a path to a .toml"
        )
    try:
        return RunContract.model_validate(tomllib.loads(read_text(path)))
    except ValidationError as error:
        raise ContractError(f"{path}: {complaint(error)}", _LIKE) from error
    except ValueError as error:
        raise ContractError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error


_LIKE = "start from a copy of contracts/run.toml; the contracts of two engines are of another kind"
