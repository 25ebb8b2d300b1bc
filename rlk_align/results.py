"""What a comparison found, as frozen records: stored as JSON, judged without torch."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Result(BaseModel):
    """A frozen record; a NaN survives its JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class EdgeMetrics(Result):
    """Of one edge, over the tokens that were sampled; Δ = logp of the second pass − the first."""

    tokens: int
    max_abs_dlogp: float
    mean_abs_dlogp: float
    p99_abs_dlogp: float
    p999_abs_dlogp: float
    k1: float
    """mean(−Δ): the plain estimator of KL(first ‖ second)."""
    k3: float
    """mean(expm1(Δ) − Δ): unbiased for the same, never negative (Schulman 2020)."""
    ratio_mean: float
    """mean ρ, ρ = exp Δ: 1 in expectation where the policies agree."""
    ratio_max: float
    clip_fraction: float
    """Share of ρ outside [0.8, 1.2]."""
    ess_fraction: float
    """(Σρ)² / (N Σρ²): effective sample size over N."""
    token_mult_prob_error: float
    """mean exp|Δ|."""
    bit_mismatches: int
    """Log-probs whose float32 bits differ."""

    @property
    def ratio_mean_error(self) -> float:
        """|mean ρ − 1|."""
        return abs(self.ratio_mean - 1.0)


class SiteResult(Result):
    """One site on one edge."""

    site: str
    layer: int | None
    op: str
    op_class: str
    rows: int
    """Rows compared."""
    differ: int
    """Rows whose bits differ."""
    introduced: int
    """Rows that differ although the unit's inputs are equal; noisy rows are left out."""
    noisy: int
    """Rows that an engine does not reproduce itself."""
    nonfinite: int
    """NaN or Inf entries, both sides together."""
    first_introduced: tuple[int, int] | None
    """(sample, position)."""
    first_nonfinite: tuple[int, int] | None
    valued_rows: int
    """Differing rows of which both sides keep the values; the figures below are of these."""
    elements_differ: int
    max_abs: float
    max_ulp: int
    max_rel_l2: float
    mean_rel_l2: float
    min_cosine: float
    frontier: list[tuple[float, float]]
    """(magnitude, error) of the introduced rows: see `metrics.error_frontier`."""


class Introducer(Result):
    """The first unit, in execution order, whose inputs are equal and whose outputs differ."""

    site: str
    layer: int | None
    op: str
    sample: int
    position: int
    last_equal: str | None
    """The site before it, the last whose every row is equal."""


class EdgeResult(Result):
    """Two passes compared."""

    name: str
    metrics: EdgeMetrics
    sites: list[SiteResult]
    first_bitwise: Introducer | None
    expected_rows: int
    paired_rows: int
    unpaired: list[tuple[str, str, bool]]
    """(site, reason, whether the engine explains it)."""


class Noise(Result):
    """How far one pass of an engine is from the same pass run again."""

    passname: str
    rows: int
    """Rows whose bits differ, over all sites."""
    first_site: str
    max_abs_dlogp: float
    mean_abs_dlogp: float


NotMeasured = Literal["not measured"]
Observer = Literal["bitwise", "within noise floor", "violated"]


class Controls(Result):
    """The controls of both sides."""

    observer: Observer
    """Final log-probs with taps against those without, in one and the same mode."""
    observer_detail: list[str]
    noise: dict[str, Noise | NotMeasured | None]
    """By side, the worst of its passes: None where each repeats itself bit for bit."""


Kind = Literal["tokens", "weights", "attributes"]


class Mismatch(Result):
    """One thing that differs between the sides before anything is computed."""

    kind: Kind
    name: str
    """The prompt's id, the canonical parameter, or the attribute."""
    rollout: Any
    train: Any
    sample: int | None = None
    position: int | None = None
    """For tokens and positions: where the mismatch starts."""
    ranks: list[int] = []
    """For weights of a sharded side: the ranks that hold what differs."""
    detail: str = ""
    """What is known of it beyond the two values."""


class EngineRecord(Result):
    """One side, as the verdict names it."""

    name: str
    version: str
    options: dict[str, Any]
    dtype: str
    model: str
    environment: dict[str, str]


class Comparison(Result):
    """comparison.json: everything that a contract can be held against."""

    schema_id: str = "rlk-align/comparison/1"
    model: str
    dtype: str
    """The lower-precision dtype of the two sides."""
    tokens: int
    """Sampled tokens."""
    engines: dict[str, EngineRecord]
    mismatches: list[Mismatch]
    allowed: list[Kind]
    """Mismatches that the user chose to measure across."""
    controls: Controls | None
    """None where the precheck stopped the comparison."""
    edges: list[EdgeResult]
    judged: list[str]
    """Edges that a contract is held against."""
    missing_edges: dict[str, str]
    """Judged edges that could not be compared, with the reason."""
    production: EdgeMetrics | None = None
    """The un-tapped production mode against the observed one; None where not measured."""

    @property
    def stopped(self) -> bool:
        """Whether a mismatch that was not allowed ended it before any number."""
        return any(m.kind not in self.allowed for m in self.mismatches)
