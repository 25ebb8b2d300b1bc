"""Converts a batch of a trainer's arrays to records of the neutral file.

B = samples, L = columns of the token ids, K = columns of the other arrays.

An array with K columns always describes the **last K columns** of the token ids.
This rule covers arrays of the response alone, padded on the right (TRL, verl) or on the left
(SkyRL), and arrays of next-token prediction, whose L − 1 columns leave out the first token
(OpenRLHF, ROLL).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.readers.missing import SENTINEL, prompt_digest

Array = Any
"""A NumPy array, a tensor of torch or of another package with `tolist`, or lists."""
Record = dict[str, Any]
"""A line of the neutral file, without the schema, id and step, which `step_file` adds."""
UNSURE = -0.05
"""A side is unsure of a token whose log-prob is below this. If the other side has 0.0 at every
token, its values are then not log-probs."""


def batch_records(
    *,
    token_ids: Array,
    attention_mask: Array,
    mask: Array,
    rollout_logprobs: Array | None,
    train_logprobs: Array | None,
    prompt_lengths: Array | None = None,
    entropy: Array | None = None,
    groups: Sequence[str | int] | None = None,
    rewards: Array | None = None,
    rollout_version: int | None = None,
    train_version: int | None = None,
    sampling: Sampling | None = None,
    rollout_dtype: str | None = None,
    train_dtype: str | None = None,
    mask_rewritten: bool | None = None,
) -> list[Record]:
    """Returns a record for each sample.

    `token_ids` and `attention_mask` are [B, L]; the mask has 0 at padding, on either side. `mask`,
    both log-probs and `entropy` are [B, K] and describe the last K columns; the mask has 1 where
    the loss counts the token. `prompt_lengths` and `rewards` are [B]; without the lengths, a prompt
    ends before the first token that the loss counts. Without `groups`, the samples of one prompt
    are a group. The dtypes are those in which the engine and the trainer compute.

    Log-probs keep their exact value; those of padding are omitted. A log-prob becomes null if it is
    −9999, or if it is a 0.0 of the rollout outside of the mask. Raises DumpError if the arrays do
    not fit together, or if a side is missing.
    """
    ids = _whole(token_ids, "token_ids")
    not_padding = _flags(attention_mask, "attention_mask", ids.shape)
    scored = _flags(mask, "mask")
    if len(scored) != len(ids) or scored.shape[1] > ids.shape[1]:
        raise DumpError(
            f"mask is {list(scored.shape)} and token_ids is {list(ids.shape)}",
            "each row of mask describes the last columns of the same row of token_ids",
        )
    response = not_padding[:, ids.shape[1] - scored.shape[1] :]
    prompts = _prompts(prompt_lengths, not_padding.sum(1), response, scored)
    columns = _columns(rollout_logprobs, train_logprobs, entropy, scored)
    if groups is not None and len(groups) != len(ids):
        raise DumpError(f"groups has {len(groups)} entries, for {len(ids)} samples", "give [B]")
    reward = None if rewards is None else _numbers(rewards, "rewards", (len(ids),)).tolist()
    shared = {
        "rollout_version": rollout_version,
        "train_version": train_version,
        "sampling": (sampling or Sampling()).model_dump(),
        "rollout_dtype": rollout_dtype,
        "train_dtype": train_dtype,
        "mask_rewritten": mask_rewritten,
    }
    records = []
    for row, prompt in enumerate(prompts):
        tokens = ids[row][not_padding[row]]
        indices = np.flatnonzero(response[row])
        indices = indices[len(indices) + prompt - len(tokens) :]
        record: Record = {
            "group": prompt_digest(pa.array(tokens), prompt) if groups is None else groups[row],
            "token_ids": tokens.tolist(),
            "prompt_length": prompt,
            "reward": None if reward is None else reward[row],
        }
        for name, (values, missing) in columns.items():
            pairs = zip(values[row, indices].tolist(), missing[row, indices].tolist(), strict=True)
            record[name] = [None if absent else value for value, absent in pairs]
        records.append(record | shared)
    return records


def _columns(
    rollout: Array | None, train: Array | None, entropy: Array | None, scored: NDArray[np.bool_]
) -> dict[str, tuple[NDArray[Any], NDArray[np.bool_]]]:
    """Field -> its values [B, K] and the mask of missing ones. Raises DumpError if a side is
    missing, or has only zeros that cannot be log-probs."""
    g = _side(rollout, "rollout_logprobs", scored)
    t = _side(train, "train_logprobs", scored)
    for name, side, other in (("rollout_logprobs", g, t), ("train_logprobs", t, g)):
        if not side[scored].any() and (other[scored] < UNSURE).any():
            raise DumpError(
                f"{name} is 0.0 at every token that the loss counts",
                "the log-probs were never recorded: switch on their recording",
            )
    # Within the mask, only the whole run shows whether a 0.0 is a log-prob.
    zero = (g == 0.0) & ~scored
    none = np.zeros_like(scored)
    columns = {
        "mask": (scored, none),
        "rollout_logprobs": (g, zero | (g == SENTINEL)),
        "train_logprobs": (t, t == SENTINEL),
    }
    if entropy is not None:
        columns["entropy"] = _numbers(entropy, "entropy", scored.shape), none
    return columns


def _side(array: Array | None, name: str, scored: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A side's log-probs. Raises DumpError if there are none."""
    if array is None:
        raise DumpError(
            f"{name} is None: there is nothing to compare",
            "switch on its recording: docs/write-log-probs.md says how for each framework",
        )
    return _numbers(array, name, scored.shape)


