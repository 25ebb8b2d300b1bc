"""A pack's forward and backward, launched by the host or as CUDA graphs, with the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from batch import Pack
from torch import Tensor
from torch.nn.functional import pad

Score = Callable[[Pack], tuple[Tensor, Tensor | None]]
"""Returns log-probs and entropies, float32 [T]."""
Loss = Callable[[Tensor, Pack, Tensor | float], Tensor]
"""Takes log-probs, their pack, and a factor of the sum."""


class Eager:
    """The host launches each kernel."""

    def __init__(self, score: Score, loss: Loss, parameters: Mapping[str, Tensor]) -> None:
        self._score, self._loss, self._parameters = score, loss, parameters
        self._last: Tensor

    def forward(self, pack: Pack, scale: float) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of a pack, without a gradient."""
        logprobs, entropies = self._score(pack)
        self._last = self._loss(logprobs, pack, scale)
        return logprobs.detach(), None if entropies is None else entropies.detach()

    def backward(self) -> dict[str, Tensor]:
        """Parameter -> gradient of the last forward's loss. Read the gradients before the next
        forward."""
        self._last.backward()
        del self._last
        return _take_gradients(self._parameters)


def _take_gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameter -> gradient; removes the gradients from the parameters."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


@dataclass(frozen=True)
class _Captured:
    """The two graphs of packs of one length, and the memory that they read and write."""

    pack: Pack
    scored: tuple[Tensor, Tensor]
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class Graphs(Eager):
    """The host launches two graphs instead of a few thousand kernels, whose launches take longer
    than their computation on the GPU.

    A graph reads and writes the memory that it was captured with, so packs are copied into that
    memory. Shapes are fixed: empty sequences fill each pack up to the largest number of sequences.
    All graphs share their memory, and write the gradients to the same tensors.
    """

    def __init__(
        self, score: Score, loss: Loss, parameters: Mapping[str, Tensor], sequences: int
    ) -> None:
        """sequences: the largest number in a pack, padding included. This class needs one GPU, and
        a `score` that never waits for the GPU."""
        super().__init__(score, loss, parameters)
        self._sequences, self._captured = sequences, dict[int, _Captured]()
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._scale = torch.zeros((), device="cuda")
        self._gradients: dict[str, Tensor] = {}
        self._now: _Captured

    def forward(self, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
        length = pack.ids.shape[1]
        if length not in self._captured:
            self._captured[length] = self._capture(pack)
        self._now = self._captured[length]
        for name, new in self._filled(pack).items():
            getattr(self._now.pack, name).copy_(new)
        self._scale.fill_(scale)
        self._now.forward.replay()
        logprobs, entropies = self._now.scored
        return logprobs.clone(), entropies.clone()

    def backward(self) -> dict[str, Tensor]:
        self._now.backward.replay()
        return self._gradients

    def _keep_gradients(self) -> None:
        """Moves the parameters' gradients to the tensors that all graphs share."""
        new = _take_gradients(self._parameters)
        self._gradients = self._gradients or new
        torch._foreach_copy_([self._gradients[name] for name in new], list(new.values()))

    def _filled(self, pack: Pack) -> dict[str, Tensor]:
        """A pack's tensors, filled up with empty sequences at the end."""
        values = {field.name: getattr(pack, field.name) for field in fields(pack)}
        missing = self._sequences + 1 - len(pack.starts)
        values["starts"] = pad(pack.starts, (0, missing), value=pack.ids.shape[1])
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    def _capture(self, pack: Pack) -> _Captured:
        """Captures the graphs for packs of this length. The pack is computed once before, because
        the first call of a kernel waits: it compiles, loads and checks the kernel."""
        fixed = replace(pack, **{name: x.clone() for name, x in self._filled(pack).items()})
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._loss(self._score(fixed)[0], fixed, self._scale).backward()
            self._keep_gradients()
            # A capture must not wait, so it uses an asynchronous assertion, which compiles here.
            torch._assert_async((fixed.starts >= 0).all())
        torch.cuda.current_stream().wait_stream(self._stream)
        # Other threads, such as vLLM's, may call CUDA meanwhile.
        how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, **how):
            logprobs, entropies = self._score(fixed)
            assert entropies is not None  # options.py refuses limits
            last = self._loss(logprobs, fixed, self._scale)
        with torch.cuda.graph(backward, **how):
            last.backward()
            self._keep_gradients()
        return _Captured(fixed, (logprobs.detach(), entropies.detach()), forward, backward)
