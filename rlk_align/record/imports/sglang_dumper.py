"""Files of SGLang's dumper (`DUMPER_ENABLE=1`), which runs in SGLang and in trainers.

    DIR/EXP/step=0___rank=0___dump_index=11___name=NAME___....pt     {"value": ..., "meta": {...}}

`DUMPER_NON_INTRUSIVE_MODE=all` writes the inputs and outputs of every module, as
`non_intrusive__MODULE.inputs.N` and `non_intrusive__MODULE.output[.N]`, beside the core fields
that say which tokens a forward has. In other names that a job gives to `dumper.dump`, the name of
an operator of ours, with `layer_id=`, is its site. `dumper.dump_model` writes the parameters.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.errors import DumpError
from rlk_align.record.imports.files import load, tensor_in
from rlk_align.record.imports.places import LOGITS
from rlk_align.record.imports.sequences import segments_of
from rlk_align.record.imports.source import SITE, Forward, Load, Segment, Source, Tap
from rlk_align.results import SideName

TOOL = "SGLang's dumper"
_CORE = frozenset(
    {"input_ids", "positions", "position_ids", "seq_lens", "req_pool_indices", "rids"}
)
"""The fields that say which rows a forward has."""
_MASKS = frozenset({"non_intrusive__inputs.attention_mask"})
_MODULE = re.compile(r"non_intrusive__(.+)\.(inputs|output)(?:\.(\w+))?")
_NEXT_LOGITS = "logits_processor.output.next_token_logits"
_PARAMETER = "___name=param__"
"""What the names of files of parameters have."""
_NOT_JOINED = ("attn_dp_size", "attn_cp_size", "cp_size", "moe_dp_size")
"""Kinds of parallelism by which ranks have other rows."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    name: str
    meta: dict[str, Any]
    value: Any
    """Of the core fields; None of others, which are read when they are needed."""

    @property
    def parallel(self) -> dict[str, Any]:
        """The ranks of its process, by the engine that knows them; empty if none does."""
        infos = (self.meta.get(f"{engine}_parallel_info") for engine in ("sglang", "megatron"))
        return next((i for i in infos if isinstance(i, dict) and "tp_size" in i), {})

    @property
    def called(self) -> tuple[str, Any]:
        """What a forward writes once."""
        return self.name, self.meta.get("layer_id")


@dataclass(slots=True)
class _Call:
    """The files of one forward on one rank."""

    step: int
    core: dict[str, Any] = field(default_factory=dict)
    files: dict[tuple[str, Any], _File] = field(default_factory=dict)


def read(paths: Sequence[Path], side: SideName) -> Source:
    """The forwards in the files at these paths. Raises DumpError."""
    files, unread = [], []
    for path in _files(paths):
        try:
            files.append(_open(path))
        except DumpError:
            # The dumper leaves such a file where a parameter of SGLang cannot be saved.
            if _PARAMETER not in path.name:
                raise
            unread.append(path)
    kept = [f for f in files if f.meta.get("recompute_status") != "recompute"]
    parameters = {
        f.name.removeprefix("param__"): tensor_in(f.path, "value")
        for f in kept
        if f.name.startswith("param__")
    }
    values = [f for f in kept if not f.name.startswith(("param__", "grad__"))]
    if not values:
        raise DumpError("the files have no values of a forward", "set DUMPER_ENABLE_VALUE=1")
    _check_parallel(values)
    replicas: dict[int, dict[int, list[_File]]] = {}
    for f in values:
        # Ranks of which nothing says how they share the model have sequences of their own.
        own = f.parallel.get("dp_rank", 0) if f.parallel else f.meta["rank"]
        replicas.setdefault(own, {}).setdefault(f.meta["rank"], []).append(f)
    forwards = [
        forward
        for number, ranks in sorted(replicas.items())
        for forward in _forwards(number, ranks)
    ]
    tp = max(f.parallel.get("tp_size", 1) for f in values)
    notes = [f"{len(files)} files, {len(forwards)} forwards"]
    if unread:
        notes.append(f"{len(unread)} files of parameters cannot be read, from {unread[0].name} on")
    if parameters and tp > 1:
        notes.append("parameters of several tensor-parallel ranks are not read")
    return Source(
        tool=TOOL,
        forwards=tuple(forwards),
        tp=tp,
        parameters=parameters if tp == 1 else {},
        notes=tuple(notes),
    )


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DumpError(f"{path} does not exist", "check the path")
        below = sorted(path.rglob("step=*___*.pt")) if path.is_dir() else [path]
        if not below:
            raise DumpError(
                f"{path} has no files of {TOOL}, whose names begin with step=",
                "give the folder DUMPER_DIR/DUMPER_EXP_NAME",
            )
        found += below
    return found