def _prompts(
    given: Array | None,
    totals: NDArray[np.int64],
    response: NDArray[np.bool_],
    scored: NDArray[np.bool_],
) -> list[int]:
    """The length of each prompt. Raises DumpError if the padding or the mask contradict it."""
    for row in np.flatnonzero((scored & ~response).any(1))[:1]:
        raise DumpError(
            f"mask counts {int((scored & ~response)[row].sum())} tokens of padding in row {row}",
            "multiply it by the mask of padding first: a mask of tools may be padded with 1",
        )
    before = totals - response.sum(1)
    counted = scored.any(1)
    first_index = np.where(counted, scored.argmax(1), 0)
    rank = np.take_along_axis(response.cumsum(1), first_index[:, None], 1)[:, 0] - 1
    first = np.where(counted, before + rank, totals)
    if given is None:
        return first.tolist()
    lengths = _whole(given, "prompt_lengths", (len(totals),))
    for row in np.flatnonzero((lengths < before) | (lengths > first))[:1]:
        raise DumpError(
            f"prompt_lengths is {lengths[row]} in row {row}, of whose {totals[row]} tokens "
            f"{before[row]} precede the log-probs and {first[row]} precede the first token that "
            "the loss counts",
            "count the prompt's tokens without padding; a mask that begins within the prompt is "
            "shifted",
        )
    return lengths.tolist()


def _whole(array: Array, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.int64]:
    values = _checked(array, name, shape)
    if values.dtype.kind not in "iu" or (values.size and values.min() < 0):
        raise DumpError(
            f"{name} has values other than counts and token ids", "give integers from 0 on"
        )
    return values.astype(np.int64)


def _flags(array: Array, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.bool_]:
    values = _checked(array, name, shape)
    if not ((values == 0) | (values == 1)).all():
        raise DumpError(f"{name} has values other than 0 and 1", "give a mask")
    return values.astype(bool)


def _numbers(array: Array, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return _checked(array, name, shape).astype(np.float64)


def _checked(array: Array, name: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """The array in NumPy. Raises DumpError if its values are not numbers, or for another shape."""
    try:
        # Through lists, because NumPy has no bfloat16; its values are exact in float64.
        values = np.array(array.tolist() if hasattr(array, "tolist") else array)
    except ValueError as error:
        raise DumpError(f"{name} has rows of several lengths", "pad it, on either side") from error
    if not values.size:
        raise DumpError(f"{name} is empty", "write only steps that have samples")
    if values.dtype.kind not in "biuf":
        raise DumpError(
            f"{name} has values that are not numbers", "write -9999.0 for a missing log-prob"
        )
    if values.ndim != (2 if shape is None else len(shape)) or (shape and values.shape != shape):
        wanted = "[B, columns]" if shape is None else str(list(shape))
        raise DumpError(f"{name} is {list(values.shape)}, and {wanted} is expected", "see its help")
    return values
