"""Whether a live vLLM model holds the weights that it was given."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

STACKED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", ("q_proj", "k_proj", "v_proj"))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", ("gate_proj", "up_proj"))),
}
"""Module of a checkpoint -> vLLM's module, and whose rows it holds, in this order."""

PADDED = ("embed_tokens", "lm_head")
"""vLLM adds rows to these, so that ranks can share them."""


def differing_weights(given: Iterable[tuple[str, Tensor]], model: Any) -> list[str]:
    """The names of vLLM's parameters that do not have the bits of the given ones, rounded to their
    dtype; and of those that only one side has.

    given: parameters by their names in the checkpoint, in any order.
    model: vLLM's model in this process, on one rank.
    """
    live = dict(model.named_parameters())
    wrong: list[str] = []
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in given:
        *path, module, kind = name.split(".")
        target, members = STACKED.get(module, (module, (module,)))
        held = ".".join([*path, target, kind])
        here = parts.setdefault(held, {})
        here[module] = value.detach()
        if len(here) == len(members):
            expected = torch.cat([here[x] for x in members])
            del parts[held]
            found = live.pop(held, None)
            if found is None or not _same_bits(expected, found, module in PADDED):
                wrong.append(held)
    return sorted({*wrong, *parts, *live})


def _same_bits(given: Tensor, live: Tensor, padded: bool) -> bool:
    if padded:
        live = live[: len(given)]
    if given.shape != live.shape:
        return False
    bits = {2: torch.int16, 4: torch.int32}[live.element_size()]
    given = given.to(live.device, live.dtype)
    return torch.equal(given.contiguous().view(bits), live.contiguous().view(bits))
