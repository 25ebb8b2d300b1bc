"""Hidden states for the tests of `linear_sample`, and the two steps that it must equal.

T = rows   V = vocabulary   H = hidden size
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import rlk_kernels as rk
import torch
from sample_suite import of_requests
from torch import Tensor

TEMPERATURES = (0.0, 0.7, 1.0, 1.6, 0.05)
"""Those of rows 0, 1, ..., again and again."""


@dataclass(frozen=True)
class Case:
    """The arguments of `linear_sample`."""

    hidden: Tensor
    weight: Tensor
    keys: Tensor
    positions: Tensor
    options: dict[str, Any]

    def rows(self, index: Any) -> "Case":
        """Some of the rows."""
        heat = self.options["temperature"][index]
        return replace(
            self, hidden=self.hidden[index], keys=self.keys[index],
            positions=self.positions[index], options={**self.options, "temperature": heat},
        )  # fmt: skip

    def fused(self, **more: Any) -> rk.Sampled:
        return rk.linear_sample(
            self.hidden, self.weight, self.keys, self.positions, raw_logprobs=True,
            **{**self.options, **more},
        )  # fmt: skip

    def in_two_steps(self, backend: str | None = None) -> rk.Sampled:
        """`sample` of all logits."""
        options = dict(self.options)
        bias, dtype = options.pop("bias", None), options.pop("logit_dtype", torch.float32)
        logits = rk.linear(self.hidden, self.weight, bias, out_dtype=dtype, backend=backend)
        return rk.sample(
            logits, self.keys, self.positions, raw_logprobs=True, backend=backend, **options
        )


def case(
    t: int, h: int, v: int, dtype: torch.dtype, *, padding: int = 0, device: str = "cpu",
    seed: int = 0, **options: Any,
) -> Case:  # fmt: skip
    """Logits with a deviation of 3, at the temperatures above. padding: the last columns, which a
    bias of -inf excludes; another tenth is excluded, too."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    hidden, weight = random(t, h), random(v, h, scale=3 * h**-0.5)
    if padding:
        bias = random(v)
        bias[torch.rand(v, generator=generator).to(device) < 0.1] = -math.inf
        bias[v - padding :] = -math.inf
        options["bias"] = bias
    heat = torch.tensor([TEMPERATURES[i % len(TEMPERATURES)] for i in range(t)], device=device)
    where = (x.to(device) for x in of_requests(t, seed))
    return Case(hidden, weight, *where, {"temperature": heat, **options})
