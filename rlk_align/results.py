"""The results of a comparison, as frozen records: stored as JSON, judged without torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

SideName = Literal["rollout", "train"]
EdgeName = Literal["decode_vs_prefill", "prefill_vs_train", "decode_vs_train"]
CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""The bounds of ρ outside of which `clip_fraction` counts a token."""


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _not_below(lowest: float, x: float) -> float:
    _check(not x < lowest, f"{x} is below {lowest:g}")
    return x


_ROUNDING = 1e-9
"""The tolerance by which a mean of float64 numbers may exceed its bounds."""

Size = Annotated[float, AfterValidator(lambda x: _not_below(0.0, x))]
"""Not negative; a NaN is valid, and fails every limit."""
Count = Annotated[int, Field(ge=0)]
Share = Annotated[Size, AfterValidator(lambda x: -_not_below(-1 - _ROUNDING, -x))]
Cell = tuple[Count, Count]
"""(sample, position)."""


class Result(BaseModel):
    """A frozen record; its JSON preserves a NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class TokenNoise(Result):
    """The fit of sampled tokens to the law of healthy noise, E|Δ| = c · (1 − p), where p is the
    geometric mean of both sides' probabilities (`rlk_align.noise`).

    Intervals are clustered by sequence and reach four standard deviations to each side; their ends
    are NaN for too few sequences."""

    sequences: Count
    """The number of sequences with a sampled token."""
    room: Size
    """mean (1 − p)."""
    c: Size
    """mean |Δ| / mean (1 − p); 0 where the sides are equal."""
    c_low: Size
    c_high: Size
    ratio_low: float
    """The interval of mean ρ."""
    ratio_high: float
    largest: Size
    """The largest |Δ| / (1 − p) of a token, with 1 − p at least 0.01."""


class EdgeMetrics(Result):
    """The metrics of one edge over the sampled tokens; Δ = log-prob of the second pass − that of
    the first."""

    tokens: Count
    max_abs_dlogp: Size
    mean_abs_dlogp: Size
    p99_abs_dlogp: Size
    p999_abs_dlogp: Size
    k1: float
    """mean(−Δ): the plain estimator of KL(first ‖ second)."""
    k3: Annotated[float, AfterValidator(lambda x: _not_below(-_ROUNDING, x))]
    """mean(expm1(Δ) − Δ): an unbiased estimator of the same that is never negative (Schulman
    2020)."""
    ratio_mean: Size
    """mean ρ, ρ = exp Δ: 1 in expectation where the policies agree."""
    ratio_max: Size
    clip_fraction: Share
    """Share of ρ outside [0.8, 1.2]."""
    ess_fraction: Share
    """(Σρ)² / (N Σρ²): effective sample size over N."""
    token_mult_prob_error: Annotated[float, AfterValidator(lambda x: _not_below(1 - _ROUNDING, x))]
    """mean exp|Δ|."""
    bit_mismatches: Count
    """Log-probs whose float32 bits differ."""
    noise: TokenNoise | None = None
    """None in a run of an older version, and where the sequences of tokens are not known."""

    @property
    def ratio_mean_error(self) -> float:
        """|mean ρ − 1|."""
        return abs(self.ratio_mean - 1.0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check(self.bit_mismatches <= self.tokens, "more log-probs differ than there are tokens")
        largest = self.max_abs_dlogp * (1 + _ROUNDING)
        for name in ("mean_abs_dlogp", "p99_abs_dlogp", "p999_abs_dlogp"):
            _check(not getattr(self, name) > largest, f"{name} is above max_abs_dlogp")
        _check(not self.max_abs_dlogp > 0 or self.bit_mismatches > 0, "equal bits, and Δ is not 0")
        return self


class Distribution(Result):
    """Two passes over the whole vocabulary, at the sampled positions whose logits both keep, in
    nats. p is the distribution of the first pass, q that of the second, and Δ = log q − log p of a
    token. In a sparse model, tokens that the sides send to different experts do not count."""

    positions: Count
    missing: Count
    """Positions that count, and of which a side has no logits."""
    vocabulary: Count
    kl: Size
    """mean KL(p ‖ q)."""
    kl_error: Size
    """The standard error of that mean."""
    kl_max: Size
    reverse_kl: Size
    """mean KL(q ‖ p)."""
    reverse_kl_max: Size
    total_variation: Share
    """mean ½ Σ|q − p|."""
    total_variation_max: Share
    max_abs_dlogp: Size
    """The largest |Δ| of a token of the vocabulary at any position."""
    largest: tuple[Count, Count, Count] | None
    """(sample, position, token id) of it; None where the sides are equal."""
    top1_agreement: Share
    """Share of positions with the same most probable token; a tie of a side agrees with each."""
    top20_agreement: Share
    """The mean share of the 20 most probable tokens that both sides have."""
    typical_token: Size
    """The median over the vocabulary of a token's mean |Δ|."""
    worst_token: Size
    """The largest mean |Δ| of a token."""
    worst_token_id: Count

    @classmethod
    def empty(cls, missing: int, vocabulary: int) -> Self:
        """No position has logits on both sides."""
        names = [n for n, f in cls.model_fields.items() if f.annotation is float]
        nothing: dict[str, Any] = dict.fromkeys(names, float("nan"))
        counts = {"positions": 0, "missing": missing, "vocabulary": vocabulary}
        return cls(**nothing | counts, largest=None, worst_token_id=0)

    @property
    def top1_disagreement(self) -> float:
        return 1.0 - self.top1_agreement

    @property
    def top20_disagreement(self) -> float:
        return 1.0 - self.top20_agreement