def _open(path: Path) -> _File:
    content = load(path)
    content = content if isinstance(content, dict) else {}
    meta = content.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    numbered = all(isinstance(meta.get(name), int) for name in ("step", "rank", "dump_index"))
    name = meta.get("name")
    if "value" not in content or not numbered or not isinstance(name, str):
        raise DumpError(
            f"{path} is not a file of {TOOL} that is known here: it needs value, and meta with "
            "step, rank, dump_index and name",
            "this rlk-align knows the dumper of SGLang 0.5.23",
        )
    value = content["value"] if name in _CORE | _MASKS else None
    return _File(path, name, meta, value)


def _check_parallel(files: Sequence[_File]) -> None:
    """Raises DumpError for ranks that cannot be joined, or that have no files."""
    first = files[0].parallel
    for name in _NOT_JOINED:
        if first.get(name, 1) > 1:
            raise DumpError(
                f"{files[0].path}: {name} is {first[name]}: these ranks have rows of their own, "
                "which are not joined",
                "record with tensor and pipeline parallelism alone",
            )
    there = {(f.parallel.get("tp_rank", 0), f.parallel.get("pp_rank", 0)) for f in files}
    tp, pp = first.get("tp_size", 1), first.get("pp_size", 1)
    missing = [(t, p) for p in range(pp) for t in range(tp) if (t, p) not in there]
    if missing:
        words = ", ".join(f"tp_rank {t} of stage {p}" if pp > 1 else f"{t}" for t, p in missing)
        raise DumpError(
            f"the files of tensor-parallel rank {words} are missing, of {tp} ranks"
            + (f" and {pp} stages" if pp > 1 else ""),
            "give the folders of all ranks",
        )


def _forwards(replica: int, ranks: dict[int, list[_File]]) -> Iterator[Forward]:
    """Joins the forwards of ranks that compute the same rows."""
    calls = {rank: _calls(files) for rank, files in ranks.items()}
    counts = {rank: len(of_rank) for rank, of_rank in calls.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"rank {rank} has {count}" for rank, count in sorted(counts.items()))
        raise DumpError(f"ranks have different numbers of forwards: {said}", "record them again")
    tp_rank = {rank: files[0].parallel.get("tp_rank", 0) for rank, files in ranks.items()}
    in_order = sorted(ranks, key=lambda rank: (tp_rank[rank], rank))
    for number in range(counts[in_order[0]]):
        each = [calls[rank][number] for rank in in_order]
        core: dict[str, Any] = {}
        for call in each:
            core = call.core | core
        name = f"forward {number}" + (f" of rank {replica}" if replica else "")
        shape, segments = _segments(f"{replica}.{number}", core, name)
        taps: dict[Tap, list[Load]] = {}
        for call in each:
            for f in call.files.values():
                if tap := _tap(f):
                    taps.setdefault(tap, []).append(tensor_in(f.path, "value"))
        loads = {tap: tuple(of_ranks) for tap, of_ranks in taps.items()}
        last = frozenset({LOGITS} & loads.keys()) if "seq_lens" in core else frozenset()
        yield Forward(name, tuple(segments), shape, loads, last)


