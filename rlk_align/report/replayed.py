"""A request whose tokens were drawn again, as a document and for programs."""

from dataclasses import asdict
from typing import Any

from rlk_align.logs.replay.record import Parting, Replay
from rlk_align.report.document import Document, Fact
from rlk_align.report.verdict_json import finite
from rlk_align.report.words import engine_spec

SCHEMA = "rlk-align/replay/1"
NEXT = {
    "another logit": "find the operator that differs: rlk-align compare --edges decode_vs_train "
    "--rollout SPEC --train SPEC",
    "another kept set": "compare the limits of the record with those that the engine was given; "
    "equal limits keep other tokens only of other logits",
    "another draw": "check the seed, the position and the sampler of the record: its logits, as "
    "far as they are known, are these",
    "unknown": "record the rollout's log-probs, which tell another logit from another draw",
}
"""Reason -> the next step."""


def replayed_document(replay: Replay, folder: str) -> Document:
    """Returns the result of a replay; `folder` is that of its run."""
    parting = replay.parting
    return Document(
        status=replay.status,
        headline=_headline(replay),
        folder=folder,
        facts=[
            Fact("request", f"{replay.request}, {_seeds(replay)}"),
            Fact("settings", ", ".join(f"{k} {v:g}" for k, v in replay.settings.items())),
            Fact("engine", f"{engine_spec(replay.engine)}, {replay.engine.dtype}"),
            Fact("log-probs", _logprobs(replay), "breach" if replay.other_logprobs else ""),
            *([Fact("doubt", _missing(replay), "doubt")] if replay.missing else []),
            *([Fact("breach", text, "breach") for text in _why(parting)] if parting else []),
        ],
        sections=[],
        next_steps=[NEXT[parting.reason]] if parting else [],
    )


def _headline(replay: Replay) -> str:
    if (parting := replay.parting) is None:
        if replay.missing:
            total = replay.tokens + replay.missing
            return f"{replay.tokens:,} of {total:,} tokens are drawn again, and the others unknown"
        return f"all {replay.tokens:,} tokens are drawn again"
    return (
        f"token {parting.number + 1:,} of {replay.tokens:,} (position {parting.position:,}) is "
        f"drawn otherwise: {parting.drawn} instead of {parting.recorded}: {parting.reason}"
    )


def _seeds(replay: Replay) -> str:
    """Of a sequence of several requests, the number of their seeds."""
    first, *others = replay.seeds
    return f"{len(replay.seeds)} seeds, the first {first}" if others else f"seed {first}"


def _logprobs(replay: Replay) -> str:
    if not replay.compared_logprobs:
        return "none was recorded"
    if not replay.other_logprobs:
        return f"all {replay.compared_logprobs:,} have the recorded bits"
    return (
        f"{replay.other_logprobs:,} of {replay.compared_logprobs:,} have other bits, the first at "
        f"position {replay.first_other_logprob:,}"
    )


def _missing(replay: Replay) -> str:
    return f"the engine recorded no logits of {replay.missing:,} tokens, which were not drawn again"


def _why(parting: Parting) -> list[str]:
    """What is known of the first token that is drawn otherwise."""
    kept = "kept" if parting.recorded_is_kept else "dropped"
    texts = [
        f"the logit of {parting.drawn} is {parting.gap:+.6g} from that of {parting.recorded}, "
        f"which is {kept}; {parting.kept:,} tokens are kept, with {parting.mass:.6f} of the "
        "probability"
    ]
    if parting.recorded_logprob is not None:
        texts.append(
            f"the log-prob of {parting.recorded} is {parting.logprob:.9g}, and "
            f"{parting.recorded_logprob:.9g} was recorded"
        )
    if (other := parting.logits) is not None:
        texts.append(
            f"{other.differing:,} of {other.of:,} logits differ from the recorded ones, by up to "
            f"{other.largest:.6g} (token {other.token})"
        )
    elif parting.same_logits:
        texts.append("the recorded logits of this token have the same values")
    return texts


def replayed_record(replay: Replay, folder: str) -> dict[str, Any]:
    """Returns the same for programs."""
    record = asdict(replay) | {"engine": replay.engine.model_dump()}
    record |= {"status": replay.status, "exit_code": replay.exit_code, "run": folder}
    return {"schema": SCHEMA, **finite(record)}
