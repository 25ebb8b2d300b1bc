"""The sampler of vLLM: a patch, because vLLM has no extension point for one that all models use.

Penalties, biases, bad words and structured output stay vLLM's. What is replaced starts at the
logits that they leave: temperature, min-p, top-k, top-p and the draw are one call of
`rlk_kernels.sample`, with the request's seed as the key and the number of tokens before the new one
as the position. The older runner, which runs on CPUs, makes a generator of the seed, which is not
used. A request without a seed has a key of the engine's seed and its id (older runner), or the
seed that vLLM drew for it (newer runner).

Log-probs of processed logits are those among the kept tokens; at temperature 0, those of the logits
after penalties, as vLLM has them. A vLLM with other functions is refused. N = rows, V = vocabulary.
"""

import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.token_draws import (
    NO_TOKEN,
    TokenDraws,
    key_of,
    processed,
    refuse_marked,
)
from rlk_kernels.integrations.vllm import newer_sampling
from rlk_kernels.integrations.vllm.newer_sampling import (
    PROCESSED,
    drawn_temperature,
    known_form,
    refuse_fp64_noise,
)

Patches: TypeAlias = Iterator[tuple[Any, str, Any]]

DRAWN = TokenDraws()


def patches() -> Patches:
    """(owner, attribute, replacement). Raises NotSupported for a vLLM whose functions differ from
    the known ones."""
    yield from _of_older_runner()
    yield from newer_sampling.patches(DRAWN)


def _of_older_runner() -> Patches:
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

    known_form(Sampler, "sample", ("self", "logits", "sampling_metadata", "logprobs_mode_override"))
    yield Sampler, "sample", _sample
    known_form(GPUModelRunner, "_sample", ("self", "logits", "spec_decode_metadata"))
    yield GPUModelRunner, "_sample", _with_requests(GPUModelRunner._sample)
    # Where the host reads the tokens of a GPU, without and with a step ahead.
    known_form(GPUModelRunner, "_to_list", ("self", "sampled_token_ids"))
    yield GPUModelRunner, "_to_list", _read_at_once(GPUModelRunner._to_list)
    known_form(AsyncGPUModelRunnerOutput, "get_output", ("self",))
    output = AsyncGPUModelRunnerOutput.get_output
    yield AsyncGPUModelRunnerOutput, "get_output", _read_later(output)


def _read_at_once(original: Any) -> Any:
    @functools.wraps(original)
    def to_list(self: Any, sampled_token_ids: Tensor) -> list[list[int]]:
        sampled = original(self, sampled_token_ids)
        refuse_marked(self.input_batch.req_ids, [NO_TOKEN in tokens for tokens in sampled])
        return sampled

    return to_list


def _read_later(original: Any) -> Any:
    @functools.wraps(original)
    def get_output(self: Any) -> Any:
        output = original(self)
        refuse_marked(output.req_ids, [NO_TOKEN in ids for ids in output.sampled_token_ids])
        return output

    return get_output


def _with_requests(original: Any) -> Any:
    """A runner's `_sample`, which tells the sampler whose rows they are."""

    @functools.wraps(original)
    def sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        batch = self.input_batch
        # The runner sets back the generators of prompts that are not whole yet, which fails on a
        # CPU; nothing uses them now.
        batch.generators.clear()
        if logits is not None:
            keys = [
                key_of(self.requests[r].sampling_params.seed, self.model_config.seed, r)
                for r in batch.req_ids
            ]
            at = self.seq_lens[: len(keys)].long()
            self.sampler.rlk_requests = torch.tensor(keys).to(logits.device), at, batch.req_ids
        try:
            return original(self, logits, spec_decode_metadata)
        finally:
            self.sampler.rlk_requests = None

    return sample


def _sample(
    self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """The replacement of `Sampler.sample`: (ids, processed logits where they are requested)."""
    refuse_fp64_noise(self)
    settings, count = _settings(sampling_metadata, logits), len(logits)
    nobody = torch.zeros(count, dtype=torch.int64, device=logits.device)
    keys, positions, requests = getattr(self, "rlk_requests", None) or (nobody, nobody, ())
    ids = DRAWN(logits, keys, positions, settings, requests)
    asked = sampling_metadata.max_num_logprobs is not None or sampling_metadata.logprob_token_ids
    mode = logprobs_mode_override or self.logprobs_mode
    if not asked or mode not in PROCESSED:
        return ids, None
    z = processed(logits, settings)
    # With the kernels' log-probs, vLLM's mode is `processed_logits`.
    return ids, z if mode == "processed_logits" else self.compute_logprobs(z)


def _settings(metadata: Any, logits: Tensor) -> dict[str, Tensor | None]:
    """The settings of the rows, as `rlk_kernels.sample` takes them."""
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    heat = metadata.temperature
    if heat is None:  # all requests are greedy
        heat = torch.zeros(len(logits), device=logits.device)
    min_p = None
    for processor in metadata.logitsprocs.argmax_invariant:
        if type(processor) is not MinPLogitsProcessor:
            raise NotSupported(
                f"the logits processor {type(processor).__qualname__} with the kernels' sampler, "
                "which would skip it: it is argmax-invariant, so vLLM applies it after the "
                "temperature"
            )
        if processor.min_p_count:
            min_p = processor.min_p.flatten()
    return {
        "temperature": drawn_temperature(heat),
        "top_k": metadata.top_k, "top_p": metadata.top_p, "min_p": min_p,
    }  # fmt: skip
