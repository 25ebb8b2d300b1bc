"""Comparisons made by hand, and contracts that judge them."""

import math
from typing import Any

from rlk_align.judge.contract import Contract
from rlk_align.results import (
    Comparison,
    Controls,
    EdgeMetrics,
    EdgeResult,
    EngineRecord,
    SiteResult,
    TokenNoise,
)


def contract(*limits: dict[str, Any], **head: Any) -> Contract:
    given = limits or ({"metric": "max_abs_dlogp", "fail": 0.1},)
    return Contract.model_validate(
        {
            "id": "t",
            "version": "1.0.0",
            "description": "",
            "dtypes": ["bfloat16"],
            "min_coverage": 0.9,
            "min_tokens": 1,
            "limits": [
                {"id": f"l{i}", "why": "w", "source": "s"} | limit for i, limit in enumerate(given)
            ],
        }
        | head
    )


SIZES = ("max_abs_dlogp", "mean_abs_dlogp", "p99_abs_dlogp", "p999_abs_dlogp")


def metrics(**changes: Any) -> EdgeMetrics:
    """Of equal passes, but for the changes and what follows from them."""
    zero = dict.fromkeys(EdgeMetrics.model_fields, 0.0)
    ones = {"ratio_mean": 1.0, "ratio_max": 1.0, "ess_fraction": 1.0, "token_mult_prob_error": 1.0}
    largest = max(
        (changes[n] for n in SIZES if not math.isnan(changes.get(n, math.nan))), default=0
    )
    counts = {"tokens": 100, "bit_mismatches": int(largest > 0), "max_abs_dlogp": largest}
    fields = zero | ones | counts | changes
    return EdgeMetrics(**fields | {"noise": changes.get("noise", noise(fields))})


ROOM = 0.4


def noise(fields: dict[str, Any], **changes: Any) -> TokenNoise:
    """The law of noise that goes with metrics, of tokens with 1 − p = 0.4 in many sequences."""
    c, off = fields["mean_abs_dlogp"] / ROOM, fields["ratio_mean"]
    known = {"sequences": 50, "room": ROOM, "c": c, "c_low": 0.9 * c, "c_high": 1.1 * c}
    known |= {"ratio_low": off, "ratio_high": off, "largest": fields["max_abs_dlogp"] / ROOM}
    return TokenNoise(**known | changes)


COUNTS = ("layer", "differ", "introduced", "introduced_valued", "noisy", "nonfinite")
COUNTS += ("valued_rows", "elements_differ", "max_ulp")


def site(name: str = "layers.0.act", **changes: Any) -> SiteResult:
    """Of equal passes, but for the changes."""
    fields: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    fields |= {"site": name, "op": name.rsplit(".")[-1], "op_class": "elementwise", "rows": 100}
    fields |= {"first_introduced": None, "first_nonfinite": None, "frontier": []}
    fields |= {"max_abs": 0.0, "max_rel_l2": 0.0, "mean_rel_l2": 0.0, "min_cosine": 1.0}
    return SiteResult(**fields | changes)


def edge(name: str = "prefill_vs_train", **changes: Any) -> EdgeResult:
    fields: dict[str, Any] = {
        "name": name,
        "metrics": metrics(),
        "sites": [site(), site("logprob", op_class="logprob")],
        "first_bitwise": None,
        "expected_rows": 1000,
        "paired_rows": 1000,
        "unpaired": [],
    }
    return EdgeResult(**fields | changes)


QUIET = {"rollout": None, "train": None}


def comparison(*edges: EdgeResult, **changes: Any) -> Comparison:
    shown = edges or (edge(),)
    engine = EngineRecord(
        name="hf", version="1", options={}, dtype="bfloat16", model="m", environment={}
    )
    fields: dict[str, Any] = {
        "model": "m",
        "dtype": "bfloat16",
        "tokens": 100,
        "engines": {"rollout": engine, "train": engine},
        "mismatches": [],
        "allowed": [],
        "controls": Controls(observer="bitwise", observer_detail=[], noise=QUIET),
        "edges": list(shown),
        "judged": [e.name for e in shown],
        "missing_edges": {},
    }
    return Comparison(**fields | changes)
