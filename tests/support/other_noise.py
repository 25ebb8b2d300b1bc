"""Healthy noise of other shapes than the one that the diagnoses were tuned on."""

from collections.abc import Callable

import numpy as np
from simulate_dumps import Dump

from rlk_align.logs.dumps.sequences import Sequences


def _heavy_tails(dump: Dump) -> None:
    """Student's t with 4 degrees of freedom in place of a normal law."""
    dump.scale *= 0.7 * np.sqrt(4 / dump.rng.chisquare(4, len(dump.scale)))


def _sequence_scales(dump: Dump) -> None:
    """Sequences whose noise differs by up to 2 times either way."""
    scales = np.exp(dump.rng.uniform(-np.log(2), np.log(2), dump.sequences))
    dump.scale *= 0.9 * scales[dump.sequence]


def _rare_outliers(dump: Dump) -> None:
    """One token in 200 is 8 times worse, as where an expert is chosen differently."""
    dump.extra[dump.rng.random(len(dump.extra)) < 0.005] = 8.0


def _flat(dump: Dump) -> None:
    dump.logits *= 0.3


def _peaked(dump: Dump) -> None:
    dump.logits *= 2.5


def _mixed_entropy(dump: Dump) -> None:
    """Half of the sequences are flat, the others peaked."""
    flat = dump.rng.random(dump.sequences) < 0.5
    dump.logits *= np.where(flat, 0.4, 2.0)[dump.sequence][:, None]


def _top_p(dump: Dump) -> None:
    """Both sides renormalise over the same kept set, of top-p 0.8 to 0.97."""
    dump.top_p = dump.rng.uniform(0.8, 0.97)


SHAPES: dict[str, Callable[[Dump], None]] = {
    "heavy tails": _heavy_tails,
    "sequence scales": _sequence_scales,
    "rare outliers": _rare_outliers,
    "flat": _flat,
    "peaked": _peaked,
    "mixed entropy": _mixed_entropy,
    "top-p on both sides": _top_p,
}


def healthy_shape(shape: str, seed: int, tokens: int, dtype: str, turns: int = 1) -> Sequences:
    """Returns a healthy run whose noise or law has this shape."""
    dump = Dump(seed, tokens, dtype, turns=turns)
    SHAPES[shape](dump)
    return dump.sequences_of()