def _calls(files: Sequence[_File]) -> list[_Call]:
    """Separates the forwards of a rank. A forward writes its tokens first, and each value of a
    module once."""
    calls: list[_Call] = []
    core: dict[str, Any] = {}
    for f in sorted(files, key=lambda f: f.meta["dump_index"]):
        if f.name in _CORE | _MASKS:
            core.setdefault(f.name, f.value)
            continue
        if not calls or f.called in calls[-1].files or f.meta["step"] != calls[-1].step:
            calls.append(_Call(f.meta["step"]))
        # Layers repeat the fields that they read.
        calls[-1].core = core | calls[-1].core
        core = {}
        calls[-1].files[f.called] = f
    return calls


def _tap(f: _File) -> Tap | None:
    """Where a file's tensor was taken; None for the inputs of the whole model."""
    found = _MODULE.fullmatch(f.name)
    if f.name == f"non_intrusive__{_NEXT_LOGITS}":
        return LOGITS
    if found is None:
        layer = f.meta.get("layer_id")
        if f.name.startswith("non_intrusive__"):
            return None
        return Tap(f.name if layer is None else f"layers.{layer}.{f.name}", SITE)
    module, end, number = found.groups()
    return Tap(module, f"{end.removesuffix('s')}.{number or 0}")


def _segments(key: str, core: dict[str, Any], name: str) -> tuple[tuple[int, ...], list[Segment]]:
    """The shape of a forward's tokens, and its sequences."""
    ids = core.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        raise DumpError(
            f"{name} has no input_ids, which say what its rows are",
            "let DUMPER_FILTER keep the core fields: input_ids, positions, seq_lens, rids",
        )
    tokens = ids.long().numpy()
    if tokens.ndim == 1 and "seq_lens" in core:
        return tokens.shape, list(_of_engine(tokens, core, name))
    shape = tokens.shape
    tokens = np.atleast_2d(tokens)
    found = core.get("position_ids", core.get("positions"))
    positions = np.arange(tokens.shape[1])[None] if found is None else np.atleast_2d(found.numpy())
    positions = np.broadcast_to(positions, tokens.shape)
    mask = core.get("non_intrusive__inputs.attention_mask")
    there = np.ones(tokens.shape, dtype=bool)
    if isinstance(mask, torch.Tensor) and tuple(mask.shape) == tokens.shape:
        there = mask.numpy() != 0
    segments: list[Segment] = []
    for row, kept in enumerate(there):
        at = row * tokens.shape[1] + np.flatnonzero(kept)
        position = positions[row][kept]
        if not kept.all() and len(position) and position[0]:
            # A model that gets no position ids counts from the padding on.
            position = position - position[0]
        segments += segments_of(f"{key}.{row}", tokens[row][kept], position, at)
    return shape, segments


def _of_engine(ids: np.ndarray, core: dict[str, Any], name: str) -> Iterator[Segment]:
    """The requests of a batch of SGLang: of each, the tokens up to its length."""
    lengths = core["seq_lens"].long().tolist()
    positions = core["positions"].long().numpy()
    keys = core.get("rids")
    if keys is None and "req_pool_indices" in core:
        keys = core["req_pool_indices"].tolist()
    if keys is None or len(keys) != len(lengths):
        raise DumpError(f"{name} does not say which requests it has", "keep rids in DUMPER_FILTER")
    at = 0
    for key, length in zip(keys, lengths, strict=True):
        count = length - int(positions[at]) if at < len(positions) else 0
        rows = np.arange(at, at + count)
        fits = count > 0 and at + count <= len(ids)
        if not fits or (positions[rows] != int(positions[at]) + np.arange(count)).any():
            raise DumpError(
                f"{name}: its positions do not fit its lengths {lengths}", "record it again"
            )
        yield Segment(str(key), int(positions[at]), tuple(ids[rows].tolist()), rows)
        at += count
    if at != len(ids):
        raise DumpError(
            f"{name} has {len(ids)} rows, and its requests have {at}", "record it again"
        )
