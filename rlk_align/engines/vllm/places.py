"""Where the canonical operators are in a vLLM decoder. In a family that vLLM has no class for, it
runs the code of transformers."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlk_align.engines.common.experts import has_kernels, router_path
from rlk_align.engines.common.fused_places import (
    Sparse,
    expert_places,
    fused_places,
    head_path,
    norm_places,
    place_of,
)
from rlk_align.engines.common.places import (
    FIRST,
    HEADS_FIRST,
    End,
    Place,
    embedding_place,
    final_norm_path,
    rescaled,
)
from rlk_align.engines.vllm.delta_net import delta_places
from rlk_align.engines.vllm.experts import FUSED, PARTIAL, sparse_blocks
from rlk_align.engines.vllm.latent import latent_places
from rlk_align.engines.vllm.mamba import mamba_path, mamba_places
from rlk_align.model.operators import OPERATORS, layer_modules
from rlk_align.model.shape import ModelShape


def vllm_places(model: Any, shape: ModelShape, tp: int) -> Iterator[Place]:
    """The place of each site in a live model of `tp` ranks."""
    blocks = {i: (path, block) for i, path, block in sparse_blocks(model)}

    def sparse(layer: int) -> Iterator[Place] | None:
        return _block_places(model, layer, *blocks[layer], shape, tp) if layer in blocks else None

    if shape.mlp_layers:
        yield from _one_part_places(model, shape, tp)
        return
    if not adds_in_norms(model, shape):
        yield from _unfused_places(model, shape, tp, sparse)
        return
    yield from fused_places(
        model, shape, tp, "logits_processor", sparse, delta=delta_places, latent=latent_places
    )


def of_transformers(model: Any) -> bool:
    """Whether the model is the code of transformers, with vLLM's linear layers, norms and attention
    in it: vLLM runs a family so that it has no class for."""
    return type(model).__name__.startswith("Transformers")


def adds_in_norms(model: Any, shape: ModelShape) -> bool:
    """Whether the model adds a residual inside the norm after it."""
    return not (of_transformers(model) or shape.family.adds_outside_norms)


def sliding_window(attention: Any) -> int | None:
    """The number of keys that vLLM's attention of a layer sees; None if it has no window.

    Latent attention has no such attribute in vLLM 0.26."""
    window = getattr(attention, "sliding_window", None)
    return None if window in (None, -1) else int(window)


def _fused(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Module of a layer -> the operators that vLLM fuses in it. Where values are keys, it computes
    the product of keys twice."""
    return {
        f"{shape.family.parent('o_proj')}.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        f"{shape.family.parent('down_proj')}.gate_up_proj": ("gate_proj", "up_proj"),
    }


def _unfused_places(model: Any, shape: ModelShape, tp: int, sparse: Sparse) -> Iterator[Place]:
    """The places in the code of transformers, and in classes that follow it: residuals are added
    outside of norms."""
    of_code = of_transformers(model)
    yield embedding_place(shape, bool(shape.family.embedding_scale) and not of_code)
    heads_first = shape.family.heads_first and of_code
    fused = _fused(shape)
    for i, layer in enumerate(model.model.layers):
        modules, operators = dict(layer.named_modules()), shape.family.layer(shape, i)

        def place(module: str, *ops: str, end: End = "output", i: int = i) -> Place:
            sites = tuple(f"layers.{i}.{op}" for op in ops)
            path = f"model.layers.{i}.{module}".removesuffix(".")
            access = HEADS_FIRST if heads_first and ops[0] in ("q_norm", "k_norm") else FIRST
            return place_of(model, shape, tp, path, sites, end=end, access=access)

        inner = {f"{shape.family.parent('conv')}.": f"{mamba_path(layer)}."}
        paths = layer_modules(operators, shape.family.modules)
        paths = {op: _renamed(path, inner) for op, path in paths.items()}
        absent = {"v_proj"}.difference(operators)
        for module, ops in fused.items():
            if module in modules:
                yield place(module, *(op for op in ops if op not in absent))
        for stored, ops in shape.fused.items():
            if stored not in fused and (module := _renamed(stored, inner)) in modules:
                yield place(module, *ops)
        if "scan" in operators:
            path = f"model.layers.{i}.{mamba_path(layer)}"
            yield from mamba_places(model, f"layers.{i}", path, shape)
        inside = {"conv", "mamba_norm"}
        yield from (place(p, op) for op, p in paths.items() if p in modules and op not in inside)
        for op in ("q_rope", "k_rope") if "q_rope" in operators else ():
            yield place("self_attn", op, end="rope")
        if "attn" in operators:
            yield place("self_attn.o_proj", "attn", end="input")
        if any(OPERATORS[op].site == "attn_residual" for op in operators):
            yield place(paths.get("mlp_norm", "mlp"), "attn_residual", end="input")
        block = sparse(i)
        if block is not None:
            yield from block
        for act, down in (("act", "down_proj"), ("shared_act", "shared_down_proj")):
            if act in operators:
                yield place(paths[down], act, end="input")
        yield rescaled(place("", "mlp_residual"), operators)
    yield Place(sites=("final_norm",), module=final_norm_path(shape))
    yield Place(
        sites=("logits",), module="logits_processor", rows="sampled", parameters_in=head_path(model)
    )


