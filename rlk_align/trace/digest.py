"""The digests and statistics that a trace keeps of every row.

The digest of a row consists of two 64-bit sums. The row's bytes are read as 64-bit lanes x_j, the
last of which is padded with zeros. With fixed odd random a_j, b_j, c_j, all modulo 2^64:

    y_j = (x_j + 1) * a_j          a bijection of the lane
    z_j = y_j xor (y_j >> 32)      carries high bits into low ones, so that two sign flips
                                   cannot cancel
    h   = (sum_j z_j * b_j, sum_j z_j * c_j)

A change of a single lane always changes h; each of the two sums misses any other change with
probability about 2^-64. Modular sums do not depend on their order, so the digest is the same on
every device and for every batch.
"""

import importlib.util
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

_LANE_BYTES = 8
_MASK32 = 0xFFFFFFFF


@lru_cache(maxsize=64)
def _coefficients(lanes: int, device: torch.device) -> torch.Tensor:
    """Odd random int64, `[3, lanes]`, the same in every process and version."""
    bits = np.random.Generator(np.random.PCG64(20251120)).integers(
        np.iinfo(np.int64).min, np.iinfo(np.int64).max, size=(lanes, 3), endpoint=True
    )
    return torch.from_numpy((bits | 1).T.copy()).to(device)


