"""SGLang in the process of each rank: its own scheduler, model runner, sampler and log-probs."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from rlk_align.engines.base import Engine, Logprobs, Sampled, SamplesDone, Sampling
from rlk_align.engines.common.attributes import processing
from rlk_align.engines.common.code import code_places
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.experts import BY_EXPERT
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.parameters import ParameterRecord, record_parameter
from rlk_align.engines.common.places import Place, shards_of
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.sglang.attributes import sglang_attributes
from rlk_align.engines.sglang.boot import prepare
from rlk_align.engines.sglang.experts import FUSED
from rlk_align.engines.sglang.graphs import GraphCounter
from rlk_align.engines.sglang.head import add_head
from rlk_align.engines.sglang.limits import attention_backend, check_version
from rlk_align.engines.sglang.observable import call_every_module
from rlk_align.engines.sglang.places import sglang_places
from rlk_align.engines.sglang.session import Answer, Request, Session
from rlk_align.engines.sglang.taps import SGLangTaps
from rlk_align.engines.sglang.weights import sglang_weights
from rlk_align.errors import EngineFailed, ModelError
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.truncation import truncation
from rlk_align.results import CodePlace
from rlk_align.trace.writer import PassWriter

_MAX_CACHE = 1e9
"""The largest cache of keys and values unless `mem_fraction` is given, in bytes."""
_SEQUENCES = 64
"""The number of sequences, each as long as the context, that the cache then has room for."""


class SGLangEngine(Engine):
    """`sglang:tp=N,temperature=T,top_p=P,logprobs=raw|processed,chunked_prefill_size=N,page_size=N`:
    samples, and prefills the sampled sequences again.

    SGLang packs, chunks and batches the requests. A prefill has to sample one token. Log-probs are
    those of the raw distribution unless `logprobs=processed`, which is SGLang's own default: those
    of logits / temperature.
    """

    intervenes = True

    def open(self) -> None:
        device = self.spec.device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_version(importlib.metadata.version("sglang"), device)
        self._passes = 0
        self._replays = self.production and device == "cuda"
        self._stand_ins = prepare(device, raw=self._raw, ranks=self.ranks.world)
        if self.kernels is not None and self.production:
            # Graphs are captured while SGLang starts.
            self.kernels.before_loading()
        option = self.spec.option
        named = {
            "chunked_prefill_size": "chunked_prefill_size",
            "max_running_requests": "max_running_requests",
            "page_size": "page_size",
            "mem_fraction": "mem_fraction_static",
        }
        try:
            self._session = Session(
                self.ranks,
                graphs=self._replays,
                prefill_graphs=self._replays and bool(option("prefill_graphs")),
                model_path=str(self.model_path),
                device=device,
                attention_backend=attention_backend(option, device),
                dtype=self.spec.dtype(self.shape.dtype),
                context_length=self.shape.context,
                disable_radix_cache=not option("radix_cache"),
                random_seed=0,
                **{theirs: option(ours) for ours, theirs in named.items() if option(ours)},
                **({} if option("mem_fraction") else {"max_total_tokens": self._cache_tokens()}),
            )
        except (ValueError, OSError, SafetensorError) as error:
            raise ModelError(f"SGLang could not load {self.model_path}: {error}") from error
        self.runner = self._session.runner
        self.model = self.runner.model
        if self.kernels is not None and not self.production:
            self.kernels.in_model(self.runner, {})
        if not self.production:
            if device == "cuda":
                call_every_module()
            add_head(self.model)
        apply_patch(self.spec, self.model)

    def _cache_tokens(self) -> int:
        """The size of the cache of keys and values, whose zeros are written when SGLang starts."""
        shape = self.shape
        token = 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim  # in fp32
        tokens = min(_SEQUENCES * shape.context, int(_MAX_CACHE) // token)
        page = int(self.spec.option("page_size") or 1)
        return max(tokens, shape.context) // page * page

    @property
    def _raw(self) -> bool:
        return self.spec.option("logprobs") == "raw"

    @property
    def _temperature(self) -> float:
        return float(self.spec.option("temperature") or 1.0)

    def version(self) -> str:
        without = ", ".join(self._stand_ins)
        return importlib.metadata.version("sglang") + (f" without {without}" if without else "")

    def dtype(self) -> str:
        return str(self.runner.model_config.dtype).removeprefix("torch.")

    def attributes(self) -> dict[str, Any]:
        # SGLang's processed log-probs ignore the limits; those of the kernels' sampler do not.
        temperature = 1.0 if self._raw else self._temperature
        ours = self.spec.option("sampler") == "rlk" and not self._raw
        limits = truncation(self.spec.options) if ours else {}
        return sglang_attributes(self.model, self.shape) | processing(temperature, limits)

    def code(self) -> dict[str, CodePlace]:
        return code_places(self.model, self._places)

    def shards(self) -> dict[str, list[tuple[int, int, int]]]:
        return shards_of(self._places)

    @property
    def _places(self) -> list[Place]:
        return list(sglang_places(self.model, self.shape, self.ranks.world))

    def weights(self) -> Iterator[ParameterRecord]:
        for parameter in sglang_weights(self.model, self.shape, self.ranks):
            # Every rank gathers, and rank 0 records.
            if self.ranks.rank == 0:
                yield record_parameter(parameter)

    def unexposed(self, kind: str) -> dict[str, str]:
        fused = {}
        if self.kernels is None:
            layers = self.shape.sparse_layers
            fused = {f"layers.{i}.{op}": FUSED for i in layers for op in BY_EXPERT}
        if kind == "decode" or self.attributes()["logprobs"] == "raw":
            return fused
        raw = "SGLang's log-probs of a prompt are raw, even if those of sampled tokens are not"
        return fused | {"logprob": raw}

    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Sampled:
        # SGLang draws from torch's global generator unless its deterministic mode is on.
        torch.manual_seed(sampling.seed)
        forced = sampling.forced
        requests = [
            Request(
                rid=str(i),
                ids=s.prompt_ids,
                max_new_tokens=len(s.response_ids) if forced else sampling.max_new_tokens,
                temperature=self._temperature,
                limits=truncation(self.spec.options),
                seed=sampling.request_seed(i),
                ignore_eos=forced,
            )
            for i, s in enumerate(batch.samples)
        ]
        sampled = [range(len(s.prompt_ids) - 1, self.shape.context) for s in batch.samples]
        answers = self._run(requests, sampled, batch, tap, intervention, forced)
        done(len(answers))
        responses = [a.ids for a in answers]
        if forced and responses != [list(s.response_ids) for s in batch.samples]:
            raise EngineFailed("SGLang did not sample the forced tokens")
        return Sampled(responses, self._reported([a.logprobs for a in answers]))

    def score(
        self,
        batch: TokenBatch,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        requests = [
            Request(
                rid=str(i),
                ids=s.ids,
                max_new_tokens=1,
                temperature=1.0,
                logprobs_from=len(s.prompt_ids) - 1,
            )
            for i, s in enumerate(batch.samples)
        ]
        sampled = [s.sampled_positions for s in batch.samples]
        answers = self._run(requests, sampled, batch, tap, intervention)
        done(len(answers))
        if "logprob" in self.unexposed("prefill"):
            return {}
        scored = []
        for s, answer in zip(batch.samples, answers, strict=True):
            first, *logprobs = answer.sequence_logprobs
            assert first is None, answer
            assert len(logprobs) == len(s.response_ids), answer
            scored.append(logprobs)
        return self._reported(scored)

    def _reported(self, logprobs: Sequence[Sequence[float | None]]) -> Logprobs:
        """The log-probs of all samples, which every rank has, as rank 0 reports them."""
        if self.ranks.rank:
            return {}
        return {i: np.array(values, dtype=np.float32) for i, values in enumerate(logprobs)}

    def _run(
        self,
        requests: Sequence[Request],
        sampled: list[range],
        batch: TokenBatch,
        tap: PassWriter | None,
        intervention: Intervention | None,
        forced: bool = False,
    ) -> list[Answer]:
        # The salt keeps a pass from reusing prefixes that an earlier pass cached: SGLang would not
        # compute them again, and no tap would see them.
        self._passes += 1
        salted = [_salted(r, f"pass {self._passes}") for r in requests]
        if self.production:
            return self._run_untapped(salted)
        samples = {r.rid: i for i, r in enumerate(salted)}
        editor = Editor.of(intervention, batch)
        hooks = SGLangTaps(self.runner, self.ranks, self.shape, tap, editor, samples, sampled)
        with hooks as taps:
            if forced:
                taps.force(batch)
            answers = self._session.run(salted)
        if tap is not None:
            for i, answer in enumerate(answers):
                tap.took_from_cache(i, answer.cached)
        return answers

    def _run_untapped(self, requests: Sequence[Request]) -> list[Answer]:
        if not self._replays:
            return self._session.run(requests)
        with GraphCounter(self.runner) as counter:
            answers = self._session.run(requests)
        self.graphs = counter.counted()
        return answers


def _salted(request: Request, salt: str) -> Request:
    """The request of one pass: ids of earlier passes are not used again."""
    return replace(request, rid=f"{salt}, sample {request.rid}", salt=salt)
