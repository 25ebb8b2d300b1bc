"""The record of a live LoRA adapter, and the values that an engine computes with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch

from rlk_align.engines.common.parameters import CASTS
from rlk_align.errors import ModelError
from rlk_align.model.adapter import read_settings
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.schema import DtypeName, LoraModule, LoraRecord


@dataclass(frozen=True, slots=True)
class LiveLora:
    """The adapter of one projection in a live model."""

    site: str
    a: torch.Tensor
    """`[rank, in]`."""
    b: torch.Tensor
    """`[out, rank]`."""
    scale: float
    """The factor that the engine multiplies by, beside what it folded into B."""
    kernels: bool = False
    """Whether the kernels compute it."""


def folded(b: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """scale · B as an engine has it that folds the scale into B: B is rounded first."""
    return b.to(dtype) * scale


def factor_digests(
    a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[str, str]:
    """The digests of A and of scale · B, both rounded to a dtype."""
    return digest_parameter(a.to(dtype)), digest_parameter(folded(b, scale, dtype))


def record_adapter(path: str, live: Iterable[LiveLora], dtype: str) -> LoraRecord:
    """The record of the adapter in a folder, as it is live. `dtype`: the dtype that the engine
    computes in. Raises ModelError if an entry is NaN or infinite."""
    narrow = getattr(torch, dtype)
    modules = {each.site: _record(each, narrow) for each in live}
    return LoraRecord(path=path, scale=read_settings(path).scale, modules=modules)


def _record(live: LiveLora, narrow: torch.dtype) -> LoraModule:
    b = folded(live.b, live.scale, narrow)
    casts = [getattr(torch, name) for name in CASTS] if narrow == torch.float32 else []
    dtypes = [narrow, *casts]
    sums = b.double().sum(dim=0).tolist()
    for name, factor in (("lora_A", live.a), ("lora_B", b)):
        if not bool(factor.float().isfinite().all()):
            raise ModelError(f"{live.site}: {name} of the adapter has entries NaN or infinite")
    return LoraModule(
        rank=len(live.a),
        dtype=cast(DtypeName, str(live.b.dtype).removeprefix("torch.")),
        scale=live.scale,
        kernels=live.kernels,
        digests={
            str(d).removeprefix("torch."): factor_digests(live.a, live.b, live.scale, d)
            for d in dtypes
        },
        cast=(_cast_to(live.a, narrow), _cast_to(live.b, narrow)),
        sums=sums,
        zero=not (bool(live.a.float().any()) and bool(live.b.float().any())),
    )


def _cast_to(factor: torch.Tensor, narrow: torch.dtype) -> str:
    """The dtype, another than that of the engine, to which a factor was cast; empty if none is
    seen."""
    if factor.dtype not in (narrow, torch.float32):
        return str(factor.dtype).removeprefix("torch.")
    # Few numbers of bfloat16 are none of float16, so that only a float32 factor shows a cast to it.
    wide = (torch.float16,) if factor.dtype == torch.float32 else ()
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, *wide):
        if _is_exact(factor, dtype) and not (dtype in wide and _is_exact(factor, torch.bfloat16)):
            return "" if dtype == narrow else str(dtype).removeprefix("torch.")
    return ""


def _is_exact(factor: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(factor.to(dtype).to(factor.dtype), factor)
