"""Numerical contracts: what two engines owe each other, each limit with its reason and its source.

    id = "bf16"
    version = "2.0.0"           loosening any limit is a major bump
    dtypes = ["bfloat16"]
    min_coverage = 0.9          share of the expected rows that must be paired
    min_tokens = 32             sampled tokens without which nothing is said
    max_noise = 1e-3            how far a side may be from itself; left out, it repeats bitwise

    [sequences]                 how long the responses are for which the limits were chosen
    tokens = 1024
    ess = 0.5                   effective sample size that is left of sequences as long as that

    [[limits]]
    id = "max-dlogp"
    metric = "max_abs_dlogp"    of an edge, or `op_error`, or `rows_differ`
    warn = 0.1
    fail = 0.15
    why = "..."
    source = "measured: ..."

    [[budgets]]                 of operators, in units of their own rounding
    id = "rounding-norms"
    ops = ["attn_norm", "mlp_norm"]     or op_classes, of all others of these classes
    rms = 2.4                   any statistic of `results.RoundingErrors`
    why = "..."
    source = "measured: ..."

    [[regressions]]             of one run against an earlier one, for `gate A B`
    [[waivers]]                 breaches that somebody answers for, until a day

    [extends]                   a contract that this one starts from (see `judge.load`)

Tolerances live in these files only.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, model_validator

from rlk_align.model.operators import OPERATORS, OpClass
from rlk_align.results import EdgeName
from rlk_align.tail import Tail, TailLimit

RawMetric = Literal[
    "max_abs_dlogp",
    "mean_abs_dlogp",
    "p99_abs_dlogp",
    "p999_abs_dlogp",
    "k3",
    "ratio_mean_error",
    "clip_fraction",
    "token_mult_prob_error",
    "bit_mismatches",
]
"""The metrics of `results.EdgeMetrics`."""
LawMetric = Literal["noise_c", "ratio_bias", "excess"]
LAW_METRICS = get_args(LawMetric)
"""The metrics of `results.TokenNoise`, the law of healthy noise. `noise_c` is c; `ratio_bias` is
|mean ρ − 1|; both have an interval, and break a limit where the whole interval lies above it.
`excess` is the largest |Δ| / (1 − p) of a token in multiples of c."""
EdgeMetric = RawMetric | LawMetric
SiteMetric = Literal["op_error", "rows_differ"]
if TYPE_CHECKING:
    Op = str
else:
    Op = Literal[tuple(dict.fromkeys(o.site for o in OPERATORS.values()))]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Words = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Version = Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
Pattern = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_.*?]+$")]
"""A pattern of site names, e.g. `layers.*.q_norm`."""
Bound = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
"""No conversions: `fail = "0.5"` and `fail = true` are not numbers."""


class Limit(TailLimit, BaseModel):
    """One bound. A value above `fail`, or a NaN, breaks it; one above `warn` is reported."""

    model_config = _STRICT

    id: Name
    metric: EdgeMetric | SiteMetric
    """An edge's metric; or, of a site, `rows_differ`, or `op_error`: the largest
    |a − b| / (atol + rtol · max(|a|, |b|)) over the rows whose inputs are bit-equal."""
    warn: Bound | None = None
    fail: Bound
    tail: Tail | None = None
    """For a maximum: what it may be in this many tokens, `fail` being what no token may reach."""
    floor: Bound | None = None
    """For `excess`: the least c. An excess is counted in multiples of it where the run's own c is
    smaller."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Sampled tokens below which it does not apply: a quantile of few is their largest."""
    edges: Annotated[list[EdgeName], Field(min_length=1)] | None = None
    """The edges that it applies to; None is every judged edge."""
    dtypes: Annotated[list[Dtype], Field(min_length=1)] | None = None
    """None is every dtype of the contract."""
    op_classes: Annotated[list[OpClass], Field(min_length=1)] | None = None
    """For a site's metric: which operators; None is all."""
    sites: Annotated[list[Pattern], Field(min_length=1)] | None = None
    """For a site's metric: which sites; None is all."""
    atol: Bound | None = None
    rtol: Bound | None = None
    unrefereed: bool = False
    """For `op_error`: whether it applies only where a side's operator could not be recomputed in
    float64, so that no budget judges it."""
    healthy: Bound | None = None
    """The largest value that was measured on healthy pairs."""
    why: Words
    source: Words
    """`published: …`, `measured: …` with N, hardware, commit and date, or `derived: …`."""
    reason: Words | None = None
    """Why it is looser than the limit of the contract that is extended."""

    @property
    def of_site(self) -> bool:
        return self.metric in ("op_error", "rows_differ")

    def judges(self, edge: EdgeName, tokens: int) -> bool:
        """Whether it applies to an edge of this many tokens."""
        return tokens >= self.min_tokens and (self.edges is None or edge in self.edges)

    def covers(self, site: str, op_class: str) -> bool:
        """Whether it applies to that site."""
        if self.op_classes is not None and op_class not in self.op_classes:
            return False
        return self.sites is None or any(fnmatchcase(site, p) for p in self.sites)

    @model_validator(mode="after")
    def _consistent(self) -> "Limit":
        if (self.metric == "op_error") != (self.atol is not None and self.rtol is not None):
            raise ValueError(f"limit {self.id!r}: atol and rtol belong to op_error, and only there")
        if (self.op_classes or self.sites) and not self.of_site:
            raise ValueError(f"limit {self.id!r}: op_classes and sites belong to a site's metric")
        if self.warn is not None and self.warn > self.fail:
            raise ValueError(f"limit {self.id!r}: its `fail` is below its `warn`")
        if self.tail is not None and self.metric not in ("max_abs_dlogp", "excess"):
            raise ValueError(f"limit {self.id!r}: only a maximum has a tail")
        if (self.floor is not None) != (self.metric == "excess"):
            raise ValueError(f"limit {self.id!r}: a floor belongs to excess, and only there")
        if self.unrefereed and self.metric != "op_error":
            raise ValueError(f"limit {self.id!r}: unrefereed belongs to op_error")
        return self


