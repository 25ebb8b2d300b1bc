"""A pack's forward and backward, by the host or as CUDA graphs, with the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import torch
from batch import Pack
from torch import Tensor
from torch.nn.functional import pad

Score = Callable[[Pack], tuple[Tensor, Tensor]]
"""Log-probs and entropies, float32 [T]."""
Loss = Callable[[Tensor, Pack, Tensor | float], Tensor]
"""Of log-probs, and what to multiply their sum by."""


class Eager:
    """The host launches each kernel."""

    def __init__(self, score: Score, loss: Loss, parameters: Mapping[str, Tensor]) -> None:
        self._score, self._loss, self._parameters = score, loss, parameters
        self._last: Tensor

    def forward(self, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of a pack, without a gradient."""
        logprobs, entropies = self._score(pack)
        self._last = self._loss(logprobs, pack, scale)
        return logprobs.detach(), entropies.detach()

    def backward(self) -> dict[str, Tensor]:
        """The gradients of the loss of the forward before it, by parameter."""
        self._last.backward()
        del self._last
        return take_gradients(self._parameters)


def take_gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters have none any more."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


class PackGraphs:
    """`Eager` of packs of one length: the host launches two graphs in the place of some thousand
    kernels, which takes it longer than a GPU takes to compute them.

    A graph reads and writes the memory that it was captured with: packs are copied into it, padded
    to the sequences of the largest, and gradients are to be read before another graph runs.
    """

    def __init__(
        self, score: Score, loss: Loss, parameters: Mapping[str, Tensor], pack: Pack,
        sequences: int, pool: tuple[int, int],
    ) -> None:  # fmt: skip
        """Captures; `pack` has the length, and no pack has more than `sequences`. What kernels
        prepare at their first call is there already, and no parameter has a gradient."""
        self._sequences = sequences
        self._scale = torch.zeros((), device=pack.ids.device)
        self._pack = replace(pack, **{name: x.clone() for name, x in self._tensors(pack).items()})
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads, such as vLLM's, may call CUDA meanwhile.
        how = {"pool": pool, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._forward, **how):
            scored = score(self._pack)
            last = loss(scored[0], self._pack, self._scale)
        with torch.cuda.graph(self._backward, **how):
            last.backward()
        self._gradients = take_gradients(parameters)
        self._scored = [x.detach() for x in scored]

    def _tensors(self, pack: Pack) -> dict[str, Tensor]:
        """Sequences without tokens stand behind the others."""
        found = {f.name: getattr(pack, f.name) for f in fields(pack)}
        missing = self._sequences + 1 - len(pack.starts)
        found["starts"] = pad(pack.starts, (0, missing), value=pack.ids.shape[1])
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    def forward(self, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
        for name, new in self._tensors(pack).items():
            getattr(self._pack, name).copy_(new)
        self._scale.fill_(scale)
        self._forward.replay()
        logprobs, entropies = self._scored
        return logprobs.clone(), entropies.clone()

    def backward(self) -> dict[str, Tensor]:
        self._backward.replay()
        return self._gradients
