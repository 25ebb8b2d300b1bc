"""RL-Kernel's portable capture, `rlkernel.capture.v1`.

    DIR/capture-manifest.json             the boundaries that the application declared
    DIR/captures/SIDE-rankN-callM.pt      rows of one boundary, [rows, features of a rank]

A boundary has an id, a module, and a stage. It is a site if its id is the site's name, or if its
module is a module of the checkpoint and its stage is input or output. Its rows are positions of one
sequence, whose tokens the identity lists.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.errors import DumpError
from rlk_align.record.imports.files import load, load_json
from rlk_align.record.imports.source import SITE, Forward, Segment, Source, Tap
from rlk_align.results import SideName

TOOL = "RL-Kernel"
SCHEMA = "rlkernel.capture.v1"
_MANIFEST = "capture-manifest.json"
_SIDES: dict[SideName, str] = {"rollout": "rollout", "train": "training"}
_STAGES = {"input": "input.0", "output": "output.0"}
_IDENTITIES = ("weights", "positions", "mask", "sampling")
"""What both sides' runs are said to have alike, beside the tokens."""


def read(paths: Sequence[Path], side: SideName) -> Source:
    """The rows of one side in a bundle. Raises DumpError."""
    if len(paths) != 1:
        raise DumpError(f"{len(paths)} paths", "a bundle is one folder")
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    manifest = load_json(folder / _MANIFEST)
    version = manifest.get("schema_version")
    if version != SCHEMA:
        raise DumpError(
            f"{folder / _MANIFEST} has version {version!r}", f"this rlk-align knows {SCHEMA}"
        )
    boundaries = _boundaries(folder, manifest)
    records: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    identity: dict[str, Any] | None = None
    for path in sorted((folder / "captures").glob("*.pt")):
        record = _record(path, boundaries)
        if record["side"] != _SIDES[side]:
            continue
        identity = identity or record["identity"]
        if repr(record["identity"]) != repr(identity):
            raise DumpError(
                f"{path} has another identity than the other captures of the {record['side']} side",
                "a bundle is of one forward of each side",
            )
        records.setdefault(record["boundary"], []).append((path, record))
    if identity is None:
        raise DumpError(f"{folder} has no capture of the {_SIDES[side]} side", "check --side")
    tokens = identity.get("tokens")
    ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids) or not ids:
        raise DumpError(
            f"the identity of {folder} does not list its tokens, so nothing says which sequence "
            f"its positions are of: {str(tokens)[:80]!r}",
            'give Capture the token ids themselves: identity={"tokens": [5, 40, ...], ...}',
        )
    forwards = []
    for name, of_boundary in records.items():
        tap = _tap(name, boundaries[name])
        forwards += [
            _forward(name, tap, positions, values, tuple(ids))
            for positions, values in _joined(name, of_boundary).items()
        ]
    incomplete = [
        lock.stem
        for lock in sorted((folder / "captures").glob(f"{_SIDES[side]}-*.lock"))
        if not lock.with_suffix(".pt").is_file()
    ]
    notes = [f"{sum(map(len, records.values()))} captures of {len(records)} boundaries"]
    if lacking := [name for name in boundaries if name not in records]:
        notes.append(f"boundaries without a capture: {', '.join(lacking)}")
    if incomplete:
        notes.append(f"captures that were not complete: {', '.join(incomplete)}")
    said = {f"identity.{n}": repr(identity.get(n)) for n in _IDENTITIES}
    for name, of_boundary in records.items():
        contracts = of_boundary[0][1].get("contracts") or {}
        said |= {f"{name}: {key}": repr(value) for key, value in contracts.items()}
    return Source(TOOL, tuple(forwards), attributes=said, notes=tuple(notes))


