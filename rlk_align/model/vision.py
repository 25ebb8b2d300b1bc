"""Checkpoints that also see images: the decoder's part of their config and of their tensors.

Prompts are text here, so the decoder alone is compared. transformers loads it by
AutoModelForCausalLM, and vLLM by the decoder's class.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlk_align.errors import ModelError


class _Decoder(NamedTuple):
    """The decoder of a checkpoint."""

    model_type: str
    cls: str
    """The class that loads it, in transformers and in vLLM."""


_DECODERS = {
    "qwen3_5": _Decoder("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": _Decoder("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
"""model_type in config.json -> its decoder."""
_SHARED = (
    *("dtype", "torch_dtype", "tie_word_embeddings", "auto_map", "transformers_version"),
    *("quantization_config", "compression_config"),
)
"""The keys beside `text_config` that count for the decoder, unless that has them itself."""
_PREFIX = "model.language_model."
"""The decoder's tensors have it in place of `model.`."""
TOWER = "model.visual."
"""The tensors of the part for images have it."""


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """The decoder's config: `config` itself if the checkpoint does not see images. Raises
    ModelError."""
    decoder = _DECODERS.get(str(config.get("model_type")))
    if decoder is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != decoder.model_type:
        stated = text.get("model_type") if isinstance(text, dict) else text
        raise ModelError(
            f"config.json has model_type {config['model_type']!r}, and its text_config has "
            f"model_type {stated!r} instead of {decoder.model_type!r}"
        )
    return {key: config[key] for key in _SHARED if key in config} | text


def decoder_class(config: Mapping[str, Any]) -> str | None:
    """The decoder's class; None if the checkpoint does not see images."""
    decoder = _DECODERS.get(str(config.get("model_type")))
    return decoder.cls if decoder else None


def decoder_tensor(name: str) -> str:
    """The name that a stored tensor has in a checkpoint of the decoder alone."""
    return f"model.{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name
