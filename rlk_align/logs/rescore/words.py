"""The sentence about a split mismatch, and the next step."""

import shlex
from collections.abc import Mapping, Sequence

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.advice import NEXT
from rlk_align.logs.diagnose.explain import Status
from rlk_align.logs.diagnose.record import Name
from rlk_align.logs.rescore.record import SplitEdge, SplitName
from rlk_align.results import EngineRecord, SideName

WHO: dict[SplitName, str] = {
    "decode_vs_prefill": "the rollout's decode",
    "decode_vs_train": "the rollout, or the engines' kernels",
    "prefill_vs_train": "the engines' kernels",
    "prefill_vs_dump": "the run's trainer, or the engines' kernels",
    "train_vs_dump": "the run's trainer",
}
"""Edge -> the part of the run that causes its mismatch."""
WHAT: dict[SplitName, str] = {
    "decode_vs_prefill": "decode against prefill, sampler settings, stale weights or cache",
    "decode_vs_train": "the rollout engine against the training engine, and what decode adds",
    "prefill_vs_train": "the kernels of the two engines, on the same ids",
    "prefill_vs_dump": "the rollout engine against the trainer, and the run's bookkeeping",
    "train_vs_dump": "micro-batches, dropout, the weights' step, the run's bookkeeping",
}
"""Edge -> the possible causes of its mismatch."""
BOOKKEEPING: frozenset[Name] = frozenset(
    {
        *("misaligned", "mask-shifted", "above-zero", "missing", "low-precision", "duplicated"),
        *("wrong-token", "logprob-scaled", "temperature", "truncation", "turn-boundary", "packing"),
    }
)
"""The diagnoses of an edge that are faults of the run's code, not of an engine."""
_PROBE = "rlk-align probe {RUN} shows which operator the engines' difference comes from"


def sentence(
    edges: Sequence[SplitEdge], carrier: SplitName | None, odd: SideName | None, doubtful: bool
) -> str:
    """Returns the sentence that names the edge with the mismatch."""
    if not edges[0].metrics.tokens:
        return "Nothing was scored again."
    if doubtful:
        return "Nothing can be concluded."
    if all(edge.metrics.bit_mismatches == 0 for edge in edges):
        return "Every edge is equal bit for bit."
    if odd is not None:
        neighbours = {
            "rollout": "the run's rollout nor the training engine",
            "train": "the rollout engine nor the run's trainer",
        }
        return (
            f"The {'rollout' if odd == 'rollout' else 'training'} engine agrees with neither "
            f"{neighbours[odd]}, and those two agree: the engine is off, not the run."
        )
    if carrier is None:
        shares = ", ".join(f"{e.name} {e.share.value:.0%}" for e in edges)
        return f"No single edge carries the mismatch: {shares}."
    edge = next(e for e in edges if e.name == carrier)
    shape = edge.diagnosis
    looks = f"; alone it looks like {shape}" if shape not in (None, "numerics") else ""
    return f"{percent(edge.share)} of the mismatch lies with {WHO[carrier]}{looks}."


def next_step(
    edges: Sequence[SplitEdge],
    carrier: SplitName | None,
    engines: Mapping[SideName, EngineRecord],
    status: Status,
) -> str:
    """Returns the next command, with {RUN} for the run with the scores and {DUMP} for the dump."""
    if status == "inconclusive":
        return "rlk-align explain {DUMP} reports what the dump alone shows"
    if status == "pass":
        return "nothing to repair" + (f"; {_PROBE}" if len(engines) == 2 else "")
    largest = max(edges, key=lambda e: e.mean.value)
    edge = next((e for e in edges if e.name == carrier), largest)
    if edge.diagnosis in BOOKKEEPING and edge.name != "prefill_vs_train":
        return NEXT[edge.diagnosis].replace("{RUN}", "{DUMP}")
    if edge.name == "decode_vs_prefill":
        side = engines["rollout"]
        model, rollout = (_literal(shlex.quote(text)) for text in (side.model, _spec(side)))
        return (
            f"rlk-align compare --model {model} --rollout {rollout} --edges decode_vs_prefill "
            "shows whether the engine alone decodes like this. If not, compare the rollout's "
            "weights (rlk-align weights), its cache and its sampler's settings"
        )
    if edge.name == "prefill_vs_train":
        return _PROBE
    if edge.name == "decode_vs_train":
        return "the same command with --rollout SPEC separates decode from the engines' kernels"
    if edge.name == "prefill_vs_dump":
        return "the same command with --train SPEC separates the trainer from the engines' kernels"
    return (
        "rlk-align weights TRAINED SCORED shows whether the trainer had these weights; then check "
        "its dropout, micro-batches and packing; rlk-align explain {DUMP} shows its bookkeeping"
    )


def _literal(text: str) -> str:
    """Escapes a text for `str.format`."""
    return text.replace("{", "{{").replace("}", "}}")


def _spec(side: EngineRecord) -> str:
    options = ",".join(f"{k}={v}" for k, v in side.options.items())
    return f"{side.name}:{options}" if options else side.name


def percent(share: Estimate) -> str:
    """Returns a share with its interval; empty if it is unknown."""
    if not share.value >= 0:
        return ""
    if not share.low > -1:
        return f"{share.value:.0%}"
    return f"{share.value:.0%} ({max(0.0, share.low):.0%} to {min(1.0, share.high):.0%})"