def _renamed(path: str, starts: Mapping[str, str]) -> str:
    """A path in vLLM's layer, whose modules may be further inside; `starts`: of a path in the
    checkpoint -> of one in vLLM."""
    for start, other in starts.items():
        if path.startswith(start):
            return other + path.removeprefix(start)
    return path


_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "scan": {"in_proj": ("z", "xbc_in", "dt_in"), "out_proj": ("out_proj",)},
    "attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "attn": ("attn",), "o_proj": ("o_proj",)},
    "act": {"up_proj": ("up_proj",), "down_proj": ("down_proj",)},
}
"""The operator of a part -> its modules in vLLM, with their operators."""


def _one_part_places(model: Any, shape: ModelShape, tp: int) -> Iterator[Place]:
    """The places in a model whose layers have one part each, after a norm that adds a residual."""
    yield Place(sites=("embed",), module="model.embed_tokens")
    stream = ""
    for i in range(shape.layers):
        name, here = f"layers.{i}", f"model.layers.{i}"
        sites = [OPERATORS[op].site for op in shape.family.layer(shape, i)]
        yield from norm_places(stream, f"{name}.{sites[0]}", f"{here}.norm")
        stream = f"{name}.{sites[-1]}"
        part = next(part for part in _PARTS if part in sites)
        for module, ops in _PARTS[part].items():
            of_module = tuple(f"{name}.{op}" for op in ops)
            yield place_of(model, shape, tp, f"{here}.mixer.{module}", of_module)
        if part == "scan":
            yield from mamba_places(model, name, f"{here}.mixer", shape)
        if part == "act":
            # All layers share one module for it.
            act = (f"{name}.act",)
            yield place_of(model, shape, tp, f"{here}.mixer.down_proj", act, end="input")
    yield from norm_places(stream, "final_norm", "model.norm_f")
    yield Place(
        sites=("logits",), module="logits_processor", rows="sampled", parameters_in=head_path(model)
    )


def _block_places(
    model: Any, layer: int, path: str, block: Any, shape: ModelShape, tp: int
) -> Iterator[Place]:
    name, here = f"layers.{layer}", f"model.layers.{layer}.{path}"
    kernels = has_kernels(block.experts)
    yield Place(sites=(f"{name}.router",), module=f"{here}.{router_path(block)}")
    yield from _sparse_places(here, name, shape, tp if kernels else 0)
    paths = layer_modules(shape.family.layer(shape, layer), shape.family.modules)
    shared, _, down = f"model.{name}.{paths.get('shared_down_proj', '')}".rpartition(".")
    if down != "down_proj":
        # The layer has none, or has it beside the block.
        return

    def place(module: str, *ops: str, unexposed: str = "") -> Place:
        sites = tuple(f"{name}.{op}" for op in ops)
        return place_of(model, shape, tp, module, sites, unexposed=unexposed)

    yield place(f"{shared}.gate_up_proj", "shared_gate_proj", "shared_up_proj")
    yield place(f"{shared}.act_fn", "shared_act")
    partial = "" if tp == 1 or kernels else PARTIAL
    yield place(f"{shared}.down_proj", "shared_down_proj", unexposed=partial)
    if gate := paths.get("shared_gate"):
        yield Place(sites=(f"{name}.shared_gate",), module=f"model.{name}.{gate}")


def _sparse_places(block: str, name: str, shape: ModelShape, shown: int) -> Iterator[Place]:
    """`shown`: the number of ranks that share the experts' rows; 0 if these are not tensors."""
    for op in ("experts", "routing_weights"):
        yield Place(sites=(f"{name}.{op}",), module=f"{block}.experts", end="inside")
    unexposed = "" if shown else FUSED
    yield from expert_places(name, f"{block}.experts", shape, shown, unexposed)
    yield Place(sites=(f"{name}.moe_out",), module=block)
