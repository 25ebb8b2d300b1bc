"""The rotary embeddings of a live model of transformers, in an engine that runs its code."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks


def rotary_embeddings(model: Any) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """The `rope_parameters` of each layer, and its live frequencies `[pairs]`: one rotary embedding
    for all layers, or one for each kind of layer."""
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None:
        return []
    parameters = model.config.rope_parameters
    if "rope_type" in parameters:
        return [(parameters, rotary.inv_freq)] * len(model.model.layers)
    kinds = model.config.layer_types
    return [(parameters[kind], getattr(rotary, f"{kind}_inv_freq")) for kind in kinds]


def rotating(attention: Any) -> str:
    """The name of the function that rotates in the module with an attention's code."""
    modeling = sys.modules[type(attention).__module__]
    if getattr(attention.config, "rope_interleave", False):
        return INTERLEAVE
    # DeepSeek-V2 rotates by complex numbers.
    return "apply_rotary_emb" if hasattr(modeling, "apply_rotary_emb") else "apply_rotary_pos_emb"


INTERLEAVE = "apply_rotary_pos_emb_interleave"
"""The function whose result has the first features of all pairs before the second ones."""


def on_rotation(hooks: Hooks, model: Any, see: Callable[[torch.Tensor], None]) -> None:
    """Calls `see` with each output of the rotary embedding, `[B, S, heads, head_dim]`: in each
    attention the query, then the key. The embedding is a function of the modeling module, and is
    wrapped while the hooks are installed. Some attentions cut off the part of each head that it
    rotates: there it is called with whole heads, of which the rest follows that part."""
    # FSDP changes the classes of the model and its layers, but not that of the attention.
    every = (getattr(layer, "self_attn", None) for layer in model.model.layers)
    attention = next((each for each in every if each is not None), None)
    if attention is None:
        return  # A family whose attentions have another name rotates nothing.
    modeling = sys.modules[type(attention).__module__]
    name = rotating(attention)
    original, width = getattr(modeling, name), getattr(attention, "head_dim", 0)

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        rotated = original(*args, **kwargs)
        if isinstance(rotated, tuple) and rotated[0].shape[-1] < width:
            return tuple(map(functools.partial(_beside_rest, width, see), rotated, args[:2]))
        # Gemma 4 rotates one at a time, as [B, S, heads, head_dim].
        alone = isinstance(rotated, torch.Tensor)
        for x in (rotated,) if alone else rotated:
            see(x if alone else x.transpose(1, 2))
        return rotated

    hooks.replace(modeling, name, observed)


def _beside_rest(
    width: int, see: Callable[[torch.Tensor], None], rotated: torch.Tensor, cut: torch.Tensor
) -> torch.Tensor:
    """Calls `see` with heads of this width, and returns their rotated part `[B, heads, S, R]`.
    `cut`: that part before its rotation, a slice of whole heads, whose rest the attention reads
    after it."""
    part = cut.shape[-1]
    whole = cut.as_strided((*cut.shape[:-1], width), cut.stride(), cut.storage_offset())
    rest = whole[..., part:]
    shown = torch.cat((rotated, rest), dim=-1)
    see(shown.transpose(1, 2))
    rest.copy_(shown[..., part:])
    return shown[..., :part]
