"""Decoding one sequence after another, for an engine that keeps the keys and values itself."""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Engine, Logprobs, Sampled, SamplesDone, Sampling, Tap
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.logprobs import token_logprobs
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.errors import EngineFailed
from rlk_align.model.prompts import Sample, TokenBatch


class DecodingEngine(Engine):
    """An engine that is given one sequence a step; it has the option `temperature`."""

    device: Any
    """Where its model lies."""

    @abstractmethod
    def tapped(self, tap: Tap | None, editor: Editor | None) -> SiteHooks:
        """Hooks on the sites of its model."""

    @abstractmethod
    def next_logits(
        self, taps: Any, rows: ForwardRows, ids: list[int], cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Logits `[1, V]` behind the last of these ids, which are `rows`, and what the next step is
        given as `cache`; the first is given None. `taps`: what `tapped` made."""

    @abstractmethod
    def stop_ids(self) -> set[int]:
        """The tokens that end a response."""

    @property
    def temperature(self) -> float:
        return float(self.spec.option("temperature") or 1.0)

    def logprobs(self, logits: torch.Tensor, target: torch.Tensor) -> np.ndarray:
        """What is reported of rows `[N, V]` of logits, float32 `[N]`."""
        if self.kernels is not None:
            logprobs = self.kernels.logprobs(logits, target, self.temperature)
            if logprobs is not None:
                return logprobs.cpu().numpy()
        return token_logprobs(logits, target, self.temperature)

    @torch.inference_mode()
    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: Tap | None,
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
        self, number: int, sample: Sample, sampling: Sampling, taps: SiteHooks
    ) -> tuple[list[int], list[np.ndarray]]:
        """One response. Its noise depends on (seed, number) alone, not on its neighbours."""
        generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + number)
        stop = self.stop_ids()
        cache, new, response, logprobs = None, list(sample.prompt_ids), [], []
        position = 0
        forced = sample.response_ids if sampling.forced else None
        for step in range(sampling.max_new_tokens if forced is None else len(forced)):
            last = position + len(new) - 1
            rows = ForwardRows.of_sequence(number, range(position, last + 1), range(last, last + 1))
            logits, cache = self.next_logits(taps, rows, new, cache)
            token = (
                self._draw(logits[0], generator, number, last) if forced is None else forced[step]
            )
            target = torch.tensor([token], device=self.device)
            logprobs.append(self.logprobs(logits, target))
            response.append(token)
            position, new = last + 1, [token]
            if forced is None and token in stop:
                break
        return response, logprobs

    def _draw(
        self, logits: torch.Tensor, generator: torch.Generator, sample: int, position: int
    ) -> int:
        """A token by logits `[V]` at (sample, position)."""
        probs = torch.softmax(logits.float() / self.temperature, dim=-1).cpu()
        if not torch.isfinite(probs).all():
            raise EngineFailed(
                f"engine {self.spec.name!r} cannot sample: the logits of sample {sample} at "
                f"position {position} are NaN or infinite",
                "look at the weights, the config, and what a patch does",
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
