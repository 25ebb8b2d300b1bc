"""Dumps of msprobe's PrecisionDebugger, level L0 or mix, task tensor.

    DUMP_PATH/step0/rank0/dump.json                   what each module got and returned
                         /dump_tensor_data/*.pt       the tensors that it names

A call is `Module.PATH.CLASS.forward.N`: the N-th call of a module. dump.json does not say how ranks
share the model.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.errors import DumpError
from rlk_align.record.imports.files import load_json, tensor_in
from rlk_align.record.imports.sequences import segments_of
from rlk_align.record.imports.source import Forward, Load, Segment, Source, Tap
from rlk_align.results import SideName

TOOL = "msprobe"
_CALL = re.compile(r"Module\.(?P<module>.+)\.\w+\.forward\.(?P<number>\d+)")
_EMBEDDING = "model.embed_tokens"
_STATISTICS = (
    "the largest, smallest and mean value and the norm of whole tensors. No row of them belongs to "
    "a token, so they can show that two runs differ, and neither which operator introduced it nor "
    "which side is off"
)

Calls = dict[int, dict[str, dict[str, Any]]]
"""Number of a call -> module -> what dump.json says of it."""


def read(paths: Sequence[Path], side: SideName) -> Source:
    """The forwards in the dumps at these paths. Raises DumpError."""
    dumps = _dumps(paths)
    forwards: list[Forward] = []
    parameters: dict[str, Load] = {}
    notes: list[str] = []
    tokens: dict[str, Path] = {}
    for replica, dump in enumerate(dumps):
        calls = _calls(dump, notes)
        for number, modules in calls.items():
            forward = _forward(dump, replica, number, modules)
            forwards.append(forward)
            seen = repr([s.ids for s in forward.segments])
            if (other := tokens.setdefault(seen, dump)) != dump:
                raise DumpError(
                    f"{other.parent} and {dump.parent} have the same tokens, and msprobe's files "
                    "do not say how ranks share the model",
                    "import the folder of one rank",
                )
        parameters |= _parameters(dump, calls)
    notes.insert(0, f"{len(dumps)} dump.json, {len(forwards)} forwards")
    return Source(TOOL, tuple(forwards), parameters=parameters, notes=tuple(notes))


def _dumps(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DumpError(f"{path} does not exist", "check the path")
        below = sorted(path.rglob("dump.json")) if path.is_dir() else [path]
        if not below:
            raise DumpError(f"{path} has no dump.json", "give a folder stepN that msprobe wrote")
        found += below
    steps = sorted({dump.parent.parent for dump in found})
    if len(steps) > 1:
        raise DumpError(
            f"{', '.join(map(str, paths))}: several steps: {', '.join(s.name for s in steps)}",
            f"give one of them: {steps[0]}",
        )
    return found


def _calls(dump: Path, notes: list[str]) -> Calls:
    """The forwards in a dump.json, with the modules that were called once in each."""
    content = load_json(dump)
    if content.get("task") == "statistics":
        raise DumpError(
            f"{dump} has statistics: {_STATISTICS}",
            'record again with "task": "tensor" and "level": "L0" in its config.json; '
            "msprobe compare compares statistics",
        )
    if content.get("framework", "pytorch") != "pytorch":
        raise DumpError(f"{dump} is of {content['framework']}", "dumps of PyTorch are read")
    data = content.get("data")
    if content.get("task") != "tensor" or not isinstance(data, dict):
        raise DumpError(
            f"{dump} is not a dump that is known here: task {content.get('task')!r}",
            "this rlk-align knows those of mindstudio-probe 26.2, task tensor",
        )
    calls: Calls = {}
    counts: dict[str, int] = {}
    for name, call in data.items():
        if (found := _CALL.fullmatch(name)) and isinstance(call, dict):
            module, number = found["module"], int(found["number"])
            calls.setdefault(number, {})[module] = call
            counts[module] = counts.get(module, 0) + 1
    if _EMBEDDING not in counts:
        raise DumpError(
            f"{dump} has no call of {_EMBEDDING}, whose input says what the rows are",
            'set "level": "L0" or "mix", and no scope or list without that module',
        )
    # What gradient checkpointing repeats has no call of the embedding, so numbers do not match.
    others = [m for m, count in counts.items() if count != counts[_EMBEDDING]]
    if others:
        notes.append(
            f"{len(others)} modules were not called once in each of {counts[_EMBEDDING]} forwards, "
            f"as by gradient checkpointing, and are left out: {', '.join(others[:4])}"
        )
    forwards = sorted(number for number, modules in calls.items() if _EMBEDDING in modules)
    return {
        number: {m: c for m, c in calls[number].items() if m not in others} for number in forwards
    }


def _forward(dump: Path, replica: int, number: int, modules: dict[str, dict[str, Any]]) -> Forward:
    name = f"forward {number}" + (f" of {dump.parent.name}" if replica else "")
    taps: dict[Tap, tuple[Load, ...]] = {}
    for module, call in modules.items():
        for end, key in (("input", "input_args"), ("output", "output")):
            for place, item in enumerate(call.get(key) or []):
                if loads := list(_tensors(dump, item)):
                    taps[Tap(module, f"{end}.{place}")] = (loads[0],)
    ids = _required(dump, modules[_EMBEDDING]).long().numpy()
    if ids.ndim != 2:
        raise DumpError(
            f"{dump}: {name} has tokens of shape {list(ids.shape)}, which do not say where a "
            "sequence ends",
            "record a trainer's forwards, whose tokens are [batch, length]",
        )
    positions = _positions(dump, modules)
    positions = np.arange(ids.shape[1])[None] if positions is None else np.atleast_2d(positions)
    segments: list[Segment] = []
    for row, position in enumerate(np.broadcast_to(positions, ids.shape)):
        at = row * ids.shape[1] + np.arange(ids.shape[1])
        segments += segments_of(f"{replica}.{number}.{row}", ids[row], position, at)
    return Forward(name, tuple(segments), ids.shape, taps)


def _required(dump: Path, call: dict[str, Any]) -> torch.Tensor:
    loads = [load for item in call.get("input_args") or [] for load in _tensors(dump, item)]
    if not loads:
        raise DumpError(f"{dump} has no tensor of the input of {_EMBEDDING}", "record it again")
    return loads[0]()


def _positions(dump: Path, modules: dict[str, dict[str, Any]]) -> np.ndarray | None:
    """The position ids of the batch, which transformers passes to each layer."""
    for call in modules.values():
        item = (call.get("input_kwargs") or {}).get("position_ids")
        for load in _tensors(dump, item):
            return load().long().numpy()
    return None


def _parameters(dump: Path, calls: Calls) -> dict[str, Load]:
    found: dict[str, Load] = {}
    for modules in calls.values():
        for module, call in modules.items():
            for name, item in (call.get("parameters") or {}).items():
                for load in _tensors(dump, item):
                    found.setdefault(f"{module}.{name}", load)
    return found


def _tensors(dump: Path, item: Any) -> Iterator[Load]:
    """The tensor of an entry of dump.json, if it is one. Raises DumpError for a file that is
    missing, outside of the dump's folder, or not as dump.json says."""
    if not isinstance(item, dict) or "data_name" not in item:
        return
    name = item["data_name"]
    path = dump.parent / "dump_tensor_data" / str(name)
    if not isinstance(name, str) or Path(name).name != name:
        raise DumpError(f"{dump} names a file outside of its folder: {name!r}", "record it again")
    if path.suffix != ".pt":
        raise DumpError(f"{path} is not of torch.save", "dumps of PyTorch are read")
    if not path.is_file():
        raise DumpError(f"{dump} names {name}, which is missing", "copy the whole folder")
    load = tensor_in(path)

    def checked() -> torch.Tensor:
        value = load()
        if [str(value.dtype), list(value.shape)] != [item.get("dtype"), item.get("shape")]:
            raise DumpError(
                f"{path} is {value.dtype}{list(value.shape)}, and dump.json says "
                f"{item.get('dtype')}{item.get('shape')}",
                "record it again",
            )
        return value

    yield checked