def _lanes(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of `rows` `[N, F]` as int64 lanes `[N, ceil(F * itemsize / 8)]`."""
    width = rows.shape[1] * rows.element_size()
    data = rows.contiguous().reshape(-1).view(torch.uint8).reshape(rows.shape[0], width)
    pad = -data.shape[1] % _LANE_BYTES
    if pad:
        data = torch.nn.functional.pad(data, (0, pad))
    return data.contiguous().view(torch.int64)


def digest_rows(rows: torch.Tensor) -> torch.Tensor:
    """Digests of the raw bits of `rows` `[N, F]`, any dtype: int64 `[N, 2]` on its device.

    A digest depends on the order and on every bit: -0 differs from +0, and NaNs differ by their
    pattern. Large inputs are digested in blocks of rows, which bounds the memory.
    """
    lanes = _lanes(rows)
    a, b, c = _coefficients(lanes.shape[1], lanes.device)
    step = max(1, _block(lanes.device) // max(1, lanes.shape[1]))
    out = torch.empty(lanes.shape[0], 2, dtype=torch.int64, device=lanes.device)
    for start in range(0, lanes.shape[0], step):
        z = (lanes[start : start + step] + 1).mul_(a)
        z ^= (z >> 32) & _MASK32
        out[start : start + step, 0] = (z * b).sum(dim=1)
        out[start : start + step, 1] = (z * c).sum(dim=1)
    return out


def _block(device: torch.device) -> int:
    """The number of elements per block: those that fit a CPU's cache, or that keep a GPU busy."""
    return 1 << (17 if device.type == "cpu" else 24)


def row_statistics(rows: torch.Tensor) -> torch.Tensor:
    """Statistics of `rows` `[N, F]`: float64 `[N, 3]`, L2 norm and largest magnitude of the finite
    entries, and number of NaN or Inf."""
    out = torch.empty(rows.shape[0], 3, dtype=torch.float64, device=rows.device)
    step = max(1, _block(rows.device) // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        block, stop = rows[start : start + step].double(), start + step
        finite = torch.isfinite(block)
        out[start:stop, 2] = (~finite).sum(dim=1).double()
        block = block.where(finite, 0.0)
        out[start:stop, 0] = torch.linalg.vector_norm(block, dim=1)
        out[start:stop, 1] = block.abs().amax(dim=1)
    return out


def digest_parameter(weight: torch.Tensor) -> str:
    """A digest of a parameter's values, the same in every dtype that holds them exactly.

    Values are widened to float32, which is exact for bf16, fp16 and fp8; float64 stays. -0 becomes
    +0, because the weights of an engine that packs them are read without the sign of zero.
    """
    return digest_parameters([("", weight)])[""]


def digest_parameters(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> `digest_parameter`. Parameters of one shape are digested together, so that a GPU runs
    a few kernels for all layers, and the host waits once for all digests."""
    groups: dict[tuple, list[tuple[str, torch.Tensor]]] = {}
    by_name: dict[str, str] = {}
    for name, weight in named:
        by_name[name] = ""  # keeps the caller's order
        key = (weight.device, weight.shape, weight.dtype)
        groups.setdefault(key, []).append((name, weight))
    # For each device: the names of its parameters, and their digests on the device.
    parts: dict[torch.device, tuple[list[str], list[torch.Tensor]]] = {}
    for (device, shape, dtype), some in groups.items():
        names, digests = parts.setdefault(device, ([], []))
        names += [name for name, _ in some]
        size = len(some)
        if not _has_kernel(device, dtype):
            size = max(1, _STACKED // max(1, shape.numel()))
        for first in range(0, len(some), size):
            digests.append(_digests([weight for _, weight in some[first : first + size]]))
    for names, digests in parts.values():
        for name, (low, high) in zip(names, torch.cat(digests).tolist(), strict=True):
            by_name[name] = f"{low & (2**64 - 1):016x}{high & (2**64 - 1):016x}"
    return by_name


_STACKED = 1 << 27
"""The largest number of elements that are copied into one stack and digested together."""


def _digests(weights: list[torch.Tensor]) -> torch.Tensor:
    """The digests of n parameters of one shape, int64 `[n, 2]` on their device."""
    n, shape, device = len(weights), weights[0].shape, weights[0].device
    count = shape[0] if len(shape) > 1 else 1
    rows = [weight.reshape(count, -1) for weight in weights]
    if _has_kernel(device, weights[0].dtype):
        from rlk_align.trace.digest_kernel import row_digests

        parts = row_digests(rows, _coefficients(-(-rows[0].shape[1] // 2), device))
    else:
        stacked = torch.cat(rows) if n > 1 else rows[0]
        step = max(1, _block(device) // max(1, stacked.shape[1]))
        parts = torch.cat([digest_rows(_wide(block)) for block in stacked.split(step)])
    sizes = _sizes(shape, device).expand(n, -1)
    return digest_rows(torch.cat([parts.reshape(n, -1), sizes], dim=1))


@lru_cache(maxsize=256)
def _sizes(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """The shape, int64 `[dimensions + 1]`; cached, because a copy to a GPU waits for it."""
    return torch.tensor([*shape, 0], dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `digest_kernel.py` can read such parameters: it needs Triton and an NVIDIA GPU of
    compute capability 8.0 or newer."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and importlib.util.find_spec("triton") is not None
    )


def _wide(block: torch.Tensor) -> torch.Tensor:
    """The block in float32 or float64, with positive zeros."""
    return (block if block.dtype == torch.float64 else block.float()) + 0.0


def digest_slices(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A 64-bit digest of each slice of a parameter along dimension 0, `[n]`, and along dimension 1,
    `[m]` (empty for a vector), with values as in `digest_parameter`.

    Along dimension 1 a lane is one element, so that the sums of blocks of rows can be added.
    """
    rows = weight.reshape(weight.shape[0], -1) if weight.dim() > 1 else weight.reshape(-1, 1)
    step = max(1, _block(weight.device) // max(1, rows.shape[1]))
    along_0 = torch.empty(len(rows), dtype=torch.int64, device=weight.device)
    along_1 = torch.zeros(rows.shape[1], dtype=torch.int64, device=weight.device)
    a, b, _ = _coefficients(len(rows), weight.device)
    for start in range(0, len(rows), step):
        block = _wide(rows[start : start + step])
        stop = start + len(block)
        along_0[start:stop] = digest_rows(block)[:, 0]
        lanes = block.view(torch.int64 if block.dtype == torch.float64 else torch.int32).long()
        z = (lanes + 1).mul_(a[start:stop, None])
        z ^= (z >> 32) & _MASK32
        along_1 += (z * b[start:stop, None]).sum(dim=0)
    if weight.dim() == 1:
        along_1 = along_1[:0]
    return along_0.cpu().numpy(), along_1.cpu().numpy()