def _boundaries(folder: Path, manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    listed = manifest.get("boundaries")
    good = isinstance(listed, list) and all(
        isinstance(b, dict) and isinstance(b.get("id"), str) for b in listed
    )
    if not good or not isinstance(listed, list) or not listed:
        raise DumpError(f"{folder / _MANIFEST} lists no boundaries", "record it again")
    return {b["id"]: b for b in listed}


def _record(path: Path, boundaries: dict[str, Any]) -> dict[str, Any]:
    record = load(path)
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA:
        raise DumpError(f"{path} has version {version!r}", f"this rlk-align knows {SCHEMA}")
    if record.get("boundary") not in boundaries or record.get("side") not in _SIDES.values():
        raise DumpError(
            f"{path} is of the side {record.get('side')!r} and of the boundary "
            f"{record.get('boundary')!r}, which {_MANIFEST} does not list",
            "give the manifest of the same run",
        )
    try:
        value = record["tensors"]["value"]
        positions = record["metadata"]["stage_positions"]["value"]
        whole = (
            value.dim() == 2
            and len(positions) == len(value)
            and isinstance(record["identity"], dict)
            and isinstance(record["metadata"]["feature_offsets"]["value"], int)
        )
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DumpError(
            f"{path} lacks its rows, their positions, its identity or its offset", "record it again"
        )
    return record


def _tap(name: str, boundary: dict[str, Any]) -> Tap:
    end = _STAGES.get(str(boundary.get("stage")))
    module = str(boundary.get("module"))
    return Tap(name, SITE) if end is None else Tap(module, end)


def _joined(
    name: str, records: Sequence[tuple[Path, dict[str, Any]]]
) -> dict[tuple[int, ...], torch.Tensor]:
    """Positions -> their whole rows, from the features of each rank. Raises DumpError for ranks
    whose features overlap with other bits, or leave a gap."""
    by_positions: dict[tuple[int, ...], dict[int, tuple[Path, torch.Tensor]]] = {}
    for path, record in records:
        positions = tuple(int(p) for p in record["metadata"]["stage_positions"]["value"])
        offset = record["metadata"]["feature_offsets"]["value"]
        parts = by_positions.setdefault(positions, {})
        value = record["tensors"]["value"]
        if offset in parts and not torch.equal(
            parts[offset][1].view(torch.uint8), value.contiguous().view(torch.uint8)
        ):
            raise DumpError(
                f"{name}: {parts[offset][0].name} and {path.name} have the same rows and features "
                "with other bits",
                "record one forward in a bundle; of replicas, one is wrong",
            )
        parts.setdefault(offset, (path, value.contiguous()))
    joined = {}
    for positions, parts in by_positions.items():
        end = 0
        for offset, (path, value) in sorted(parts.items()):
            if offset != end:
                raise DumpError(
                    f"{name}: {path.name} has features from {offset} on, and {end} are before them",
                    "a rank's capture is missing",
                )
            end += value.shape[1]
        width = records[0][1]["metadata"].get("feature_sizes", {}).get("value", end)
        if end != width:
            raise DumpError(
                f"{name}: {end} of {width} features of the positions {positions[0]}.. are there",
                "a rank's capture is missing",
            )
        joined[positions] = torch.cat([value for _, (_, value) in sorted(parts.items())], dim=1)
    return joined


def _forward(
    name: str, tap: Tap, positions: tuple[int, ...], value: torch.Tensor, ids: tuple[int, ...]
) -> Forward:
    beyond = [p for p in positions if not 0 <= p < len(ids)]
    if beyond:
        raise DumpError(
            f"{name} has position {beyond[0]}, of {len(ids)} tokens of the identity",
            "the identity's tokens are those of the whole sequence",
        )
    rows = np.full(len(ids), -1)
    rows[list(positions)] = np.arange(len(positions))
    segment = Segment("sequence", 0, ids, rows)
    return Forward(name, (segment,), (len(positions),), {tap: (partial(_given, value),)})


def _given(value: torch.Tensor) -> torch.Tensor:
    return value
