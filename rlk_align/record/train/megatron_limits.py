"""What of megatron-core is recorded. Everything else is refused by its name."""

from collections.abc import Iterator
from typing import Any

from rlk_align.engines.megatron.grid import Grid
from rlk_align.engines.megatron.layout import padded_vocab
from rlk_align.engines.megatron.stages import Stage
from rlk_align.errors import BadOption
from rlk_align.model.shape import ModelShape

_INSTEAD = "rlk-align compare --train megatron scores the same ids with ranks of its own"


def gpt_models(model: Any) -> list[Any]:
    """The GPTModel of this rank or, with virtual stages, its chunks in their order, without what is
    around them. Raises BadOption for another model."""
    return [_inside(each) for each in (model if isinstance(model, list | tuple) else [model])]


def _inside(model: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    while not isinstance(model, GPTModel) and hasattr(model, "module"):
        model = model.module
    if not isinstance(model, GPTModel):
        raise BadOption(f"{type(model).__name__} is not a GPTModel of megatron-core")
    return model


def check_grid(grid: Grid) -> None:
    """Raises BadOption for an order of ranks, or a kind of parallelism, that is not recorded."""
    world, tp, pp = grid.all.world, grid.tp.world, grid.pp.world
    refused = {
        f"context parallelism of {grid.cp.world}, which TransformerEngine's attention alone has,": (
            grid.cp.world > 1
        ),
        f"expert parallelism of {grid.ep.world} with tensor parallelism of {tp}": (
            grid.ep.world > 1 and tp > 1
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            raise BadOption(f"megatron-core: {what} is not recorded", _INSTEAD)
    rank = grid.all.rank
    expected = rank % tp, rank // tp % grid.dp.world, rank // (world // pp)
    if tp * pp * grid.dp.world != world or (grid.tp.rank, grid.dp.rank, grid.pp.rank) != expected:
        raise BadOption(
            f"the order of {world} ranks is not megatron-core's own (tp, then dp, then pp)",
            "call initialize_model_parallel with its default order",
        )


def check_chunk(model: Any, shape: ModelShape, stage: Stage, grid: Grid) -> None:
    """Raises BadOption for a GPTModel that is not recorded. `stage`: the one that it should be."""
    config, names = model.config, {type(m).__module__ for m in model.modules()}
    numbers, tp = [layer.layer_number - 1 for layer in model.decoder.layers], grid.tp.world
    chunks, given = stage.count // grid.pp.world, config.virtual_pipeline_model_parallel_size or 1
    expected = range(stage.first, stage.first + stage.share)
    rows = {table.shape[0] * tp for table in _tables(model)}
    refused = {
        "an adapter": any("peft" in name.split(".") for name in names),
        "TransformerEngine's spec": any("transformer_engine" in name for name in names),
        f"a rank with {given} virtual stages of which {chunks} are given": given != chunks,
        "multi-token prediction": bool(config.mtp_num_layers),
        f"a stage with the layers {numbers} as number {stage.number} of {stage.count} equal stages "
        f"of {stage.layers} layers": numbers != list(expected)
        or stage.share * stage.count != stage.layers,
        f"a vocabulary of {shape.vocab} padded to {max(rows, default=0)} rows": bool(
            rows - {padded_vocab(shape.vocab, tp)}
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            raise BadOption(f"megatron-core: {what} is not recorded", _INSTEAD)


def _tables(model: Any) -> Iterator[Any]:
    """The weights with a row for each token that a stage has."""
    if model.pre_process:
        yield model.embedding.word_embeddings.weight
    if model.post_process and model.output_layer.weight is not None:
        yield model.output_layer.weight
