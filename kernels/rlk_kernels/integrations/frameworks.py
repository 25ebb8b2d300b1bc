"""What the switches in frameworks of RL share: one list of what they refuse, and digests by which
weights are compared without sending them.

A framework has a trainer, which holds the parameters, and a rollout, to which it copies them.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported

CHUNK = 1 << 24
"""Entries that are widened to int64 at a time."""


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""As checkpoints of transformers name them."""


_FUSED = "its checkpoint fuses projections, so that no copy of its weights can be checked"
_EXPERTS = "no copy of its experts or of its routers' corrections can be checked"
UNCHECKED = {
    **dict.fromkeys(("glm", "glm4", "phi3"), _FUSED),
    **dict.fromkeys(("gpt_oss", "ernie4_5_moe", "minimax_m2"), _EXPERTS),
}
"""Families whose parameters a checkpoint holds otherwise than `vllm.weights` -> why no copy can be
checked."""


def of_family(model: Any) -> list[str]:
    """The reason why a live model's copies cannot be checked; [] if they can."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    why = UNCHECKED.get(str(family))
    return [] if why is None else [f"model_type={family}: {why}"]


def refuse(framework: str, reasons: Iterable[str]) -> None:
    """Raises NotSupported with all of the reasons, each a sentence that names a setting. Does
    nothing without a reason."""
    if listed := [f"\n  - {reason}" for reason in reasons]:
        raise NotSupported(
            f"rlk_kernels in {framework} refuses {len(listed)} setting{'s'[: len(listed) > 1]}, "
            f"with which the rollout and the trainer would differ:{''.join(listed)}"
        )


def at(config: Any, path: str) -> Any:
    """The value at a dotted path of nested mappings or objects; None where the path ends early."""
    for name in path.split("."):
        get = getattr(config, "get", None)
        config = getattr(config, name, None) if get is None else get(name, None)
        if config is None:
            return None
    return config


def row_digests(weight: Tensor) -> Tensor:
    """int64 [rows] on the CPU: a digest of each row's bits, of weight[rows, columns], or of each
    entry of weight[rows]. Rows that differ in one entry have different digests; a rank that holds
    some of the rows can compute theirs alone."""
    matrix = weight.detach().reshape(len(weight), -1)
    wide = {2: torch.int16, 4: torch.int32}[matrix.element_size()]
    factors = _factors(matrix.shape[1]).to(matrix.device)
    parts = matrix.split(max(1, CHUNK // matrix.shape[1]))
    return torch.cat([(part.view(wide).long() * factors).sum(1) for part in parts]).cpu()


@functools.lru_cache(maxsize=64)
def _factors(columns: int) -> Tensor:
    """An odd number for each column: a change of one entry changes the sum, modulo 2^64."""
    generator = torch.Generator().manual_seed(columns)
    return torch.randint(-(2**62), 2**62, (columns,), generator=generator) * 2 + 1


def to_bytes(digests: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Digests as they travel between processes."""
    return {name: digest.numpy().tobytes() for name, digest in digests.items()}


def differences(
    sent: Mapping[str, bytes], held: Iterable[tuple[str, Tensor, int]], tied: bool
) -> list[str]:
    """The parameters that a rollout does not hold as the trainer sent them, each with the reason;
    [] where all are equal. `sent`: the digests of every row; `held`: (name, the rows that this rank
    holds, the number of the first of them). `tied`: whether the output layer is the embedding."""
    left = {name: torch.frombuffer(bytearray(raw), dtype=torch.int64) for name, raw in sent.items()}
    if tied:
        embedding, head = left[EMBEDDING], left.pop(HEAD, left[EMBEDDING])
        if not torch.equal(embedding, head):
            return [f"{HEAD}: tied to {EMBEDDING}, and sent with other values"]
    wrong = []
    for name, rows, first in held:
        if tied and name == HEAD:
            continue
        if (expected := left.pop(name, None)) is None:
            wrong.append(f"{name}: the trainer did not send it")
            continue
        found, expected = row_digests(rows), expected[first : first + len(rows)]
        unequal = int((found != expected).sum()) if found.shape == expected.shape else len(found)
        if unequal:
            wrong.append(f"{name}: {unequal} of {len(found)} rows differ")
    return wrong + [f"{name}: the rollout does not hold it" for name in left]
