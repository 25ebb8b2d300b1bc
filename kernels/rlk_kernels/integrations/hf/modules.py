"""The classes that replace those of transformers' modules: their parameters, our operators."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.integrations.hf.held import Undo
from rlk_kernels.integrations.hf.known import check_silu
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.scoring import Scores

_TAKES_POSITIONS = "rlk_takes_positions"
"""Marks an `apply_rotary_pos_emb` that takes positions instead of cosines."""


@functools.cache
def derived(kind: type, base: Any) -> type:
    """A class of `kind` and then `base`, named as one of base's module: transformers finds modules
    by it."""
    return type(f"Rlk{base.__name__}", (kind, base), {"__module__": base.__module__})


def cast(x: Any) -> Any:
    """A tensor, or None, in the dtype of autocast, where autocast is on: fp32 weights compute as a
    model of that dtype does, whose residual is of it too."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class HFEmbedding(Counted):
    def forward(self, ids: Tensor) -> Tensor:
        self.count()
        rows = cast(profile.embed(ids, self.weight))
        if self.padding_idx is not None and rows.requires_grad:
            # Padding trains nothing.
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


class HFRouter(Sparse):
    """Returns the logits of all experts in fp32, and the weights and ids of the chosen ones, by
    ascending id."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.count()
        logits = self.logits(cast(x.reshape(-1, x.shape[-1])), cast(self.weight))
        # Mixtral's has no such setting: the weights always add up to 1.
        normalize = getattr(self, "norm_topk_prob", True)
        weights, ids = self.choose(logits, self.top_k, normalize, self._correction())
        return logits, weights, ids.long()

    def _correction(self) -> profile.Correction | None:
        if not hasattr(self, "e_score_correction_bias"):
            return None
        # In another dtype where somebody cast the whole model, as transformers' own adds it then.
        bias, groups = self.e_score_correction_bias.float(), (self.num_group, self.topk_group)
        return profile.Correction(bias, *groups, self.routed_scaling_factor)


class HFExperts(Sparse):
    """Takes choices by ascending id, as `HFRouter` returns them."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.count()
        check_silu(self.act_fn)
        gate_up, down = cast(self.gate_up_proj), cast(self.down_proj)
        return self.compute(cast(x), weights.float(), chosen.int(), gate_up, down)


class HFRotary(Counted):
    """Returns positions and frequencies instead of cos and sin, and after the frequencies their
    scaling where it is not 1. As integers: FSDP2 casts floating-point tensors between layers to the
    compute dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Cast, or made anew without values: no checkpoint has the frequencies.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.keep(exact, self.inv_freq.device)
        return self

    def keep(self, frequencies: Tensor, device: torch.device) -> None:
        """fp32 frequencies, in the live module; in memory where the module has none yet."""
        self.inv_freq = frequencies if device.type == "meta" else frequencies.to(device)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.count()
        if not torch.compiler.is_compiling():
            _check_rotates(type(self).__module__)
        if self.inv_freq.dtype != torch.float32:
            raise NotServed(
                f"the rotary embedding's inv_freq was rounded to {self.inv_freq.dtype} after "
                "use_kernels (by DeepSpeed's data_types.buffer_dtype?): keep buffers in float32"
            )
        turns = self.inv_freq.to(x.device)
        if self.attention_scaling != 1.0:
            turns = torch.cat([turns, turns.new_full((1,), self.attention_scaling)])
        return position_ids, turns.view(torch.int32)


def rotate_in(modeling: Any) -> Undo:
    """Have the family's `apply_rotary_pos_emb` also accept what `HFRotary` returns; the returned
    function undoes it."""
    original = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = _wrapped(original)
    return lambda: setattr(modeling, "apply_rotary_pos_emb", original)


def _check_rotates(modeling: str) -> None:
    """Raises NotServed where the family's function does not accept what `HFRotary` returns. A
    wrapper around ours does, if it uses `functools.wraps`."""
    rotate = sys.modules[modeling].apply_rotary_pos_emb
    if not hasattr(rotate, _TAKES_POSITIONS):
        raise NotServed(
            f"apply_rotary_pos_emb of {modeling} is {rotate.__module__}.{rotate.__qualname__}: it "
            "was replaced after use_kernels, or the model is a copy of one whose kernels were "
            "taken out"
        )


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cos.is_floating_point():
            return original(q, k, cos, sin, *args, **kwargs)
        return _rotate(q, k, positions=cos, turns=sin.view(torch.float32))

    setattr(rotate, _TAKES_POSITIONS, True)
    return rotate


def _rotate(q: Tensor, k: Tensor, positions: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """q[B, H, T, D], k[B, Hk, T, D] by positions[B or 1, T]; turns: what `HFRotary` gives."""
    batch, _, length, width = q.shape
    inv_freq, scaling = turns[: width // 2], turns[width // 2 :]
    at = positions.expand(batch, length).reshape(-1)
    # Contiguous where it lay so: the heads' norm, or the projection, wrote [B, T, H, D].
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
    turned = profile.rope(*rows, at, inv_freq, scaling if len(scaling) else None)
    new = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in turned)
    return tuple(new)
