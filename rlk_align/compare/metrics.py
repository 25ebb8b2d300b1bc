"""The metrics of a comparison, all in float64, raw and unclipped.

NaN stays NaN: a check of a metric must be written so that NaN fails.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlk_align.compare.token_noise import token_noise
from rlk_align.results import CLIP_HIGH, CLIP_LOW, EdgeMetrics


def edge_metrics(
    first: np.ndarray, second: np.ndarray, sequence: np.ndarray | None = None
) -> EdgeMetrics:
    """Returns the metrics of two passes' log-probs of the same sampled tokens, `[N]` each, of one
    float dtype, in nats. `sequence`: the number of each token's sequence, int `[N]`; None omits the
    law of noise, whose intervals are clustered by sequence.

    Empty input gives NaN for every metric, which fails every limit.
    """
    a, b = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore"):
        delta = b - a
    if not len(delta):
        names = [n for n, f in EdgeMetrics.model_fields.items() if f.annotation is float]
        nothing: dict[str, Any] = dict.fromkeys(names, float("nan"))
        return EdgeMetrics(tokens=0, bit_mismatches=0, **nothing)
    size = np.abs(delta)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(delta)
        inside = (ratio >= CLIP_LOW) & (ratio <= CLIP_HIGH)
        return EdgeMetrics(
            tokens=len(delta),
            max_abs_dlogp=float(size.max()),
            mean_abs_dlogp=float(size.mean()),
            p99_abs_dlogp=float(np.quantile(size, 0.99)),
            p999_abs_dlogp=float(np.quantile(size, 0.999)),
            k1=float(-delta.mean()),
            k3=float((np.expm1(delta) - delta).mean()),
            ratio_mean=float(ratio.mean()),
            ratio_max=float(ratio.max()),
            clip_fraction=float((~inside).mean()),
            ess_fraction=float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
            token_mult_prob_error=float(np.exp(size).mean()),
            bit_mismatches=int((_bits(first) != _bits(second)).sum()),
            noise=None if sequence is None else token_noise(a, b, sequence),
        )


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}")


@dataclass(slots=True)
class ValueMetrics:
    """The distances between the values of a site's differing rows; rows are added block by
    block."""

    rows: int = 0
    elements: int = 0
    """Elements whose bits differ; ±0 and NaN count by their bit pattern."""
    max_abs: float = 0.0
    max_ulp: int = 0
    """Largest distance in representable numbers, between values of the same dtype; 0 where
    the dtypes differ."""
    max_rel_l2: float = 0.0
    """Per row, ‖b − a‖ / max(‖a‖, ‖b‖)."""
    sum_rel_l2: float = 0.0
    rel_l2: list[np.ndarray] = field(default_factory=list)
    """The relative L2 of every added row, in the order of the blocks."""
    min_cosine: float = 1.0
    frontier: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """(magnitude, error) points of the introduced rows, see `error_frontier`."""
    features: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Which features differ in any introduced row, `[F]`; empty without such rows."""

    def add(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        norm_a: torch.Tensor,
        norm_b: torch.Tensor,
        introduced: torch.Tensor,
    ) -> None:
        """Adds rows `[N, F]` of both sides with their L2 norms, float64 `[N]`; `introduced`, bool
        `[N]`, marks rows with equal inputs."""
        error = (b.double() - a.double()).abs_()
        norm_d = torch.linalg.vector_norm(error, dim=1)
        relative = torch.where(norm_d == 0, norm_d, norm_d / torch.maximum(norm_a, norm_b))
        cosine = (norm_a**2 + norm_b**2 - norm_d**2) / (2 * norm_a * norm_b)
        # A zero vector has no direction: its cosine is 1 with another zero vector, and 0 otherwise.
        cosine = torch.where(norm_a * norm_b == 0, (norm_d == 0).double(), cosine)
        self.rows += a.shape[0]
        self.max_abs = _nan_max(self.max_abs, error)
        self.max_rel_l2 = _nan_max(self.max_rel_l2, relative)
        self.sum_rel_l2 += float(relative.sum())
        self.rel_l2.append(relative.numpy())
        self.min_cosine = -_nan_max(-self.min_cosine, -cosine)
        if a.dtype == b.dtype:
            bits_a, bits_b = _ordered_bits(a), _ordered_bits(b)
            other = bits_a != bits_b
            wide = torch.int32 if a.element_size() == 2 else torch.int64
            self.max_ulp = max(self.max_ulp, int((bits_a.to(wide) - bits_b).abs_().max()))
        else:
            other = error != 0
        self.elements += int(other.sum())
        if introduced.any():
            rows = introduced.nonzero()[:, 0]
            features = other[rows].any(0).numpy()
            self.features = features | self.features if len(self.features) else features
            magnitude = torch.maximum(a[rows].double().abs(), b[rows].double().abs())
            points = torch.stack([magnitude.flatten(), error[rows].flatten()], dim=1)
            self.frontier = error_frontier(np.concatenate([self.frontier, points.numpy()]))


def error_frontier(points: np.ndarray) -> np.ndarray:
    """Returns the (magnitude, error) points `[M, 2]` that decide `error <= atol + rtol * magnitude`
    for every atol and every rtol >= 0: those with a larger error than all points of smaller
    magnitude.

    Points with a non-finite entry are omitted: they fail before any tolerance is applied.
    """
    points = points[np.isfinite(points).all(axis=1) & (points[:, 1] > 0)]
    if not len(points):
        return points
    points = points[np.lexsort((-points[:, 1], points[:, 0]))]
    best = np.maximum.accumulate(points[:, 1])
    rises = np.concatenate([[True], best[1:] > best[:-1]])
    return points[rises]


def _nan_max(so_far: float, values: torch.Tensor) -> float:
    """Returns the maximum; NaN where any value is NaN."""
    if not values.numel():
        return so_far
    return float(torch.maximum(torch.tensor(so_far, dtype=torch.float64), values.max()))


_INT_VIEW = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def _ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the bits as integers in the order of the numbers: neighbours differ by one, and so do
    -0 and +0. The bits of negative numbers count backwards, so all but the sign bit are
    inverted."""
    bits = values.contiguous().view(_INT_VIEW[values.dtype])
    width = 8 * values.element_size() - 1
    return bits ^ ((bits >> width) & ((1 << width) - 1))
