"""The classes that replace those of transformers' modules: they use the modules' parameters and the
operators of the kernels."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.integrations.hf.process_changes import Undo
from rlk_kernels.integrations.hf.stock_modules import check_silu
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.scoring import Scores

_TAKES_POSITIONS = "rlk_takes_positions"
"""Marks an `apply_rotary_pos_emb` that takes positions instead of cosines."""


@functools.cache
def derived(kind: type, base: Any) -> type:
    """A class with the bases `kind` and `base`. Its module is base's, by which transformers finds
    functions."""
    return type(f"Rlk{base.__name__}", (kind, base), {"__module__": base.__module__})


def cast(x: Any) -> Any:
    """A tensor in the dtype of autocast, if autocast is on, or None. With autocast, fp32 weights
    compute like a model of that dtype, residuals included."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class HFEmbedding(Counted):
    def forward(self, ids: Tensor) -> Tensor:
        self.count()
        rows = cast(profile.embed(ids, self.weight))
        if self.padding_idx is not None and rows.requires_grad:
            # The row of padding gets no gradient.
            rows = torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)
        return rows


class HFNorm(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return profile.norm(cast(x), cast(self.weight), self.variance_epsilon)


class HFLinear(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return profile.linear(cast(x), cast(self.weight), cast(self.bias))


class Head(Scores):
    def forward(self, x: Tensor) -> Tensor:
        self.count()
        if self.rlk_scoring is not None:
            return self.score(cast(x), cast(self.weight), cast(self.bias))
        return profile.logits(cast(x), cast(self.weight), cast(self.bias))


class MLP(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.count()
        check_silu(self.act_fn)
        return self.down_proj(profile.act(self.gate_proj(x), self.up_proj(x)))


class FusedMLP(Counted):
    """An MLP that computes gate and up by one product, and whose activation has another name."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        check_silu(self.activation_fn)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(profile.act(gate, up))


def mlp_class(mlp: Any) -> type:
    """The class that replaces that of an MLP."""
    return FusedMLP if hasattr(mlp, "gate_up_proj") else MLP


class HFRouter(Sparse):
    """Returns the logits of all experts in fp32, and the weights and ids of the chosen experts in
    ascending id."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.count()
        logits = self.logits(cast(x.reshape(-1, x.shape[-1])), cast(self.weight))
        # Mixtral has no such setting: its weights always add up to 1.
        normalize = getattr(self, "norm_topk_prob", True)
        weights, ids = self.choose(logits, self.top_k, normalize, self._correction())
        return logits, weights, ids.long()

    def _correction(self) -> profile.Correction | None:
        if not hasattr(self, "e_score_correction_bias"):
            return None
        # If the whole model was cast, the bias has another dtype, which transformers' code adds
        # too.
        bias, groups = self.e_score_correction_bias.float(), (self.num_group, self.topk_group)
        return profile.Correction(bias, *groups, self.routed_scaling_factor)


class HFExperts(Sparse):
    """Takes the chosen experts in ascending id, as `HFRouter` returns them."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.count()
        check_silu(self.act_fn)
        gate_up, down = cast(self.gate_up_proj), cast(self.down_proj)
        return self.compute(cast(x), weights.float(), chosen.int(), gate_up, down)


class HFRotary(Counted):
    """Returns positions and frequencies instead of cos and sin; the scaling follows the frequencies
    if it is not 1. Both are integers, because FSDP2 casts floating-point tensors between layers to
    the compute dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `fn` may cast the frequencies, or replace them without values, and no checkpoint has them.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.keep(exact, self.inv_freq.device)
        return self

    def keep(self, frequencies: Tensor, device: torch.device) -> None:
        """Stores fp32 frequencies in the live module; on the meta device they stay in memory."""
        self.inv_freq = frequencies if device.type == "meta" else frequencies.to(device)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.count()
        if not torch.compiler.is_compiling():
            _check_rotates(type(self).__module__)
        if self.inv_freq.dtype != torch.float32:
            raise NotSupported(
                f"the rotary embedding's inv_freq was rounded to {self.inv_freq.dtype} after "
                "use_kernels (by DeepSpeed's data_types.buffer_dtype?): keep buffers in float32"
            )
        turns = self.inv_freq.to(x.device)
        if self.attention_scaling != 1.0:
            turns = torch.cat([turns, turns.new_full((1,), self.attention_scaling)])
        return position_ids, turns.view(torch.int32)


def rotate_in(modeling: Any, interleaved: bool) -> Undo:
    """Makes the family's `apply_rotary_pos_emb` also accept the values of `HFRotary`. The returned
    function undoes the change. interleaved: see `profile.rope`."""
    original = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = _wrapped(original, interleaved)
    return lambda: setattr(modeling, "apply_rotary_pos_emb", original)


def _check_rotates(modeling: str) -> None:
    """Raises NotSupported if the family's function does not accept the values of `HFRotary`. A
    wrapper around ours accepts them if it uses `functools.wraps`."""
    rotate = sys.modules[modeling].apply_rotary_pos_emb
    if not hasattr(rotate, _TAKES_POSITIONS):
        raise NotSupported(
            f"apply_rotary_pos_emb of {modeling} is {rotate.__module__}.{rotate.__qualname__}: it "
            "was replaced after use_kernels, or the model is a copy of one whose kernels were "
            "removed"
        )


def _wrapped(original: Any, interleaved: bool) -> Any:
    @functools.wraps(original)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cos.is_floating_point():
            return original(q, k, cos, sin, *args, **kwargs)
        return _rotate(q, k, cos, sin.view(torch.float32), interleaved)

    setattr(rotate, _TAKES_POSITIONS, True)
    return rotate


def _rotate(
    q: Tensor, k: Tensor, positions: Tensor, turns: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """(q[B, H, T, D], k[B, Hk, T, D]) rotated by positions[B or 1, T]; turns: the second value of
    `HFRotary`."""
    batch, _, length, width = q.shape
    inv_freq, scaling = turns[: width // 2], turns[width // 2 :]
    at = positions.expand(batch, length).reshape(-1)
    # The heads' norm or the projection has written [B, T, H, D], so that these are no copies.
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
    turned = profile.rope(*rows, at, inv_freq, scaling if len(scaling) else None, interleaved)
    new = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in turned)
    return tuple(new)
