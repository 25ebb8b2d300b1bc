"""The hooks on the canonical sites of an HF decoder."""

from typing import Any

from rlk_align.engines.common.site_hooks import ForwardHooks
from rlk_align.engines.common.transformers_rope import on_rotation
from rlk_align.engines.hf.delta_net import on_hybrid
from rlk_align.engines.hf.experts import on_experts, replay_choices
from rlk_align.engines.hf.mamba import on_mambas


class HFTaps(ForwardHooks):
    """Hooks on a live HF model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unexposed: dict[str, str] = {}
        """Sites that the forwards did not expose -> the reason."""

    def install(self) -> None:
        super().install()
        on_rotation(self, self._model, self.rope)
        on_hybrid(self, self._model)
        on_mambas(self, self._model, self.unexposed)
        on_experts(self, self._model, self.show, self.unexposed)
        replay_choices(self, self._model)