class SiteResult(Result):
    """One site on one edge."""

    site: str
    layer: Count | None
    op: str
    op_class: str
    rows: Count
    """Rows compared."""
    differ: Count
    """Rows whose bits differ."""
    introduced: Count
    """Rows that differ although the unit's inputs are equal; noisy rows do not count."""
    introduced_valued: Count
    """Introduced rows whose values both sides keep."""
    noisy: Count
    """Rows that an engine does not reproduce itself."""
    nonfinite: Count
    """NaN or Inf entries, both sides together."""
    first_introduced: Cell | None
    first_nonfinite: Cell | None
    valued_rows: Count
    """Differing rows whose values both sides keep; the figures below describe these rows."""
    elements_differ: Count
    max_abs: Size
    max_ulp: Count
    max_rel_l2: Size
    mean_rel_l2: Size
    min_cosine: float
    frontier: list[tuple[Size, Size]]
    """(magnitude, error) of the introduced rows; for rows without values, the smallest possible
    error: see `metrics.error_frontier`."""
    not_comparable: Count = 0
    """Rows of experts that the two sides do not share; they are not part of `rows`."""
    ranks: dict[SideName, list[Count]] = Field(default_factory=dict)
    """Side -> its ranks that hold the differing values of the introduced rows; without sides of one
    rank and sides whose ranks are not known."""

    @model_validator(mode="after")
    def _within_rows(self) -> Self:
        _check(self.differ <= self.rows, f"{self.site}: more rows differ than there are")
        _check(self.introduced <= self.differ, f"{self.site}: rows introduced, yet equal")
        _check(self.introduced_valued <= self.introduced, f"{self.site}: values of other rows")
        _check(self.valued_rows <= self.differ, f"{self.site}: values of rows that are equal")
        return self


class Introducer(Result):
    """The first unit, in execution order, whose inputs are equal and whose outputs differ."""

    site: str
    layer: Count | None
    op: str
    sample: Count
    position: Count
    last_equal: str | None
    """The site before it, the last whose every row is equal."""
    ranks: dict[SideName, list[Count]] = Field(default_factory=dict)
    """As `SiteResult.ranks`."""

    @classmethod
    def among(
        cls, before: Sequence[SiteResult], site: "SiteResult | RefereedUnit", cell: Cell
    ) -> Self:
        """Makes the record of a site whose first difference is in `cell`; `before`: the sites of
        its edge that are computed before it."""
        sample, position = cell
        equal = [s.site for s in before if s.rows and not s.differ]
        return cls(
            site=site.site,
            layer=site.layer,
            op=site.op,
            sample=sample,
            position=position,
            last_equal=equal[-1] if equal else None,
            ranks=site.ranks if isinstance(site, SiteResult) else {},
        )


class LayerRouting(Result):
    """The choice of experts of one sparse layer on one edge."""

    site: str
    layer: Count
    rows: Count
    flipped: Count
    """Rows that are sent to another set of experts."""
    at_router: Count
    """Flipped rows whose router has equal inputs: the sides diverge there."""
    measured: Count
    """The rows flipped at the router whose logits both sides keep."""
    ties: Count
    """The measured rows whose logits tie, on either side."""
    largest_gap: Size
    """The largest number of roundings by which a side's logits prefer its own choice at the
    router."""
    first_at_router: Cell | None


