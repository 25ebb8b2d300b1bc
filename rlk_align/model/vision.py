"""Checkpoints that also see images: the decoder's part of their config and of their tensors.

Prompts are text here, so the decoder alone is compared. transformers and vLLM load it by the
decoder's class, with the decoder's config.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlk_align.errors import ModelError


class Whole(NamedTuple):
    """A kind of checkpoint that also sees images."""

    decoders: Mapping[str, str]
    """model_type of `text_config` -> the class that loads the decoder, in transformers and in
    vLLM."""
    images: tuple[str, ...]
    """What the names of the tensors of the part for images start with."""
    tied: bool
    """Whether the head has the embedding's weight if config.json does not say it."""


_VISUAL = ("model.visual.",)
_TOWER = tuple(
    f"{start}{part}."
    for start in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
"""Published checkpoints have them without `model.`, and some releases of transformers wrote it."""
_OF_GEMMA_4 = tuple(
    f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
)
WHOLES = {
    "qwen3_5": Whole({"qwen3_5_text": "Qwen3_5ForCausalLM"}, _VISUAL, False),
    "qwen3_5_moe": Whole({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, _VISUAL, False),
    "gemma3": Whole({"gemma3_text": "Gemma3ForCausalLM"}, _TOWER, True),
    "gemma4": Whole({"gemma4_text": "Gemma4ForCausalLM"}, _OF_GEMMA_4, True),
    "mistral3": Whole(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, _TOWER, True
    ),
}
"""model_type in config.json -> the kind of checkpoint. A new one is an entry here."""
_SHARED = (
    *("dtype", "torch_dtype", "auto_map", "transformers_version"),
    *("eos_token_id", "quantization_config", "compression_config"),
)
"""The keys beside `text_config` that count for the decoder, unless that has them itself."""
DECODER_NAMES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""What the names of the decoder's tensors start with -> in a checkpoint of the decoder alone."""


class Decoder(NamedTuple):
    """The decoder of a checkpoint that also sees images."""

    cls: str
    """The class that loads it, in transformers and in vLLM."""
    images: tuple[str, ...]
    """What the names of the tensors that it does not have start with."""


def decoder(config: Mapping[str, Any]) -> Decoder | None:
    """The decoder; None if the checkpoint does not see images. Raises ModelError for a decoder
    that is not known in such a checkpoint."""
    whole = WHOLES.get(str(config.get("model_type")))
    if whole is None:
        return None
    text = config.get("text_config")
    stated = text.get("model_type") if isinstance(text, dict) else text
    if not isinstance(text, dict) or not isinstance(stated, str) or stated not in whole.decoders:
        known = " or ".join(map(repr, whole.decoders))
        raise ModelError(
            f"config.json has model_type {config['model_type']!r}, and its text_config has "
            f"model_type {stated!r} instead of {known}"
        )
    return Decoder(whole.decoders[stated], whole.images)


def decoder_config(config: dict[str, Any], has_head: bool) -> dict[str, Any]:
    """The decoder's config. `has_head`: whether the checkpoint stores a head. Raises ModelError.

    transformers and vLLM read `tie_word_embeddings` beside `text_config` and not in it, and take a
    stored head in any case."""
    tied = config.get("tie_word_embeddings", WHOLES[config["model_type"]].tied)
    shared = {key: config[key] for key in _SHARED if key in config}
    return shared | config["text_config"] | {"tie_word_embeddings": bool(tied) and not has_head}


_OTHER_NAMES = DECODER_NAMES | {"backbone.": "model."}
"""The same, and that of Nemotron-H's decoder as published."""


def decoder_tensor(name: str) -> str:
    """The name that a stored tensor has in a checkpoint of the decoder alone."""
    for start, alone in _OTHER_NAMES.items():
        if name.startswith(start):
            return alone + name.removeprefix(start)
    return name


def is_of_decoder(name: str) -> bool:
    """Whether a tensor of a checkpoint that also sees images belongs to its decoder."""
    return name.startswith((*DECODER_NAMES, "lm_head."))
