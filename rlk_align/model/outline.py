"""What config.json states about a model of any family: its sizes, without a description."""

from pathlib import Path
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.shape import ModelShape
from rlk_align.model.stored import stored_dtype

_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
"""The config's keys for the length of the longest sequence, of which one counts."""
_UNSTATED_CONTEXT = 2048
"""The context of a model without positions, such as a state-space model."""


def read_outline(model: Path) -> ModelShape:
    """The sizes of the checkpoint in folder `model`. A size that config.json does not state is 1,
    because only an engine's memory is estimated by it; no operators follow from them.

    Raises ModelError if config.json is missing or states no vocabulary.
    """
    config = read_config(model)
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = {**config, **nested}
    kind, vocab = config.get("model_type"), config.get("vocab_size")
    if not isinstance(kind, str) or type(vocab) is not int or vocab <= 0:
        raise ModelError(
            f"{model}/config.json: model_type is {kind!r} and vocab_size is {vocab!r}, so no "
            "engine can load it as a decoder"
        )
    dtype = config.get("dtype") or config.get("torch_dtype") or stored_dtype(model) or "float32"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ModelError(f"{model}/config.json: dtype {dtype!r} is unknown", f"known: {known}")
    heads = _size(config, "num_attention_heads", "n_head")
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    return ModelShape(
        model_type=kind,
        layers=_size(config, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=_size(config, "head_dim", default=max(1, hidden // heads)),
        intermediate=_size(config, "intermediate_size"),
        vocab=vocab,
        context=_size(config, *_CONTEXT, default=_UNSTATED_CONTEXT),
        dtype=dtype,
    )


def _size(config: dict[str, Any], *keys: str, default: int = 1) -> int:
    """The first of these keys that states a positive whole number."""
    stated = (config.get(key) for key in keys)
    return next((n for n in stated if type(n) is int and n > 0), default)
