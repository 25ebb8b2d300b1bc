"""The measurements of rows that an engine's observed passes make."""

from pathlib import Path

from rlk_align.engines.base import Engine
from rlk_align.model.rotary import checkpoint_rotary
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import first_attention
from rlk_align.trace.schema import CacheRecord
from rlk_align.trace.writer import Checks


def row_checks(engine: Engine) -> Checks:
    """The measurements of a live engine's rows."""
    return checks_of(engine.model_path, engine.shape, engine.cache())


def checks_of(model: Path, shape: ModelShape, cache: CacheRecord | None = None) -> Checks:
    """Which positions rows are rotated by, and where sequences begin, by the checkpoint's rotary
    embedding and the first attention of the model. `cache`: its quantised keys and values."""
    attention = first_attention(shape)
    of_layer, sinks = shape.at(attention.layer), bool(attention.operator.weight)
    ends = (attention.prefix_inputs[1], attention.name)
    # The value of a token is no site of a latent attention.
    heads = None if shape.latent else (shape.heads, of_layer.kv_heads, sinks, *ends)
    return Checks(checkpoint_rotary(model, shape), heads, cache)
