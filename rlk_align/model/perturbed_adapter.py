"""A copy of a LoRA adapter in which no B is zero.

PEFT starts B at zeros, so that a fresh adapter changes nothing, and an engine that never applies it
computes the same as one that does.
"""

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np

from rlk_align.model.adapter import CONFIG, TENSORS, read_settings
from rlk_align.model.stored import file_tensors

SIZE = 0.1
"""The standard deviation of the new entries, times the scale and the root of the rank."""
_LENGTH = 8
"""The bytes of safetensors' first number, the length of the header."""


def perturb_adapter(path: str, target: Path) -> list[str]:
    """Writes the adapter in the folder `path` to `target`, with seeded numbers in each B of zeros,
    the same for every copy. Returns the names of these B. Raises ModelError if `path` is no adapter
    that is supported."""
    settings, source = read_settings(path), Path(path).expanduser()
    known = {tensor.name: tensor.shape for tensor in file_tensors(source / TENSORS)}
    raw = (source / TENSORS).read_bytes()
    start = _LENGTH + int.from_bytes(raw[:_LENGTH], "little")
    header = json.loads(raw[_LENGTH:start])
    spread = SIZE / (abs(settings.scale) * math.sqrt(settings.rank)) if settings.scale else SIZE
    written: list[bytes] = []
    changed = []
    for name, shape in known.items():
        first, last = header[name]["data_offsets"]
        data = raw[start + first : start + last]
        if name.endswith(".lora_B.weight") and _is_zero(data, math.prod(shape)):
            changed.append(name)
            data = _drawn(name, math.prod(shape), spread).tobytes()
            header[name]["dtype"] = "F32"
        at = sum(map(len, written))
        header[name]["data_offsets"] = [at, at + len(data)]
        written.append(data)
    head = json.dumps(header).encode()
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / CONFIG, target / CONFIG)
    (target / TENSORS).write_bytes(
        b"".join([len(head).to_bytes(_LENGTH, "little"), head, *written])
    )
    return changed


def _is_zero(data: bytes, count: int) -> bool:
    """Whether all of `count` little-endian numbers are +0 or -0."""
    numbers = np.frombuffer(data, np.uint8).reshape(count, -1)
    return not numbers[:, :-1].any() and not (numbers[:, -1] & 0x7F).any()


def _drawn(name: str, count: int, spread: float) -> np.ndarray:
    """Uniform numbers of this standard deviation, little-endian float32, by the name alone."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    bits = np.random.PCG64(seed).random_raw(count) >> 40
    uniform = bits.astype(np.float64) / 2**23 - 1
    return (uniform * (spread * math.sqrt(3))).astype("<f4")