class EdgeRouting(Result):
    """The choice of experts on one edge."""

    layers: list[LayerRouting]
    tokens: Count
    flipped_tokens: Count
    """Tokens that are sent to other experts in any layer."""
    sampled: Count
    flipped_sampled: Count
    """Sampled tokens whose log-prob follows from a flipped token."""
    share_of_dlogp: Size
    """The share of the summed |Δ| on these tokens."""
    mean_abs_dlogp_flipped: Size
    mean_abs_dlogp_other: Size
    unflipped: EdgeMetrics | None = None
    """The metrics of the sampled tokens that both sides send to the same experts in every layer;
    None without such tokens."""


class EdgeResult(Result):
    """Two passes compared."""

    name: EdgeName
    metrics: EdgeMetrics
    sites: list[SiteResult]
    first_bitwise: Introducer | None
    expected_rows: Count
    paired_rows: Count
    cached_rows: Count = 0
    """Rows that a side took from its cache and did not compute. They are not expected."""
    unpaired: list[tuple[str, str, bool]]
    """(site, reason, whether the engine explains it)."""
    routing: EdgeRouting | None = None
    """None for a dense model."""
    distribution: Distribution | None = None
    """None in a run of an older version, and where a side shows no logits."""

    @model_validator(mode="after")
    def _of_its_sites(self) -> Self:
        first, names = self.first_bitwise, [s.site for s in self.sites]
        for name in filter(None, [first.site, first.last_equal] if first else []):
            _check(name in names, f"{self.name}: {name} is not one of its sites")
        _check(len(set(names)) == len(names), f"{self.name}: a site is named twice")
        _check(self.paired_rows <= self.expected_rows, f"{self.name}: more rows than expected")
        return self


class Noise(Result):
    """The difference between one pass of an engine and its repetition."""

    passname: str
    rows: Annotated[int, Field(gt=0)]
    """Rows whose bits differ, over all sites."""
    first_site: str
    max_abs_dlogp: Size
    mean_abs_dlogp: Size


class CodePlace(Result):
    """The location of an operator in its engine's code."""

    module: str
    """The module's path below the model, e.g. `model.layers.3.mlp.down_proj`."""
    kind: str
    """The module's class."""
    file: str
    """The file of the function that computes it, even where that function was patched in. The path
    starts below the installation where the file is installed; empty without source."""
    line: Count
    hooks: list[str] = []
    """`file:line` of the hooks that change the module's inputs or outputs."""
    settings: dict[str, bool | int | float | str]
    """The scalar settings that the module stores."""

    def __str__(self) -> str:
        where = f", {self.file}:{self.line}" if self.file else ""
        where += "".join(f", hook {hook}" for hook in self.hooks)
        return f"{self.module} ({self.kind}{where})"

    def settings_unlike(self, other: "CodePlace") -> dict[str, bool | int | float | str]:
        """Returns the settings whose value the other place does not have under any name."""
        known = {(type(v), v) for v in other.settings.values()}
        return {n: v for n, v in self.settings.items() if (type(v), v) not in known}


class LiveSetting(Result):
    """A setting of an operator in the live engine, beside its value in the checkpoint's
    config.json."""

    name: str
    """The name of the attribute in the precheck."""
    live: bool | int | float | str
    configured: bool | int | float | str
    differs: bool

    def __str__(self) -> str:
        if not self.differs:
            return f"{self.name} {self.live} as in config.json"
        return f"{self.name} {self.live} live, {self.configured} in config.json"


class ErrorPattern(Result):
    """Where most of an operator's error beyond rounding is, and its form."""

    place: Literal["everywhere", "head", "channel", "feature", "token", "position", "row"]
    at: Count
    """The head, channel of each head, feature, token id or position; for a row, its number in the
    batch."""
    manner: Literal["scaled", "shifted", "rows scaled", "scattered"]
    """The error is proportional to the exact output, constant, proportional with another factor in
    each row, or none of these."""
    amount: float
    """The factor − 1, the shift, or the rms of the rows' factors − 1; 0 where scattered."""


