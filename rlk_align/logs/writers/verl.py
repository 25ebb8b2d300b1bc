"""Log-probs of verl's trainers (0.9.1 was used), taken after old_log_prob was computed.

The batch is a DataProto, a TensorDict or a plain mapping. The V1 trainer keeps jagged rows without
padding; the earlier one pads prompts on the left and responses on the right.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.writers.batch import Record, batch_records

FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs")
"""The fields of the V1 trainer's batch that the writer needs."""


def records(
    batch: Any, config: Any, *, train_version: int | None = None, mask_rewritten: bool = False
) -> list[Record]:
    """Returns the records of a batch, for `write_step`; `config` is the trainer's.

    Call it after old_log_prob and before rollout correction, which removes rejected tokens from
    response_mask; if you call it later, pass `mask_rewritten=True`. Raises DumpError in bypass
    mode, whose old_log_probs are the rollout's, and if a field is missing.
    """
    correction = config["algorithm"].get("rollout_correction") or {}
    if correction.get("bypass_mode"):
        raise DumpError(
            "verl runs in bypass mode: its old_log_probs are a copy of rollout_log_probs",
            "algorithm.rollout_correction.bypass_mode=False makes the trainer compute its own",
        )
    fields = getattr(batch, "batch", batch)
    known = set(fields.keys())
    if "rollout_log_probs" not in known:
        raise DumpError(
            "verl's batch has no rollout_log_probs",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
        )
    if absent := sorted(set(FIELDS) - known):
        raise DumpError(
            f"verl's batch has no {', '.join(absent)}", "write it after old_log_prob was computed"
        )
    rollout = config["actor_rollout_ref"]["rollout"]
    names = ("temperature", "top_p", "top_k", "logprobs_mode")
    arrays = _jagged(fields) if _is_nested(fields["responses"]) else _padded(fields)
    return batch_records(
        **arrays,
        groups=_uids(batch, fields),
        train_version=train_version,
        sampling=Sampling(**{name: rollout.get(name) for name in names}),
        rollout_dtype=rollout.get("dtype"),
        mask_rewritten=mask_rewritten,
    )


def _padded(fields: Mapping[str, Any]) -> dict[str, Any]:
    if "attention_mask" not in set(fields.keys()):
        raise DumpError("verl's batch has no attention_mask", "write it with the batch's padding")
    prompts, responses = (np.array(fields[n].tolist()) for n in ("prompts", "responses"))
    attention_mask = np.array(fields["attention_mask"].tolist())
    return {
        "token_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "prompt_lengths": attention_mask[:, : prompts.shape[1]].sum(1),
        "mask": fields["response_mask"],
        "rollout_logprobs": fields["rollout_log_probs"],
        "train_logprobs": fields["old_log_probs"],
    }


def _jagged(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Pads the rows for `_padded`."""
    rows = {name: [row.tolist() for row in fields[name].unbind()] for name in FIELDS}
    prompts, responses = rows["prompts"], rows["responses"]
    for name in FIELDS[2:]:
        if [*map(len, rows[name])] != [*map(len, responses)]:
            raise DumpError(f"{name} and responses differ in length", "write the batch as it is")
    padded = {
        "attention_mask": np.concatenate(
            [
                _pad([[1] * len(p) for p in prompts], left=True),
                _pad([[1] * len(r) for r in responses]),
            ],
            axis=1,
        ),
        "prompts": _pad(prompts, left=True),
        **{name: _pad(rows[name]) for name in FIELDS[1:]},
    }
    return _padded(padded)


def _pad(rows: list[list[Any]], left: bool = False) -> NDArray[Any]:
    width = max(map(len, rows))
    padding = [[0] * (width - len(row)) for row in rows]
    return np.array([p + r if left else r + p for r, p in zip(rows, padding, strict=True)])


def _is_nested(values: Any) -> bool:
    return bool(getattr(values, "is_nested", False))


def _uids(batch: Any, fields: Any) -> list[str] | None:
    """The names of the samples' prompts, which a DataProto does not have among its tensors."""
    for named in (getattr(batch, "non_tensor_batch", {}), fields):
        if "uid" in set(named.keys()):
            return [str(uid) for uid in named["uid"]]
    return None
