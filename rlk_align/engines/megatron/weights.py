"""The converter: a checkpoint's safetensors -> this rank's parameters, and live parameters ->
canonical ones.

Both directions use `parameter_plan`, which follows from the table of places. A rank reads only its
own slices from disk.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from rlk_align.engines.common.parameters import LiveParameter, ParameterRecord
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.weights import Parameter, canonical, parameters
from rlk_align.engines.megatron.experts import expert_parameters
from rlk_align.engines.megatron.grid import Grid
from rlk_align.engines.megatron.layout import vocabulary
from rlk_align.engines.process.ranks import Ranks, gather
from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import tensor_name, weight_files
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape
from rlk_align.model.stored import stored_tensors


def parameter_plan(
    places: list[Place], shape: ModelShape, tp: int, biased: frozenset[str]
) -> list[Parameter]:
    """Every parameter of the model, in canonical order; a tied head repeats the embedding's.

    `biased`: the operators of a layer that have a bias.
    """
    every = [
        *parameters(places, shape, tp, lambda name: vocabulary(name, shape, tp)),
        *expert_parameters(shape),
    ]
    return [p for p in every if not p.name.endswith(".bias") or biased & _operators(p)]


def _operators(parameter: Parameter) -> set[str]:
    return {name.removesuffix(".bias").rpartition(".")[2] for name in parameter.layout.ops}


class Tensors:
    """Reads slices of a checkpoint's tensors."""

    def __init__(self, folder: Path, modules: Mapping[str, str]) -> None:
        """`modules`: as for `tensor_name`. Raises ModelError without readable safetensors."""
        self._folder, self._modules = folder, modules
        self._open = ExitStack()
        self._stored = stored_tensors(folder, modules)
        self._file: dict[Path, Any] = {}
        try:
            for path in weight_files(folder):
                self._file[path] = self._open.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"weights of {folder} could not be loaded: {error}") from error

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def read(self, op: str, dim: int, start: int, stop: int, shape: list[int]) -> torch.Tensor:
        """A slice of a canonical parameter whose whole shape is `shape`.

        Raises ModelError if the parameter is missing or has another shape.
        """
        name = tensor_name(op, self._modules)
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(
                f"{self._folder}: the checkpoint has no tensor {name}",
                "it is incomplete, or its config.json belongs to another model",
            )
        if list(stored.shape) != shape:
            raise ModelError(
                f"{self._folder}: {name} has shape {list(stored.shape)}, and config.json asks for "
                f"{shape}"
            )
        return stored.part(self._file[stored.file], dim, start, stop)


HEAD = OPERATORS["logits"].parameter


@torch.no_grad()
def load(
    live: Mapping[str, torch.Tensor],
    folder: Path,
    plan: list[Parameter],
    rank: int,
    modules: Mapping[str, str],
    tied: bool,
) -> None:
    """Fills every parameter of a model; rows that pad the vocabulary are 0. `modules`: as for
    `tensor_name`; `tied`: whether the head has the embedding's weight."""
    # The first of two entries for a parameter counts: the checkpoint has no tensor of a tied head.
    entries = {entry.name: entry for entry in reversed(plan)}
    assert entries.keys() == live.keys(), live.keys() ^ entries.keys()
    with Tensors(folder, modules) as tensors:
        for entry in entries.values():
            dim, target = entry.dim or 0, live[entry.name]
            filled = 0
            for offset, piece in entry.layout.local(rank):
                whole = list(target.shape)
                whole[dim] = sum(p.size for _, _, p in entry.layout.holders(piece.op))
                if piece.size:
                    op = OPERATORS["logits"].tied_to if tied and piece.op == HEAD else piece.op
                    part = tensors.read(op, dim, piece.start, piece.stop, whole)
                    target.narrow(dim, offset, piece.size).copy_(part)
                filled = offset + piece.size
            target.narrow(dim, filled, target.shape[dim] - filled).zero_()


def live_parameters(
    live: Mapping[str, torch.Tensor], plan: list[Parameter], ranks: Ranks
) -> Iterator[LiveParameter]:
    """The canonical parameters of a live model, gathered to the first of these ranks, which alone
    yields them; called on all of these ranks."""
    live = {name: value.detach() for name, value in live.items()}
    everywhere = _on_every_rank(set(live), ranks)
    known = [entry for entry in plan if entry.name in everywhere]
    yield from canonical(known, live.get, lambda local: gather(local, ranks))


def merge_records(records: list[ParameterRecord], grid: Grid) -> Iterator[ParameterRecord]:
    """The parameters of all ranks, on rank 0, from the records of the first rank of each
    tensor-parallel group; further copies become `replicas`. Called on every rank."""
    if grid.all.world == grid.tp.world:
        yield from records
        return
    every: list[Any] = [None] * grid.all.world
    dist.all_gather_object(every, records)
    if grid.all.rank:
        return
    copies: dict[str, dict[int, ParameterRecord]] = {}
    for rank in range(0, grid.all.world, grid.tp.world):
        for parameter in every[rank]:
            copies.setdefault(parameter.name, {})[rank] = parameter
    for of_groups in copies.values():
        yield _of_groups(of_groups, grid)


def _of_groups(copies: Mapping[int, ParameterRecord], grid: Grid) -> ParameterRecord:
    """One parameter, from its record in each tensor-parallel group, by the group's first rank."""
    recorded = next(iter(copies.values()))
    shards, digests = [], [""] * grid.all.world
    for first, copy in copies.items():
        # If other ranks lack the parameter, a whole copy is recorded with its ranks too.
        whole = [(rank, 0, 0, copy.shape[0]) for rank in range(grid.tp.world)]
        everywhere = len(copies) * grid.tp.world == grid.all.world
        own = copy.shards or ([] if everywhere else whole)
        shards += [(first + rank, dim, start, stop) for rank, dim, start, stop in own]
        others = copy.replicas or [copy.digest] * (grid.tp.world - 1)
        digests[first : first + grid.tp.world] = [copy.digest, *others]
    several = sum(map(bool, digests)) > 1
    return replace(recorded, shards=shards, replicas=digests[1:] if several else [])


def _on_every_rank(names: set[str], ranks: Ranks) -> set[str]:
    """The names that every rank has; a rank without a parameter does not gather it."""
    if ranks.world == 1:
        return names
    others: list[Any] = [None] * ranks.world
    dist.all_gather_object(others, names, group=ranks.group)
    return names.intersection(*others)