class RoundingErrors(Result):
    """The distance of an operator's outputs from exact ones, in roundings: in units of the error
    that rounding the exact outputs to the side's dtype leaves (see `probe.referee.rounding`).

    Gains and the shift of a feature are signed, and count only as far as they exceed chance.
    """

    unit: Annotated[float, Field(gt=0)]
    """The unit of gains: the relative error that one rounding leaves."""
    features: Count = 0
    """The features of a row; 0 in a run of an older version."""
    rms: Size
    """Over all entries: 1 for one rounding."""
    gain: float
    """The error regressed on the exact output, over all entries."""
    row_gain: Size
    """The gain by row (and head), rms over the rows; statistics of a row in low precision raise
    it."""
    head_gain: float
    """The largest gain of a head; 0 for an operator without heads."""
    head: Count
    feature_rms: Size
    """The largest rms of a feature."""
    feature_gain: float
    feature_shift: float
    """The largest mean error of a feature."""
    feature: Count
    """The feature whose rms, gain or shift is the largest."""
    row_rms: Size
    """The largest rms of a row."""
    row: Cell
    peak: Size
    """The largest error of an entry; its unit is the mean unit of its row where that is larger."""
    pattern: ErrorPattern


class RefereedUnit(Result):
    """An operator of one pass, compared with float64 on the recorded inputs of the pass."""

    side: SideName
    passname: str
    edges: list[EdgeName]
    """The edges with this pass as an end."""
    site: str
    layer: Count | None
    op: str
    op_class: str
    rows: Count
    """The number of recomputed rows."""
    errors: RoundingErrors | None
    """The errors; None where no row could be recomputed."""
    reason: str = ""
    """The reason why no row could be recomputed."""
    dtype: str = ""
    """The dtype the side computes in; empty in a run of an older version."""
    other_weight: bool = False
    """Whether the operator could not be recomputed because its engine's weight differs from the
    checkpoint's."""
    explanation: str = ""
    """The formula that the side computes instead, where a known one fits."""
    settings: list[LiveSetting] = []
    """The settings that both the live engine and config.json state."""
    fused_with: str = ""
    """The site that the engine computes together with this one."""
    code: CodePlace | None = None

    @property
    def unlike_config(self) -> list[LiveSetting]:
        """The settings whose values in the engine and in config.json differ."""
        return [s for s in self.settings if s.differs]

    @model_validator(mode="after")
    def _measured(self) -> Self:
        _check((self.errors is not None) == bool(self.rows), f"{self.site}: measured, or not?")
        _check(bool(self.reason) != bool(self.rows), f"{self.site}: no rows, and no reason")
        return self


NotMeasured = Literal["not measured"]
Observer = Literal["bitwise", "within noise floor", "violated", "not measured"]


class Controls(Result):
    """The controls of both sides."""

    observer: Observer
    """The comparison of final log-probs with and without taps, in the same mode."""
    observer_detail: list[str]
    noise: dict[SideName, Noise | NotMeasured | None]
    """The largest noise of each side's passes; None where every pass repeats itself bit for bit."""


Kind = Literal["tokens", "weights", "attributes"]


class Mismatch(Result):
    """A difference between the sides before anything is computed."""

    kind: Kind
    name: str
    """The prompt's id, the canonical parameter, or the attribute."""
    rollout: Any
    train: Any
    sample: int | None = None
    position: int | None = None
    """For tokens and positions: where the mismatch starts."""
    ranks: list[int] = []
    """The ranks that hold the differing values: of a sharded weight, or of the first wrong row
    where ranks compute different rows."""
    detail: str = ""
    """Details beyond the two values."""
    derived_copy: dict[SideName, str] = {}
    """For weights: side -> the module that computes with a derived copy (packed, cast or cached)
    of the parameter. The value compared is the copy's."""
    stops: bool = True
    """Whether it stops the comparison unless the user allows it."""


class SamplingDistribution(Result):
    """The distribution that the log-probs of a side are of: a softmax of the logits."""

    temperature: float
    """The number that divides the logits."""
    limits: dict[str, float] = {}
    """`top_k`, `top_p` and `min_p`, where they drop tokens; the softmax is over the others."""


DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p", "logprobs")
"""The attributes that say which distribution log-probs are of."""
Quantisation = Literal["fp8-block", "fp8-tensor", "fp8-channel", "fp8-activations", "fp8-cache"]
"""What is quantised: weights in fp8, with a scale for each block, tensor or row; the inputs of
products; the keys and values of attention."""


