"""Files as frameworks write them, field by field."""

import json
from pathlib import Path

import numpy as np


def lines(path: Path, records: list[dict]) -> Path:
    """Writes records as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def drawn(seed: int, count: int) -> list[float]:
    """Log-probs as float32 holds them, as torch's tolist gives them."""
    values = -np.random.default_rng(seed).exponential(size=count).astype(np.float32)
    return values.tolist()
