"""Both passes of an engine that computes one forward at a time, in its own process."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Engine, Logprobs, Sampled, SamplesDone, Sampling
from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.parameters import LiveParameter, ParameterRecord, record_parameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import ForwardHooks
from rlk_align.engines.common.weights import unfused
from rlk_align.errors import EngineFailed
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.truncation import truncation
from rlk_align.results import CodePlace
from rlk_align.trace.writer import PassWriter


class ForwardEngine(Engine):
    """A subclass defines one forward of a model in which no operators are fused. It has the option
    `temperature`, and sets `model` and `device` in `open`."""

    intervenes = True
    hooks: type[ForwardHooks] = ForwardHooks
    model: Any
    device: Any

    @abstractmethod
    def places(self) -> Iterable[Place]:
        """The engine's table of places."""

    @abstractmethod
    def forward(self, batch: TokenBatch, members: Sequence[int], taps: ForwardHooks) -> Logprobs:
        """Scores these samples in one forward, whose rows it declares by `taps.at`."""

    @abstractmethod
    def step(
        self, taps: ForwardHooks, rows: ForwardRows, ids: Sequence[int], cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Computes the forward of these ids, whose `rows` it declares by `taps.at`. Returns the
        logits `[N, V]` of the last N ids, and the next step's `cache`, which is None at first."""

    @abstractmethod
    def stop_ids(self) -> set[int]:
        """The tokens that end a response."""

    def tapped(self, tap: PassWriter | None, editor: Editor | None) -> ForwardHooks:
        """Hooks on the sites of the model."""
        return self.hooks(self.model, self.places(), tap, editor)

    def code(self) -> dict[str, CodePlace]:
        return code_places(self.model, self.places())

    def weights(self) -> Iterator[ParameterRecord]:
        for name, value in unfused(self.model, self.places()):
            yield record_parameter(LiveParameter(name, value))

    @property
    def temperature(self) -> float:
        return float(self.spec.option("temperature") or 1.0)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of a truncated distribution, which the kernels alone compute."""
        return truncation(self.spec.options) if self.kernels is not None else {}

    def logprobs(self, logits: torch.Tensor, target: torch.Tensor) -> np.ndarray:
        """The log-probs of `target` `[N]` under logits `[N, V]`, float32 `[N]`."""
        if self.kernels is not None:
            logprobs = self.kernels.logprobs(logits, target, self.temperature, limits=self.limits)
            if logprobs is not None:
                return logprobs.cpu().numpy()
        scaled = logits.detach().float()
        if self.temperature != 1.0:
            scaled = scaled / self.temperature
        logprob = torch.log_softmax(scaled, dim=-1)
        return logprob.gather(-1, target[:, None]).squeeze(-1).cpu().numpy()

    @property
    def batch_size(self) -> int:
        """The number of samples that one forward scores."""
        return 1

    def forwards(self, samples: Sequence[int]) -> Iterator[Sequence[int]]:
        """The samples of each forward, `batch_size` at a time."""
        for start in range(0, len(samples), self.batch_size):
            yield samples[start : start + self.batch_size]

    @torch.inference_mode()
    def score(
        self,
        batch: TokenBatch,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        logprobs: Logprobs = {}
        with self.tapped(tap, Editor.of(intervention, batch)) as taps:
            for members in self.forwards(range(len(batch.samples))):
                logprobs |= self.forward(batch, members, taps)
                done(len(logprobs))
        return logprobs

    @torch.inference_mode()
    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Sampled:
        responses: list[list[int]] = []
        logprobs: Logprobs = {}
        with self.tapped(tap, Editor.of(intervention, batch)) as taps:
            for i, s in enumerate(batch.samples):
                ids, lp = self._decode(i, s, sampling, taps)
                responses.append(ids)
                logprobs[i] = np.concatenate(lp)
                done(i + 1)
        return Sampled(responses, logprobs)

    def _decode(
        self, number: int, sample: Sample, sampling: Sampling, taps: ForwardHooks
    ) -> tuple[list[int], list[np.ndarray]]:
        """One response. Its random draws depend on (seed, number) alone, and on no other sample."""
        generator = torch.Generator().manual_seed(sampling.request_seed(number))
        stop = self.stop_ids()
        cache, new, response, logprobs = None, list(sample.prompt_ids), [], []
        position = 0
        forced = sample.response_ids if sampling.forced else None
        for step in range(sampling.max_new_tokens if forced is None else len(forced)):
            last = position + len(new) - 1
            rows = ForwardRows.of_sequence(number, range(position, last + 1), range(last, last + 1))
            logits, cache = self.step(taps, rows, new, cache)
            token = (
                self._draw(logits[-1], generator, number, last) if forced is None else forced[step]
            )
            target = torch.tensor([token], device=self.device)
            logprobs.append(self.logprobs(logits[-1:], target))
            response.append(token)
            position, new = last + 1, [token]
            if forced is None and token in stop:
                break
        return response, logprobs

    def _draw(
        self, logits: torch.Tensor, generator: torch.Generator, sample: int, position: int
    ) -> int:
        """A token drawn from the logits `[V]` at (sample, position)."""
        scaled = logits.float() / self.temperature
        if self.kernels is not None and self.limits:
            kept = self.kernels.kept(logits[None], self.temperature, self.limits)[0]
            scaled = scaled.masked_fill(~kept, -torch.inf)
        probs = torch.softmax(scaled, dim=-1).cpu()
        if not torch.isfinite(probs).all():
            raise EngineFailed(
                f"engine {self.spec.name!r} cannot sample: the logits of sample {sample} at "
                f"position {position} are NaN or infinite",
                "check the weights, the config, and the patch",
            )
        token = int(torch.multinomial(probs, 1, generator=generator))
        if token >= self.shape.vocab:
            raise EngineFailed(
                f"engine {self.spec.name!r} sampled token {token} for sample {sample} at position "
                f"{position}: the logits have {len(probs):,} columns, and the vocabulary has "
                f"{self.shape.vocab:,} tokens",
                "set the logits of the padding to -inf",
            )
        return token
