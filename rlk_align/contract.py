"""Numerical contracts: TOML files with limits, each with its reason and its source.

    id = "bf16"
    version = "1.0.0"
    dtypes = ["bfloat16"]
    min_coverage = 0.9          share of the expected rows that must be paired
    min_tokens = 32             sampled tokens without which nothing is said

    [[limits]]
    id = "max-dlogp"
    metric = "max_abs_dlogp"    of an edge, or `op_error`, or `rows_differ`
    fail = 0.06
    why = "..."
    source = "published: ..."

Tolerances live in these files only.
"""

import hashlib
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlk_align.data import data_path
from rlk_align.errors import ContractError

EdgeName = Literal["decode_vs_prefill", "prefill_vs_train", "decode_vs_train"]
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

BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The contract that a dtype gets where the user names none."""

_PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def lower_precision(a: str, b: str) -> str:
    """Of two dtypes, the one with fewer significant bits."""
    return min(a, b, key=lambda dtype: _PRECISION.get(dtype, 0))


class Limit(BaseModel):
    """One bound. A value above `fail`, or a NaN, breaks it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
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
    why: str
    source: str
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


class Contract(BaseModel):
    """What two engines owe each other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    description: str
    dtypes: list[str]
    min_coverage: Annotated[float, Field(gt=0, le=1)]
    min_tokens: Annotated[int, Field(ge=1)]
    limits: Annotated[list[Limit], Field(min_length=1)]

    @cached_property
    def sha256(self) -> str:
        """Of what it says, comments and layout aside."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @model_validator(mode="after")
    def _unique(self) -> "Contract":
        ids = [limit.id for limit in self.limits]
        if len(set(ids)) != len(ids):
            raise ValueError("limit ids are not unique")
        return self


def load_contract(name: str, dtype: str) -> Contract:
    """A built-in contract by id, or a TOML file by path, for a comparison in `dtype`.

    Raises ContractError where there is none, where it is malformed, or where it says
    nothing of the dtype.
    """
    path = Path(name) if name.endswith(".toml") else data_path("contracts") / f"{name}.toml"
    if not path.is_file() or (not name.endswith(".toml") and Path(name).name != name):
        known = ", ".join(sorted(p.stem for p in data_path("contracts").glob("*.toml")))
        raise ContractError(f"no contract {name!r}", f"built in: {known}; or a path to a .toml")
    try:
        contract = Contract.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ContractError(f"{path}: {where}: {first['msg']}") from error
    if dtype not in contract.dtypes:
        raise ContractError(
            f"contract {contract.id!r} says nothing of {dtype}",
            f"it covers {', '.join(contract.dtypes)}; name another with --contract",
        )
    return contract


def default_contract(dtype: str) -> str:
    """The built-in contract's id for a dtype."""
    if dtype not in BY_DTYPE:
        raise ContractError(f"no built-in contract for {dtype}", "name one with --contract")
    return BY_DTYPE[dtype]
