"""The options of a call of `linear_logp`, and what its forward passes to its backward."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape


@dataclass(frozen=True)
class LogitOptions:
    """The steps from a sum to a logit z: rounding, softcap, scale, temperature (`options_of`)."""

    logit_dtype: torch.dtype
    softcap: float
    """0 for none."""
    scale: float
    temperature: float

    @functools.cached_property
    def inverse(self) -> float:
        """fp32(1 / temperature)."""
        return float(torch.tensor(1.0 / self.temperature, dtype=torch.float32))

    @property
    def slope(self) -> float:
        """dz/d(logit) without the softcap."""
        return self.scale * self.inverse

    @functools.cached_property
    def inverse_top(self) -> float:
        """1 / the largest z with the softcap; 0 without a softcap."""
        return 1.0 / (self.softcap * self.slope) if self.softcap else 0.0

    @functools.cached_property
    def numbers(self) -> tuple[float, float, float, float]:
        """The kernels' arguments (softcap, 1 / softcap, scale, 1 / temperature)."""
        cap = self.softcap
        return cap, 1.0 / cap if cap else 0.0, self.scale, self.inverse

    @property
    def scaled(self) -> bool:
        """Whether scale or temperature change anything."""
        return self.scale != 1.0 or self.inverse != 1.0


options_of = functools.lru_cache(maxsize=1024)(LogitOptions)
"""`LogitOptions`, cached."""


class RowStatistics(NamedTuple):
    """The results of the forward for each row."""

    logp: Tensor
    """[T, J], or [T] for ids[T]."""
    lse: Tensor
    """[T]."""
    entropy: Tensor
    """[T], or [0] if it is not requested."""
    n: Tensor
    """[T], the row's integer exponent."""
    log_s: Tensor
    """[T], log2 of the sum."""
    z: Tensor
    """The logits of the ids, with the shape of logp."""


def check_options(
    name: str, temperature: float, softcap: float | None, logit_scale: float | None,
    logit_dtype: torch.dtype,
) -> LogitOptions:  # fmt: skip
    """The options for the backends; raises ValueError or UnsupportedDtype if they are invalid."""
    if not temperature > 0:
        raise ValueError(f"{name}: temperature must be above 0, not {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name}: softcap must be above 0, not {softcap}; use None for no cap")
    if logit_scale is not None and not logit_scale > 0:
        raise ValueError(f"{name}: logit_scale must be above 0, not {logit_scale}")
    if logit_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedDtype(
            f"{name}: logit_dtype is {logit_dtype}; a floating dtype of 16 or 32 bits is needed"
        )
    # a compiler cannot trace the cache
    make = LogitOptions if torch.compiler.is_compiling() else options_of
    return make(logit_dtype, float(softcap or 0.0), float(logit_scale or 1.0), float(temperature))


def check_token_ids(name: str, token_ids: Tensor, rows: int) -> None:
    """Raise UnsupportedShape or UnsupportedDtype unless token_ids are integers [rows, J]."""
    if token_ids.dim() != 2 or token_ids.shape[0] != rows:
        raise UnsupportedShape(
            f"{name}: token_ids[{rows}, J] are needed, not {tuple(token_ids.shape)}"
        )
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"{name}: token_ids are {token_ids.dtype}; integers are needed")
