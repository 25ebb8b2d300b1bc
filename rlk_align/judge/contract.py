"""Numerical contracts: TOML files with limits, each with its reason and its source.

    id = "bf16"
    version = "1.0.0"
    dtypes = ["bfloat16"]
    min_coverage = 0.9          share of the expected rows that must be paired
    min_tokens = 32             sampled tokens without which nothing is said
    max_noise = 1e-3            how far a side may be from itself; left out, it repeats bitwise

    [[limits]]
    id = "max-dlogp"
    metric = "max_abs_dlogp"    of an edge, or `op_error`, or `rows_differ`
    fail = 0.06
    why = "..."
    source = "published: ..."

    [[budgets]]                 of operators, in units of their own rounding
    id = "rounding-norms"
    ops = ["attn_norm", "mlp_norm"]
    rms = 2.4                   any statistic of `results.RoundingErrors`
    why = "..."
    source = "measured: ..."

Tolerances live in these files only.
"""

import hashlib
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from rlk_align.data import data_path
from rlk_align.errors import ContractError
from rlk_align.results import EdgeName
from rlk_align.text import complaint

EdgeMetric = Literal[
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
SiteMetric = Literal["op_error", "rows_differ"]
OpClass = Literal["elementwise", "reduction", "matmul", "attention", "logprob"]

Op = Literal[
    "embed",
    "attn_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "attn",
    "o_proj",
    "attn_residual",
    "mlp_norm",
    "gate_proj",
    "up_proj",
    "act",
    "down_proj",
    "mlp_residual",
    "final_norm",
    "logits",
    "logprob",
]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Words = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
"""No conversions: `fail = "0.5"` and `fail = true` are no numbers."""

BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The contract that a dtype gets where the user names none."""


class Limit(BaseModel):
    """One bound. A value above `fail`, or a NaN, breaks it."""

    model_config = _STRICT

    id: Name
    metric: EdgeMetric | SiteMetric
    """An edge's metric; or, of a site, `rows_differ`, or `op_error`: the largest
    |a − b| / (atol + rtol · max(|a|, |b|)) over the rows whose inputs are bit-equal."""
    fail: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    edges: Annotated[list[EdgeName], Field(min_length=1)] | None = None
    """Where it holds; None is every judged edge."""
    op_classes: Annotated[list[OpClass], Field(min_length=1)] | None = None
    """For a site's metric: which operators; None is all."""
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    rtol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    why: Words
    source: Words
    """`published: …`, `measured: …` with N, hardware, commit and date, or `derived: …`."""

    @property
    def of_site(self) -> bool:
        return self.metric in ("op_error", "rows_differ")

    @model_validator(mode="after")
    def _consistent(self) -> "Limit":
        if (self.metric == "op_error") != (self.atol is not None and self.rtol is not None):
            raise ValueError(f"limit {self.id!r}: atol and rtol belong to op_error, and only there")
        if self.op_classes is not None and not self.of_site:
            raise ValueError(f"limit {self.id!r}: op_classes belong to a site's metric")
        return self


Bound = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Budget(BaseModel):
    """How far operators may be from exact ones, in units of their own rounding: a side's outputs
    against float64 on its own inputs. A magnitude above its bound, or a NaN, breaks it."""

    model_config = _STRICT

    id: Name
    ops: Annotated[list[Op], Field(min_length=1)]
    rms: Bound
    gain: Bound
    row_gain: Bound
    head_gain: Bound
    feature_rms: Bound
    feature_gain: Bound
    feature_shift: Bound
    row_rms: Bound
    peak: Bound
    why: Words
    source: Words


STATISTICS = tuple(n for n, f in Budget.model_fields.items() if f.annotation is float)
"""Of `results.RoundingErrors`: those that a budget bounds."""


class Contract(BaseModel):
    """What two engines owe each other."""

    model_config = _STRICT

    id: Name
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    description: str
    dtypes: Annotated[list[Dtype], Field(min_length=1)]
    min_coverage: Annotated[float, Field(gt=0, le=1)]
    min_tokens: Annotated[int, Field(ge=1)]
    max_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Largest |Δ| by which a side may differ from itself; None wants it to repeat itself bit for
    bit."""
    limits: Annotated[list[Limit], Field(min_length=1)]
    budgets: list[Budget] = []
    """None, or one for every operator."""
    _given: str = PrivateAttr(default="")

    @property
    def given(self) -> str:
        """What names it on the command line: the built-in id, or the path of its file."""
        return self._given or self.id

    @cached_property
    def sha256(self) -> str:
        """Of what it says, comments and layout aside."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @model_validator(mode="after")
    def _unique(self) -> "Contract":
        ids = [*(limit.id for limit in self.limits), *(b.id for b in self.budgets)]
        if len(set(ids)) != len(ids):
            raise ValueError("limit ids are not unique")
        ops = [op for budget in self.budgets for op in budget.ops]
        twice = [op for op in ops if ops.count(op) > 1]
        if twice:
            raise ValueError(f"{twice[0]} has two budgets")
        missing = [op for op in get_args(Op) if op not in ops]
        if ops and missing:
            raise ValueError(f"there are budgets, and none for {', '.join(missing)}")
        return self

    def budget(self, op: str) -> Budget | None:
        """What an operator may be off by; None where nothing is said."""
        return next((b for b in self.budgets if op in b.ops), None)


def load_contract(name: str, dtype: str) -> Contract:
    """A built-in contract by id, or a TOML file by path, for a comparison in `dtype`.

    Raises ContractError where there is none, where it is malformed, or where it says
    nothing of the dtype.
    """
    built_in = {p.stem: p for p in sorted(data_path("contracts").glob("*.toml"))}
    path = Path(name) if name.endswith(".toml") else built_in.get(name)
    if path is None or not path.is_file():
        known = ", ".join(built_in)
        raise ContractError(f"no contract {name!r}", f"built in: {known}; or a path to a .toml")
    contract = _read(path)
    contract._given = name
    shadowed = built_in.get(contract.id)
    if name.endswith(".toml") and shadowed and _read(shadowed).sha256 != contract.sha256:
        raise ContractError(
            f"{path}: id {contract.id!r} is that of a built-in contract, which says otherwise",
            "give it an id of its own",
        )
    if dtype not in contract.dtypes:
        raise ContractError(
            f"contract {contract.id!r} says nothing of {dtype}",
            f"it covers {', '.join(contract.dtypes)}; name another with --contract",
        )
    return contract


def _read(path: Path) -> Contract:
    try:
        return Contract.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ContractError(f"{path}: {complaint(error)}") from error


def default_contract(dtype: str) -> str:
    """The built-in contract's id for a dtype."""
    if dtype not in BY_DTYPE:
        raise ContractError(f"no built-in contract for {dtype}", "name one with --contract")
    return BY_DTYPE[dtype]
