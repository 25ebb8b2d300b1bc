"""Numerical contracts: how far two engines may differ, each limit with its reason and source.

id = "bf16" version = "2.0.0"           loosening any limit is a major bump dtypes = ["bfloat16"]
min_coverage = 0.9          share of the expected rows that must be paired min_tokens = 32
sampled tokens below which nothing is concluded max_noise = 1e-3            how far a side may
differ from its own repetition; omitted: bit for bit

[sequences]                 the length of responses for which the limits were chosen tokens = 1024
ess = 0.5                   effective sample size that remains of sequences of that length

[[limits]] id = "max-dlogp" metric = "max_abs_dlogp"    of an edge, or `op_error`, or `rows_differ`
warn = 0.1 fail = 0.15 why = "..." source = "measured: ..."

[[budgets]]                 of operators, in units of their own rounding id = "rounding-norms" ops =
["attn_norm", "mlp_norm"]     or op_classes, for all other operators of these classes rms = 2.4
any statistic of `results.RoundingErrors` why = "..." source = "measured: ..."

[[regressions]]             of one run against an earlier one, for `gate A B` [[waivers]]
breaches that a named owner excuses until a date

[extends]                   a contract that this one starts from (see `judge.load`)

Tolerances live in these files only.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, model_validator

from rlk_align.model.operators import OPERATORS, OpClass
from rlk_align.results import EdgeName, Quantisation
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
|mean ρ − 1|. Both have an interval, and break a limit where the whole interval lies above it.
`excess` is the largest |Δ| / (1 − p) of a token, in multiples of c."""
DistributionMetric = Literal[
    "kl",
    "reverse_kl",
    "total_variation",
    "vocabulary_max_abs_dlogp",
    "top1_disagreement",
    "top20_disagreement",
    "token_excess",
]
DISTRIBUTION_METRICS = get_args(DistributionMetric)
"""The metrics of `results.Distribution`, which exist where both sides keep logits. `token_excess`
is the largest mean |Δ| of a token of the vocabulary, in multiples of that of a typical token."""
EdgeMetric = RawMetric | LawMetric | DistributionMetric
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
    """For a maximum: its bound, which depends on the number of tokens; `fail` bounds it for any
    number."""
    floor: Bound | None = None
    """For `excess`, the smallest c; for `token_excess`, the smallest mean |Δ| of a typical token.
    Where the run's own is smaller, the excess is counted in multiples of this value."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Sampled tokens below which the limit does not apply: a quantile of few tokens is their
    largest value."""
    edges: Annotated[list[EdgeName], Field(min_length=1)] | None = None
    """The edges that the limit applies to; None means every judged edge."""
    dtypes: Annotated[list[Dtype], Field(min_length=1)] | None = None
    """None means every dtype of the contract."""
    op_classes: Annotated[list[OpClass], Field(min_length=1)] | None = None
    """For a site's metric: the classes of operators; None means all."""
    sites: Annotated[list[Pattern], Field(min_length=1)] | None = None
    """For a site's metric: the sites; None means all."""
    atol: Bound | None = None
    rtol: Bound | None = None
    unrefereed: bool = False
    """For `op_error`: whether the limit applies only where a side's operator could not be
    recomputed in float64, so that no budget judges it."""
    quantisation: Quantisation | None = None
    """For an edge's metric: the limit applies between the two sides if the weights of one or both
    are in this format and differ from the other's, in place of all limits on log-probs without
    it."""
    healthy: Bound | None = None
    """The largest value that was measured on healthy pairs."""
    why: Words
    source: Words
    """`published: …`, `measured: …` with N, hardware, commit and date, or `derived: …`."""
    reason: Words | None = None
    """Why the limit is looser than that of the extended contract."""

    @property
    def of_site(self) -> bool:
        return self.metric in ("op_error", "rows_differ")

    @property
    def of_distribution(self) -> bool:
        return self.metric in DISTRIBUTION_METRICS

    def judges(self, edge: EdgeName, tokens: int) -> bool:
        """Whether the limit applies to an edge with this many tokens."""
        return tokens >= self.min_tokens and (self.edges is None or edge in self.edges)

    def covers(self, site: str, op_class: str) -> bool:
        """Whether the limit applies to that site."""
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
        if (self.floor is not None) != (self.metric in ("excess", "token_excess")):
            raise ValueError(f"limit {self.id!r}: a floor belongs to excess, and only there")
        if self.quantisation is not None and self.of_site:
            raise ValueError(f"limit {self.id!r}: quantisation belongs to an edge's metric")
        if self.unrefereed and self.metric != "op_error":
            raise ValueError(f"limit {self.id!r}: unrefereed belongs to op_error")
        return self


class Budget(BaseModel):
    """How far the outputs of operators may be from exact ones, in roundings: a side's outputs are
    compared with float64 on the same inputs. A magnitude above its bound, or a NaN, breaks the
    budget."""

    model_config = _STRICT

    id: Name
    ops: Annotated[list[Op], Field(min_length=1)] = []
    op_classes: Annotated[list[OpClass], Field(min_length=1)] = []
    """The classes of operators that the budget applies to, without operators that a budget
    names."""
    rms: Bound
    gain: Bound
    row_gain: Bound
    head_gain: Bound
    feature_rms: Bound
    feature_gain: Bound
    feature_shift: Bound
    row_rms: Bound
    row_rms_by_width: bool = False
    """Whether `row_rms` is stated for rows of 96 features, and is converted to other widths as the
    largest rms of a row changes by chance; `row_gain` then grows for narrower rows
    (`judge.chance`)."""
    peak: Bound
    warn: Annotated[float, Field(gt=0, le=1)] | None = None
    """The share of a bound above which a value is reported."""
    why: Words
    source: Words
    reason: Words | None = None
    """Why the budget is looser than that of the extended contract."""

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
    """A metric of an edge; or the rows of each site that differ; or the rms error of each operator
    that is compared with float64."""
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    plus: Bound = 0.0
    why: Words
    source: Words