class Budget(BaseModel):
    """How far operators may be from exact ones, in units of their own rounding: a side's outputs
    against float64 on its own inputs. A magnitude above its bound, or a NaN, breaks it."""

    model_config = _STRICT

    id: Name
    ops: Annotated[list[Op], Field(min_length=1)] = []
    op_classes: Annotated[list[OpClass], Field(min_length=1)] = []
    """The classes whose operators it applies to, except operators that a budget names."""
    rms: Bound
    gain: Bound
    row_gain: Bound
    head_gain: Bound
    feature_rms: Bound
    feature_gain: Bound
    feature_shift: Bound
    row_rms: Bound
    row_rms_by_width: bool = False
    """Whether `row_rms` is that of rows of 96 features, and grows for narrower rows and shrinks for
    wider ones as the largest of their rms does by chance; `row_gain` grows for narrower rows
    (`judge.chance`)."""
    peak: Bound
    warn: Annotated[float, Field(gt=0, le=1)] | None = None
    """The share of a bound from which on a value is reported."""
    why: Words
    source: Words
    reason: Words | None = None
    """Why it is looser than the budget of the contract that is extended."""

    @model_validator(mode="after")
    def _of_something(self) -> "Budget":
        if not self.ops and not self.op_classes:
            raise ValueError(f"budget {self.id!r}: give it ops or op_classes")
        return self


STATISTICS = tuple(
    n for n, f in Budget.model_fields.items() if f.annotation is float and n != "warn"
)
"""The statistics of `results.RoundingErrors` that a budget bounds."""


class Regression(BaseModel):
    """How much worse a run may be than an earlier one: value ≤ factor · earlier + plus."""

    model_config = _STRICT

    id: Name
    metric: RawMetric | Literal["rows_differ", "rounding_rms"]
    """An edge's metric; or of each site the rows that differ, or, of each operator that is compared
    with float64, the rms of its errors."""
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    plus: Bound = 0.0
    why: Words
    source: Words


class Waiver(BaseModel):
    """Breaches of one limit that somebody answers for, until a day."""

    model_config = _STRICT

    limit: Name
    """The id of a limit or a budget."""
    sites: Annotated[list[Pattern], Field(min_length=1)] | None = None
    edges: Annotated[list[EdgeName], Field(min_length=1)] | None = None
    owner: Words
    reason: Words
    expires: date
    """The last day on which it holds."""

    def covers(self, limit: str, site: str | None, edge: str) -> bool:
        """Whether it speaks of a breach."""
        if limit != self.limit or (self.edges is not None and edge not in self.edges):
            return False
        return self.sites is None or any(fnmatchcase(site or "", p) for p in self.sites)


class Sequences(BaseModel):
    """The sequences that the limits of tokens were chosen for. Where Δ has the variance σ² at each
    token, a sequence of T tokens has a log-ratio of variance Tσ², and of N such sequences
    exp(−Tσ²) · N count: the effective sample size."""

    model_config = _STRICT

    tokens: Annotated[int, Field(ge=1)]
    ess: Annotated[float, Field(gt=0, lt=1)]
    """At least this share of the sequences counts, at limits that are used up."""


class Healthy(BaseModel):
    """Where healthy models lie in metrics that are shown beside what is judged."""

    model_config = _STRICT

    source: Words
    ranges: dict[RawMetric, Annotated[list[Bound], Field(min_length=2, max_length=2)]]
    """Metric -> the least and the largest value."""

    @model_validator(mode="after")
    def _ordered(self) -> "Healthy":
        for metric, (low, high) in self.ranges.items():
            if low > high:
                raise ValueError(f"healthy {metric}: {low:g} is above {high:g}")
        return self


class Alike(BaseModel):
    """When an excess that both sides share says that the unit is wrong, and no side: nothing is
    concluded then."""

    model_config = _STRICT

    within: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """Both sides exceed an operator's budget by less than this factor."""
    apart: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """The larger of the two figures is at most this many times the smaller."""


