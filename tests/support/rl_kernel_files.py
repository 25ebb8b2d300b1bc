"""A bundle as RL-Kernel's `Capture.prepare` and `Capture.record` write it (schema
rlkernel.capture.v1), after their published code: RL-Kernel is on no package index."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def prepare(folder: Path, boundaries: Sequence[Mapping[str, Any]]) -> None:
    """The manifest, which is written once before the workers start."""
    folder.mkdir(parents=True)
    manifest = {
        "schema_version": "rlkernel.capture.v1",
        "scope": "tests",
        "boundaries": list(boundaries),
    }
    (folder / "capture-manifest.json").write_text(json.dumps(manifest, indent=2))


class Capture:
    """A worker of one side."""

    def __init__(self, folder: Path, side: str, identity: Mapping[str, Any], rank: int = 0) -> None:
        self.folder, self.side, self.rank, self.calls = folder, side, rank, 0
        self.identity = dict(identity)
        manifest = json.loads((folder / "capture-manifest.json").read_text())
        self.specs = {spec["id"]: spec for spec in manifest["boundaries"]}

    def record(
        self,
        boundary: str,
        value: torch.Tensor,
        *,
        positions: list[int],
        offset: int = 0,
        contracts: Mapping[str, Any] | None = None,
    ) -> Path:
        """Rows `[N, F]` of a boundary at these positions, whose features start at `offset`."""
        captures = self.folder / "captures"
        captures.mkdir(exist_ok=True)
        path = captures / f"{self.side}-rank{self.rank}-call{self.calls}.pt"
        path.with_suffix(".lock").touch()
        torch.save(
            {
                "schema_version": "rlkernel.capture.v1",
                "boundary": boundary,
                "side": self.side,
                "identity": self.identity,
                "contracts": dict(contracts or {}),
                "route": "unknown",
                "tensors": {"value": value},
                "metadata": {
                    "stage_positions": {"value": torch.tensor(positions)},
                    "feature_offsets": {"value": offset},
                    "feature_sizes": {"value": self.specs[boundary]["width"]},
                },
            },
            path,
        )
        self.calls += 1
        return path
