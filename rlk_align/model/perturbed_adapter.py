"""A copy of a LoRA adapter in which no B is zero.

PEFT starts B at zeros, so that a fresh adapter changes nothing, and an engine that never applies it
computes the same as one that does.
"""

import hashlib
import math
import shutil
from pathlib import Path

import numpy as np

from rlk_align.model.adapter import CONFIG, TENSORS, read_settings
from rlk_align.model.stored import file_tensors

SIZE = 0.1
"""The standard deviation of the new entries, times the scale and the root of the rank."""


def perturb_adapter(path: str, target: Path) -> list[str]:
    """Writes the adapter in the folder `path` to `target`, with seeded numbers in each B of zeros,
    the same for every copy. Returns the names of these B. Raises ModelError if `path` is no adapter
    that is supported."""
    import torch
    from safetensors.torch import load_file, save_file

    settings, source = read_settings(path), Path(path).expanduser()
    file_tensors(source / TENSORS)  # names what is wrong with a damaged file
    tensors = load_file(source / TENSORS)
    spread = SIZE / (abs(settings.scale) * math.sqrt(settings.rank)) if settings.scale else SIZE
    changed = [n for n, x in tensors.items() if n.endswith(".lora_B.weight") and not x.any()]
    for name in changed:
        shape = tensors[name].shape
        drawn = _drawn(name, shape.numel(), spread)
        tensors[name] = torch.from_numpy(drawn).view(shape)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / CONFIG, target / CONFIG)
    save_file(tensors, target / TENSORS, {"format": "pt"})
    return changed


def _drawn(name: str, count: int, spread: float) -> np.ndarray:
    """Uniform float32 numbers of this standard deviation, by the name alone."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    bits = np.random.PCG64(seed).random_raw(count) >> 40
    uniform = bits.astype(np.float64) / 2**23 - 1
    return (uniform * (spread * math.sqrt(3))).astype(np.float32)
