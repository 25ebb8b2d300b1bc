"""The converter: a checkpoint's safetensors -> this rank's parameters, and live parameters back to
canonical ones.

Both directions read one table, `parameter_plan`; a rank reads only its own slices from disk.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from rlk_align.engines.common.layout import FeatureSlice, Layout, even, side_by_side
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.megatron.layout import grouped_qkv, vocabulary
from rlk_align.engines.process.ranks import Ranks
from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import tensor_name, weight_files
from rlk_align.model.families import ModelShape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the GPTModel, and what canonical parameters it is made of."""

    name: str
    """In the GPTModel, e.g. `decoder.layers.0.self_attention.linear_qkv.weight`."""
    layout: Layout
    dim: int | None
    """The dimension along which the layout lies; None where every rank holds a whole copy."""


def parameter_plan(
    shape: ModelShape, tp: int, tied: bool, biased: frozenset[str], spec: str
) -> Iterator[Parameter]:
    """Every parameter of the model, in canonical order.

    `biased`: the operators of a layer that have a bias.
    """
    te = spec == "te"
    yield Parameter("embedding.word_embeddings.weight", vocabulary("embed", shape, tp), 0)
    for i in range(shape.layers):
        yield from _layer_plan(shape, tp, i, biased, te)
    yield _replicated("decoder.final_layernorm.weight", "final_norm", shape.hidden, tp)
    if not tied:
        yield Parameter("output_layer.weight", vocabulary("lm_head", shape, tp), 0)


def _layer_plan(
    shape: ModelShape, tp: int, i: int, biased: frozenset[str], te: bool
) -> Iterator[Parameter]:
    here, op = f"decoder.layers.{i}", f"layers.{i}"
    attention, mlp = f"{here}.self_attention", f"{here}.mlp"
    # TransformerEngine's linears hold the norm before them.
    attn_norm = f"{attention}.linear_qkv.layer_norm_" if te else f"{here}.input_layernorm."
    mlp_norm = f"{mlp}.linear_fc1.layer_norm_" if te else f"{here}.pre_mlp_layernorm."
    yield _replicated(f"{attn_norm}weight", f"{op}.attn_norm", shape.hidden, tp)
    for suffix, name in _kinds("q_proj" in biased):
        names = (f"{op}.q_proj{suffix}", f"{op}.k_proj{suffix}", f"{op}.v_proj{suffix}")
        yield Parameter(f"{attention}.linear_qkv.{name}", grouped_qkv(shape, tp, names), 0)
    if shape.has("q_norm"):
        for norm in ("q", "k"):
            target = f"{attention}.{norm}_layernorm.weight"
            yield _replicated(target, f"{op}.{norm}_norm", shape.head_dim, tp)
    o_proj = even(f"{op}.o_proj", shape.heads * shape.head_dim, tp)
    yield Parameter(f"{attention}.linear_proj.weight", o_proj, 1)
    if "o_proj" in biased:
        yield _replicated(f"{attention}.linear_proj.bias", f"{op}.o_proj.bias", shape.hidden, tp)
    yield _replicated(f"{mlp_norm}weight", f"{op}.mlp_norm", shape.hidden, tp)
    for suffix, name in _kinds("gate_proj" in biased):
        both = (f"{op}.gate_proj{suffix}", f"{op}.up_proj{suffix}")
        yield Parameter(f"{mlp}.linear_fc1.{name}", side_by_side(both, shape.intermediate, tp), 0)
    yield Parameter(f"{mlp}.linear_fc2.weight", even(f"{op}.down_proj", shape.intermediate, tp), 1)
    # The ranks' partial sums are added up before the bias is: each rank holds all of it.
    if "down_proj" in biased:
        yield _replicated(f"{mlp}.linear_fc2.bias", f"{op}.down_proj.bias", shape.hidden, tp)


def _kinds(biased: bool) -> list[tuple[str, str]]:
    """What is added to a canonical name and to a linear's, for each of its parameters."""
    return [("", "weight"), (".bias", "bias")] if biased else [("", "weight")]