class Waiver(BaseModel):
    """Excuses breaches of one limit until a date; a named owner is responsible."""

    model_config = _STRICT

    limit: Name
    """The id of a limit or a budget."""
    sites: Annotated[list[Pattern], Field(min_length=1)] | None = None
    edges: Annotated[list[EdgeName], Field(min_length=1)] | None = None
    owner: Words
    reason: Words
    expires: date
    """The last day on which the waiver is valid."""

    def covers(self, limit: str, site: str | None, edge: str) -> bool:
        """Whether the waiver excuses a breach."""
        if limit != self.limit or (self.edges is not None and edge not in self.edges):
            return False
        return self.sites is None or any(fnmatchcase(site or "", p) for p in self.sites)


class Sequences(BaseModel):
    """The sequences for which the limits on tokens were chosen. Where Δ has the variance σ² at each
    token, the log-ratio of a sequence of T tokens has the variance Tσ², and N such sequences have
    an effective sample size of N · exp(−Tσ²)."""

    model_config = _STRICT

    tokens: Annotated[int, Field(ge=1)]
    ess: Annotated[float, Field(gt=0, lt=1)]
    """The smallest effective sample size per sequence where the limits are reached."""


class Healthy(BaseModel):
    """The range of healthy models in metrics that reports show beside the judged values."""

    model_config = _STRICT

    source: Words
    ranges: dict[RawMetric, Annotated[list[Bound], Field(min_length=2, max_length=2)]]
    """Metric -> the smallest and the largest value."""

    @model_validator(mode="after")
    def _ordered(self) -> "Healthy":
        for metric, (low, high) in self.ranges.items():
            if low > high:
                raise ValueError(f"healthy {metric}: {low:g} is above {high:g}")
        return self


class Alike(BaseModel):
    """When both sides exceed a budget so similarly that its unit is more likely wrong than both
    sides; nothing is concluded then."""

    model_config = _STRICT

    within: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """Both sides exceed an operator's budget by less than this factor."""
    apart: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """The larger of the two figures is at most this many times the smaller."""


class Extends(BaseModel):
    """The contract that another one extends, pinned by version and digest."""

    model_config = _STRICT

    id: Name
    """The id of a built-in contract, or of the one in `file`."""
    version: Version
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    file: str | None = None
    """A path relative to the folder of the extending contract."""
    reason: Words | None = None
    """Why the values at the head (coverage, tokens, noise) are looser."""


class Contract(BaseModel):
    """How far two engines may differ."""

    model_config = _STRICT

    id: Name
    version: Version
    description: str
    extends: Extends | None = None
    dtypes: Annotated[list[Dtype], Field(min_length=1)]
    min_coverage: Annotated[float, Field(gt=0, le=1)]
    min_tokens: Annotated[int, Field(ge=1)]
    max_noise: Bound | None = None
    """The largest |Δ| by which a side may differ from its own repetition; None requires a bitwise
    repetition."""
    alike: Alike | None = None
    """None: an excess that both sides share is a breach of both."""
    sequences: Sequences | None = None
    healthy: Healthy | None = None
    """The ranges of healthy models, which are shown and not judged."""
    limits: Annotated[list[Limit], Field(min_length=1)]
    budgets: list[Budget] = []
    """Either empty, or with a budget for every operator of the judged model."""
    regressions: list[Regression] = []
    waivers: list[Waiver] = []
    _reference: str = PrivateAttr(default="")

    @property
    def reference(self) -> str:
        """Its name on the command line: the built-in id, or the path of its file."""
        return self._reference or self.id

    @cached_property
    def sha256(self) -> str:
        """A digest of its content, without comments and layout."""
        return hashlib.sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()

    def budget(self, op: str, op_class: str = "") -> Budget | None:
        """Returns an operator's budget: the one that names the operator, else that of its class,
        else the widest budget that names operators of its class. Returns None without budgets."""
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
        """Yields (site, what is missing) for each (site, operator, class) that has neither a budget
        nor one of the limits, where the contract limits other operators. The log-prob needs none:
        limits on tokens apply to it."""
        of_operators = [x for x in limits if x.metric == "op_error"]
        for site, op, op_class in operators:
            if self.budgets:
                if self.budget(op, op_class) is None:
                    yield site, f"a budget of the class {op_class}"
                continue
            limited = any(x.covers(site, op_class) for x in of_operators)
            if of_operators and op_class != "logprob" and not limited:
                yield site, f"a limit of op_error that covers the class {op_class}"

    def limits_for(self, dtype: str, quantised: Collection[Quantisation] = ()) -> list[Limit]:
        """Returns the limits that apply to an edge in that dtype; `quantised`: the formats of
        weights that differ between its ends for that reason."""
        limits = [x for x in self.limits if x.dtypes is None or dtype in x.dtypes]
        if not quantised:
            return [x for x in limits if x.quantisation is None]
        return [x for x in limits if x.of_site or x.quantisation in quantised]

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
        """Yields a problem for each limit that names dtypes but not every dtype of the contract."""
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
