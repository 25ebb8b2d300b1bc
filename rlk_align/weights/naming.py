"""Stored names -> canonical parameters. The conventions are those of HF, of engines that fuse q, k,
v or gate and up, and of Megatron, with the prefixes of any wrapper around the model."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from rlk_align.engines.common.layout import Layout, even, fused, of_fused
from rlk_align.engines.common.weights import parameters
from rlk_align.engines.megatron.experts import expert_parameters
from rlk_align.engines.megatron.layout import vocabulary
from rlk_align.engines.megatron.places import megatron_places
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites
from rlk_align.model.stored import Stacks
from rlk_align.model.vision import decoder_tensor

_WRAPPERS = {
    *("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"),
}
"""The parts of a name that torch.compile, FSDP, DDP, activation checkpointing and PEFT insert."""
_NOT_WEIGHTS = ("inv_freq", "_extra_state")
"""Tensors that follow from the config, and TransformerEngine's state."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A canonical parameter, as part of a stored tensor."""

    parameter: str
    rows: tuple[tuple[int, int], ...] = ()
    """Its ranges along the first dimension; empty for the whole tensor."""
    layer: int | None = None
    """Its index along the first dimension, if that stacks layers or experts."""
    step: int = 1
    """The distance between its rows in these ranges."""
    transposed: bool = False
    """Whether that entry of the stack has its rows as columns."""


def pieces(name: str, dimensions: int, shape: ModelShape | None) -> tuple[Piece, ...]:
    """The parameters in a stored tensor: one piece with the tensor's own name if that is unknown,
    and none if it is not a weight of the model."""
    parts = [p for p in name.split(".") if p not in _WRAPPERS]
    if parts[-1] in _NOT_WEIGHTS or any(p.startswith("optim") for p in parts[:-1]):
        return ()
    for first in range(len(parts)):
        inner = decoder_tensor(".".join(parts[first:]))
        # A family's names first: Gemma's post_attention_layernorm is not the norm before the MLP.
        if shape is not None and (known := _tensors_of(shape).get((inner, dimensions))):
            return known
        if canonical := canonical_name(inner):
            return (Piece(canonical),)
    return (Piece(".".join(parts)),)


_MODULES = {
    o.module: o.parameter or o.site for o in OPERATORS.values() if o.module and o.tensor == "weight"
}
_HF_NAME = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")


def canonical_name(tensor: str) -> str | None:
    """The inverse of `model.checkpoint.tensor_name`: `model.layers.3.self_attn.k_proj.bias` ->
    `layers.3.k_proj.bias`; None for a name of another form."""
    match = _HF_NAME.fullmatch(tensor)
    parameter = _MODULES.get(match[2]) if match else None
    if match is None or parameter is None:
        return None
    in_layer = any(o.part for o in OPERATORS.values() if o.module == match[2])
    if in_layer != (match[1] is not None):
        return None
    name = parameter if match[1] is None else f"layers.{match[1]}.{parameter}"
    return name if match[3] == "weight" else f"{name}.bias"


class _Tensor(NamedTuple):
    """A tensor of a convention that fuses operators or has other names than HF."""

    name: str
    dimensions: int
    pieces: tuple[Piece, ...]


@lru_cache(maxsize=4)
def _tensors_of(shape: ModelShape) -> dict[tuple[str, int], tuple[Piece, ...]]:
    """(stored name, number of dimensions) -> the parameters in it."""
    tensors = (*_fused_hf(shape), *_megatron(shape), *_experts(shape), *_of_family(shape))
    table = {(t.name, t.dimensions): t.pieces for t in tensors}
    # Megatron stacks equal layers along an additional first dimension.
    for (name, dimensions), tensor_pieces in tuple(table.items()):
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            key = (f"decoder.layers.{match[2]}", dimensions + 1)
            stacked = (replace(p, layer=int(match[1])) for p in tensor_pieces)
            table[key] = (*table.get(key, ()), *stacked)
    return table


def _fused_hf(shape: ModelShape) -> Iterator[_Tensor]:
    """q, k, v in one tensor and gate, up in another, as in vLLM."""
    first = shape.family.modules.get("shared_gate_proj", OPERATORS["shared_gate_proj"].module)
    shared = ((first.replace("gate_proj", "gate_up_proj"), ("shared_gate_proj", "shared_up_proj")),)
    for i, module in product(range(shape.layers), shape.fused_rows):
        layout = of_fused(f"layers.{i}", module, shape)
        yield _Tensor(f"model.layers.{i}.{module}.weight", 2, _along_rows(layout))
    for i in range(shape.layers):
        for module, ops in (
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
            *shared * bool(shape.shared_intermediate),
        ):
            records = (shape.operator_of(f"layers.{i}.{op}") for op in ops)
            sizes = [shape.size(o.features) for o in records]
            for end, suffix, dimensions in (("weight", "", 2), ("bias", ".bias", 1)):
                names = [f"layers.{i}.{op}{suffix}" for op in ops]
                layout = fused(*(even(n, s, 1) for n, s in zip(names, sizes, strict=True)))
                name = f"model.layers.{i}.{module}.{end}"
                yield _Tensor(name, dimensions, _along_rows(layout))