def _replicated(name: str, op: str, size: int, tp: int) -> Parameter:
    return Parameter(name, Layout(((FeatureSlice(op, 0, size),),) * tp), None)


class Tensors:
    """Slices of a checkpoint's tensors, read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError where there are no safetensors, or unreadable ones."""
        self._folder = folder
        self._open = ExitStack()
        self._file: dict[str, Any] = {}
        try:
            for path in weight_files(folder):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._file |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"weights of {folder} could not be loaded: {error}") from error

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def read(self, op: str, dim: int, start: int, stop: int, shape: list[int]) -> torch.Tensor:
        """A slice of a canonical parameter that is `shape` as a whole.

        Raises ModelError where it is missing or of another shape.
        """
        name = tensor_name(op)
        if name not in self._file:
            raise ModelError(
                f"{self._folder}: the checkpoint has no tensor {name}",
                "it is incomplete, or its config.json belongs to another model",
            )
        tensor = self._file[name].get_slice(name)
        if tensor.get_shape() != shape:
            raise ModelError(
                f"{self._folder}: {name} has shape {tensor.get_shape()}, config.json asks for "
                f"{shape}"
            )
        return tensor[start:stop] if dim == 0 else tensor[:, start:stop]


@torch.no_grad()
def load(model: Any, folder: Path, plan: list[Parameter], rank: int) -> None:
    """Fills every parameter of `model`; rows that pad the vocabulary are 0."""
    parameters = dict(model.named_parameters())
    assert {p.name for p in plan} == parameters.keys(), parameters.keys() ^ {p.name for p in plan}
    with Tensors(folder) as tensors:
        for entry in plan:
            dim, target = entry.dim or 0, parameters[entry.name]
            filled = 0
            for offset, piece in entry.layout.local(rank):
                whole = list(target.shape)
                whole[dim] = sum(p.size for _, _, p in entry.layout.holders(piece.op))
                if piece.size:
                    part = tensors.read(piece.op, dim, piece.start, piece.stop, whole)
                    target.narrow(dim, offset, piece.size).copy_(part)
                filled = offset + piece.size
            target.narrow(dim, filled, target.shape[dim] - filled).zero_()


def live_parameters(
    model: Any, plan: list[Parameter], tied: bool, ranks: Ranks
) -> Iterator[LiveParameter]:
    """Canonical parameters as the live model has them, gathered to rank 0; called on every rank,
    and whole on rank 0 only, where alone something is yielded."""
    live = dict(model.named_parameters())
    everywhere = _on_every_rank(set(live), ranks)
    for entry in plan:
        # A patch may have put something without that parameter there: it is then missed by name.
        if entry.name not in everywhere:
            continue
        parts = gather(live[entry.name].detach(), ranks)
        if parts is None:
            continue
        for op in entry.layout.ops:
            if entry.dim is None:
                yield LiveParameter(op, parts[0], replicas=tuple(parts[1:]))
                continue
            whole = entry.layout.assemble(op, parts, entry.dim)
            shards = entry.layout.shards(op, entry.dim)
            yield LiveParameter(op, whole, shards)
            if tied and op == "embed":
                head = LiveParameter("lm_head", whole, shards)
    if tied and ranks.rank == 0:
        yield head


def _on_every_rank(names: set[str], ranks: Ranks) -> set[str]:
    """Those that every rank has: one that lacks a parameter would not take part in gathering it."""
    if ranks.world == 1:
        return names
    others: list[Any] = [None] * ranks.world
    dist.all_gather_object(others, names)
    return names.intersection(*others)


def gather(local: torch.Tensor, ranks: Ranks) -> list[torch.Tensor] | None:
    """The tensors of all ranks, equal in shape, in rank order: on rank 0; None elsewhere."""
    if ranks.world == 1:
        return [local]
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks.world)] if ranks.rank == 0 else None
    dist.gather(local, parts, dst=0)
    return parts
