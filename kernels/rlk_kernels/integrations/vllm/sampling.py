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
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.token_draws import TokenDraws, key_of, processed
from rlk_kernels.integrations.vllm.logprobs import NEWER

Patches: TypeAlias = Iterator[tuple[Any, str, Any]]
LEAST_TEMPERATURE = 1e-5
"""vLLM decodes greedily below."""
PROCESSED = ("processed_logits", "processed_logprobs")


DRAWN = TokenDraws()


def patches() -> Patches:
    """(owner, attribute, replacement). Raises NotSupported for a vLLM whose functions differ from
    the known ones."""
    yield from _of_older_runner()
    yield from _of_newer_runner()


def _check(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    function = getattr(owner, name, None)
    actual = () if function is None else tuple(inspect.signature(function).parameters)
    if actual != parameters:
        raise NotSupported(f"sampler: {name} of this vLLM takes {actual} instead of {parameters}")


def _of_older_runner() -> Patches:
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _check(Sampler, "sample", ("self", "logits", "sampling_metadata", "logprobs_mode_override"))
    yield Sampler, "sample", _sample
    _check(GPUModelRunner, "_sample", ("self", "logits", "spec_decode_metadata"))
    yield GPUModelRunner, "_sample", _with_requests(GPUModelRunner._sample)


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
            self.sampler.rlk_requests = torch.tensor(keys).to(logits.device), at
        try:
            return original(self, logits, spec_decode_metadata)
        finally:
            self.sampler.rlk_requests = None

    return sample


def _sample(
    self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """The replacement of `Sampler.sample`: (ids, processed logits where they are requested)."""
    if self.use_fp64_gumbel:
        raise NotSupported("use_fp64_gumbel with the kernels' sampler, which has no such noise")
    settings, count = _settings(sampling_metadata, logits), len(logits)
    nobody = torch.zeros(count, dtype=torch.int64, device=logits.device)
    keys, positions = getattr(self, "rlk_requests", None) or (nobody, nobody)
    ids = DRAWN(logits, keys, positions, settings)
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
        "temperature": torch.where(heat < LEAST_TEMPERATURE, 0.0, heat),
        "top_k": metadata.top_k, "top_p": metadata.top_p, "min_p": min_p,
    }  # fmt: skip


def _of_newer_runner() -> Patches:
    try:
        sampler = importlib.import_module(f"{NEWER}.sampler").Sampler
        states = importlib.import_module(f"{NEWER}.states").SamplingStates
    except ImportError:
        return
    rows = ("logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids")
    more = ("expanded_local_pos", "seq_lens_upper_bound_np")
    _check(sampler, "sample", ("self", *rows, *more, "return_logprobs"))
    _check(sampler, "apply_sampling_params", ("self", *rows, *more, "skip_top_k_top_p"))
    yield sampler, "sample", _sample_of_newer
    for name in ("apply_temperature", "apply_min_p"):
        _check(states, name, ("self", "logits", "expanded_idx_mapping", "idx_mapping_np"))
        yield states, name, _left_to_the_draw


def _left_to_the_draw(*_: Any) -> None:
    """Temperature and min-p are settings of the draw."""


def _sample_of_newer(
    self: Any, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping: Tensor,
    idx_mapping_np: Any, pos: Tensor, *rest: Any, return_logprobs: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The replacement of `Sampler.sample`: (ids, processed logits)."""
    if self.use_fp64_gumbel:
        raise NotSupported("use_fp64_gumbel with the kernels' sampler, which has no such noise")
    logits = self.apply_sampling_params(
        logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, *rest,
        skip_top_k_top_p=True,
    )  # fmt: skip
    states = self.sampling_states
    top_k, top_p = states.get_top_k_top_p(expanded_idx_mapping, idx_mapping_np)
    heat = states.temperature.gpu[expanded_idx_mapping]
    settings = {
        "temperature": torch.where(heat < LEAST_TEMPERATURE, 0.0, heat),
        "top_k": top_k, "top_p": top_p,
        "min_p": states.min_p.gpu[expanded_idx_mapping]
        if states.min_p.np[idx_mapping_np].any()
        else None,
    }  # fmt: skip
    keys = states.seeds.gpu[expanded_idx_mapping]
    ids = DRAWN(logits, keys, pos.long() + 1, settings)
    masks = (return_logprobs and self.logprobs_mode in PROCESSED) or self.return_sampling_mask
    return ids, processed(logits, settings) if masks else logits
