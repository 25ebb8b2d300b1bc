"""The hooks on the canonical sites of an HF decoder."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.site_hooks import ForwardHooks
from rlk_align.engines.hf.experts import on_experts, replay_choices


class HFTaps(ForwardHooks):
    """Hooks on a live HF model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unexposed: dict[str, str] = {}
        """Sites that the forwards did not expose -> the reason."""

    def install(self) -> None:
        super().install()
        on_rotation(self, self._model, self.rope)
        on_experts(self, self._model, self.show, self.unexposed)
        replay_choices(self, self._model)


def on_rotation(hooks: Hooks, model: Any, see: Callable[[torch.Tensor], None]) -> None:
    """Calls `see` with each output of the rotary embedding, `[B, S, heads, head_dim]`: in each
    attention the query, then the key. The embedding is a function of the modeling module, and is
    wrapped while the hooks are installed."""
    # FSDP changes the classes of the model and its layers, but not that of the attention.
    modeling = sys.modules[type(model.model.layers[0].self_attn).__module__]
    original = modeling.apply_rotary_pos_emb

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        query, key = original(*args, **kwargs)
        # [B, heads, S, head_dim] -> [B, S, heads, head_dim]
        see(query.transpose(1, 2))
        see(key.transpose(1, 2))
        return query, key

    hooks.replace(modeling, "apply_rotary_pos_emb", observed)