class EngineRecord(Result):
    """The engine of one side."""

    name: str
    version: str
    options: dict[str, Any]
    dtype: str
    model: str
    environment: dict[str, str]


class GraphReplays(Result):
    """The CUDA graphs of one pass, counted in the engine while it ran."""

    steps: Count
    """Forwards of the model."""
    replayed_steps: Count
    """The forwards that replayed a CUDA graph."""
    replays: dict[str, Count]
    """Replays by mode: `full`, of a whole forward, or `piecewise`, of a part of one."""
    captured: dict[str, Count]
    """The number of graphs of each mode that the engine had captured before the pass."""

    @property
    def total(self) -> int:
        """All replays."""
        return sum(self.replays.values())


class ProductionPass(Result):
    """One un-tapped pass of the production mode against the observed one."""

    metrics: EdgeMetrics
    """The metrics of the tokens that both passes have; Δ = observed − production."""
    expected: Count
    """Sampled tokens of the batch."""
    parted: list[Cell] = []
    """For each such sample, the cell where a decode sampled a different token than the observed
    decode; later tokens are not compared."""
    graphs: GraphReplays | None = None
    """None where the engine has no CUDA graphs or does not report them."""

    @property
    def replays(self) -> int:
        """The number of CUDA graphs that were observed to be replayed."""
        return self.graphs.total if self.graphs else 0


PassName = Literal["decode", "prefill"]


class Comparison(Result):
    """comparison.json: everything that a contract judges."""

    schema_id: Literal["rlk-align/comparison/2"] = "rlk-align/comparison/2"
    model: str
    dtype: str
    """The lower-precision dtype of the two sides."""
    tokens: Count
    """Sampled tokens."""
    longest_response: Count = 0
    """Sampled tokens of the longest sequence."""
    longest_sequence: Count = 0
    """Tokens of the longest sequence, prompt included: the number of tested positions; 0 in a run
    of an older version."""
    context: Count = 0
    """Positions that the checkpoint allows; 0 in a run of an older version."""
    engines: dict[SideName, EngineRecord]
    mismatches: list[Mismatch]
    casts: dict[SideName, str] = {}
    """Side -> the dtype to which its weights are the other side's, rounded; without sides whose
    weights are not rounded."""
    distributions: dict[SideName, SamplingDistribution] = {}
    """Side -> the distribution of its log-probs, for each side that states it; empty in a run of an
    older version."""
    quantised: dict[SideName, list[Quantisation]] = {}
    """Side -> what it quantises otherwise than the other side, for each that does."""
    not_recorded: dict[SideName, list[Kind]] = {}
    """Imported side -> what its files do not say, or not of the whole model."""
    allowed: list[Kind]
    """Mismatches that the user allowed."""
    controls: Controls | None
    """The controls; None where the precheck stopped the comparison."""
    edges: list[EdgeResult]
    judged: Annotated[list[EdgeName], Field(min_length=1)]
    """Edges that a contract judges."""
    missing_edges: dict[EdgeName, str]
    """Judged edges that could not be compared, with the reason."""
    referee: list[RefereedUnit] = []
    """Every operator of every pass of the edges, in execution order."""
    production: EdgeMetrics | None = None
    """The un-tapped production mode compared with the observed passes, over the tokens of all its
    passes; None where it was not measured."""
    production_passes: dict[PassName, ProductionPass] = {}
    """The same by pass; also empty in a run of an earlier version, which had only a prefill."""
    same_capture: bool = False
    """Whether both sides are one capture, so that their equality proves nothing."""

    @property
    def stopped(self) -> bool:
        """Whether a mismatch that was not allowed stopped the comparison before any number."""
        return bool(self.stopping)

    @property
    def stopping(self) -> list[Mismatch]:
        """The mismatches that stop the comparison."""
        return [m for m in self.mismatches if m.stops and m.kind not in self.allowed]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _check(len(self.engines) == len(get_args(SideName)), "a side is missing")
        compared = [e.name for e in self.edges]
        _check(len(set(compared)) == len(compared), "an edge occurs twice")
        for name in [] if self.stopped else self.judged:
            _check((name in compared) != (name in self.missing_edges), f"{name}: compared, or not?")
        if self.controls is not None:
            _check(self.controls.noise.keys() == self.engines.keys(), "noise: a side is missing")
        return self