def _megatron(shape: ModelShape) -> Iterator[_Tensor]:
    """Megatron's tensors, with TransformerEngine's norms inside the linears and without."""
    for te in (False, True):
        places = megatron_places(shape, 1, te, tied=False)
        for entry in parameters(places, shape, 1, lambda name: vocabulary(name, shape, 1)):
            [first, *_] = entry.layout.ops
            is_bias = first.endswith(".bias")
            operator = first.removesuffix(".bias").rpartition(".")[2]
            known = OPERATORS["logits" if operator == "lm_head" else operator]
            dimensions = 1 if is_bias else len(known.weight)
            here = _along_rows(entry.layout) if entry.dim == 0 else (Piece(first),)
            yield _Tensor(entry.name, dimensions, here)


def _experts(shape: ModelShape) -> Iterator[_Tensor]:
    """The tensors of sparse layers: one for each expert, as in the family's checkpoints and in
    Megatron, or a stack of a layer's experts, as in transformers."""
    for i in shape.sparse_layers:
        router = f"layers.{i}.router"
        yield _Tensor(tensor_name(router, shape.family.modules), 2, (Piece(router),))
        for e in range(shape.experts):
            for op, (suffix, dimensions) in product(_OF_EXPERT, (("", 2), (".bias", 1))):
                parameter = f"layers.{i}.experts.{e}.{op}{suffix}"
                name = tensor_name(parameter, shape.family.modules)
                yield _Tensor(name, dimensions, (Piece(parameter),))
        for stacks in (Stacks(), shape.family.stacks):
            yield from _stacks(shape, i, stacks)
    for entry in expert_parameters(shape):
        parts = _along_rows(entry.layout) if entry.dim == 0 else (Piece(entry.layout.ops[0]),)
        yield _Tensor(entry.name, 1 if entry.name.endswith(".expert_bias") else 2, parts)
        # Megatron's grouped experts have numbered weights in one module.
        grouped = re.fullmatch(r"(.+)\.local_experts\.(\d+)\.(\w+)\.weight", entry.name)
        if grouped:
            yield _Tensor(f"{grouped[1]}.{grouped[3]}.weight{grouped[2]}", 2, parts)


def _stacks(shape: ModelShape, layer: int, stacks: Stacks) -> Iterator[_Tensor]:
    """The tensors with all experts of a layer, and those with their biases."""
    inner, here = shape.expert_intermediate, f"model.layers.{layer}"
    second = 1 if stacks.interleaved else inner
    step, stop = (2, 2 * inner) if stacks.interleaved else (1, inner)
    halves = (("gate_proj", (0, stop)), ("up_proj", (second, 2 * inner)))
    every = [(f"layers.{layer}.experts.{e}", e) for e in range(shape.experts)]
    for end, suffix, dimensions in (("", "", 3), ("_bias", ".bias", 2)):
        turned = stacks.transposed and not suffix
        gate_up = tuple(
            Piece(f"{of}.{op}{suffix}", (rows,), e, step, turned)
            for of, e in every
            for op, rows in halves
        )
        down = tuple(Piece(f"{of}.down_proj{suffix}", (), e, 1, turned) for of, e in every)
        yield _Tensor(f"{here}.{stacks.gate_up}{end}", dimensions, gate_up)
        yield _Tensor(f"{here}.{stacks.down}{end}", dimensions, down)


def _of_family(shape: ModelShape) -> Iterator[_Tensor]:
    """The parameters outside of experts by the names of the family's checkpoints."""
    for site in model_sites(shape):
        if site.operator.weight and not site.operator.of_expert:
            for parameter, dimensions in (
                (site.parameter, len(site.operator.weight)),
                (f"{site.parameter}.bias", 1),
            ):
                name = tensor_name(parameter, shape.family.modules)
                yield _Tensor(name, dimensions, (Piece(parameter),))


_OF_EXPERT = tuple(o.site for o in OPERATORS.values() if o.of_expert and o.weight)


def _along_rows(layout: Layout) -> tuple[Piece, ...]:
    """The pieces of a layout of one rank along the first dimension."""
    return tuple(
        Piece(op, _joined((offset, offset + p.size) for _, offset, p in layout.holders(op)))
        for op in layout.ops
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The ranges, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)
