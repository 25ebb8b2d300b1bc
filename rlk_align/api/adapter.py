"""What `--perturb-lora` makes of a side."""

from dataclasses import replace
from pathlib import Path

from rlk_align.capture.recording import Side
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.adapter import adapter_paths
from rlk_align.model.perturbed_adapter import perturb_adapter


def perturbed(side: Side, name: str, folder: Path) -> Side:
    """The engine of a side with a copy of its adapter, in the run's folder, in which no B is zero.
    Raises BadOption for a side without an adapter, and for an adapter without a B of zeros."""
    path = side.option("lora") if isinstance(side, EngineSpec) else None
    if path is not None and len(adapter_paths(path)) > 1:
        raise BadOption(
            f"--perturb-lora: {side} has several adapters, and one is supported",
            "omit --perturb-lora, or give one adapter",
        )
    if path is None or not isinstance(side, EngineSpec):
        raise BadOption(
            f"--perturb-lora: {side} has no lora=PATH, and the adapters of both sides are changed",
            "omit --perturb-lora, or give both engines lora=PATH",
        )
    target = folder / "adapters" / name
    if not perturb_adapter(str(path), target):
        raise BadOption(
            f"--perturb-lora: no B of {path} is all zeros, so the adapter shows already how the "
            "sides apply it",
            "omit --perturb-lora",
        )
    return replace(side, options=side.options | {"lora": str(target)})