class Extends(BaseModel):
    """The contract that another one starts from, pinned."""

    model_config = _STRICT

    id: Name
    """The id of a built-in contract, or of the one in `file`."""
    version: Version
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    file: str | None = None
    """A path from the contract's own folder."""
    reason: Words | None = None
    """Why what stands at the head (coverage, tokens, noise) is looser."""


class Contract(BaseModel):
    """What two engines owe each other."""

    model_config = _STRICT

    id: Name
    version: Version
    description: str
    extends: Extends | None = None
    dtypes: Annotated[list[Dtype], Field(min_length=1)]
    min_coverage: Annotated[float, Field(gt=0, le=1)]
    min_tokens: Annotated[int, Field(ge=1)]
    max_noise: Bound | None = None
    """Largest |Δ| by which a side may differ from itself; None requires it to repeat itself bit for
    bit."""
    alike: Alike | None = None
    """None blames both sides for an excess that they share."""
    sequences: Sequences | None = None
    healthy: Healthy | None = None
    """Where healthy models lie, for what is shown and not judged."""
    limits: Annotated[list[Limit], Field(min_length=1)]
    budgets: list[Budget] = []
    """None, or for every operator of the model that is judged."""
    regressions: list[Regression] = []
    waivers: list[Waiver] = []
    _reference: str = PrivateAttr(default="")

    @property
    def reference(self) -> str:
        """What names it on the command line: the built-in id, or the path of its file."""
        return self._reference or self.id

    @cached_property
    def sha256(self) -> str:
        """A digest of what it says, comments and layout aside."""
        return hashlib.sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()

    def budget(self, op: str, op_class: str = "") -> Budget | None:
        """What an operator may be off by: the budget that names it, or else that of its class, or
        else the widest of those that name operators of its class. None if the contract has no
        budgets."""
        for budget in self.budgets:
            if op in budget.ops:
                return budget
        for budget in self.budgets:
            if op_class in budget.op_classes:
                return budget
        alike = [b for b in self.budgets if any(OPERATORS[n].op_class == op_class for n in b.ops)]
        return max(alike, key=lambda b: b.rms, default=None)

    def uncovered(
        self, limits: Iterable[Limit], operators: Iterable[tuple[str, str, str]]
    ) -> Iterator[tuple[str, str]]:
        """A contract that limits some operators has to limit each of them: yields each operator of
        (site, operator, class) that has neither a budget nor one of the limits, as (site, what is
        missing). The log-prob has the limits of tokens."""
        of_operators = [x for x in limits if x.metric == "op_error"]
        for site, op, op_class in operators:
            if self.budgets:
                if self.budget(op, op_class) is None:
                    yield site, f"a budget of the class {op_class}"
                continue
            limited = any(x.covers(site, op_class) for x in of_operators)
            if of_operators and op_class != "logprob" and not limited:
                yield site, f"a limit of op_error that covers the class {op_class}"

    def limits_for(self, dtype: str) -> list[Limit]:
        """The limits that hold for a comparison in that dtype."""
        return [x for x in self.limits if x.dtypes is None or dtype in x.dtypes]

    @model_validator(mode="after")
    def _whole(self) -> "Contract":
        for problem in (*self._repeated(), *self._missing_dtypes()):
            raise ValueError(problem)
        known = {*(x.id for x in self.limits), *(b.id for b in self.budgets), "finite"}
        for waiver in self.waivers:
            if waiver.limit not in known:
                raise ValueError(f"a waiver of {waiver.limit!r}, which is not a limit")
        return self

    def _repeated(self) -> Iterator[str]:
        named: Sequence[Limit | Budget | Regression] = (
            *self.limits,
            *self.budgets,
            *self.regressions,
        )
        ids = [x.id for x in named]
        if len(set(ids)) != len(ids):
            yield "limit ids are not unique"
        named_by_budgets = [n for b in self.budgets for n in (*b.ops, *b.op_classes)]
        twice = [n for n in named_by_budgets if named_by_budgets.count(n) > 1]
        if twice:
            yield f"{twice[0]} has two budgets"

    def _missing_dtypes(self) -> Iterator[str]:
        """A limit that is given by dtype is given for each."""
        by_dtype = [x for x in self.limits if x.dtypes is not None]
        for limit in by_dtype:
            alike = [x for x in by_dtype if _same_thing(x, limit)]
            have = {d for x in alike for d in x.dtypes or ()}
            missing = [d for d in self.dtypes if d not in have]
            if missing:
                yield f"limit {limit.id!r}: {limit.metric} has no entry for {', '.join(missing)}"
            foreign = [d for d in limit.dtypes or () if d not in self.dtypes]
            if foreign:
                yield f"limit {limit.id!r}: {foreign[0]} is not a dtype of the contract"


def _same_thing(a: Limit, b: Limit) -> bool:
    names = ("metric", "edges", "op_classes", "sites")
    return all(getattr(a, n) == getattr(b, n) for n in names)
