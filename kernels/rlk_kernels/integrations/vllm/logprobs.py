"""The log-prob of given tokens: a patch, because vLLM has no extension point for it.

The patch replaces `Sampler.compute_logprobs` and `gather_logprobs` of vLLM's older runner, which
runs on CPUs, and `compute_token_logprobs` of the newer one, which runs on GPUs. For log-probs of
processed logits, the logits are kept until the requested tokens are known. The newer runner divides
by a temperature without rounding to nearest; here it divides like the profile. A vLLM with other
functions is refused. N = rows, K = tokens of each row, V = vocabulary.
"""

import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.token_logprobs import TokenLogprobs

NEWER = "vllm.v1.worker.gpu.sample"
"""The package with the newer runner's sampling."""


COMPUTED = TokenLogprobs()


def patches() -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, replacement). Raises NotSupported for a vLLM whose functions differ from
    the known ones."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    _check(Sampler, "compute_logprobs", ["logits"])
    _check(Sampler, "gather_logprobs", ["logprobs", "num_logprobs", "token_ids"])
    yield Sampler, "compute_logprobs", staticmethod(_copy_logits)
    yield Sampler, "gather_logprobs", staticmethod(_gathering(Sampler.gather_logprobs))
    listed = _parameters(Sampler, LISTED) == ["self", "logprobs", "logprob_token_ids", "sampled"]
    if listed:
        yield Sampler, LISTED, _listing(getattr(Sampler, LISTED))
    yield Sampler, "forward", _refusing(Sampler.forward, listed)
    _check(TopKTopPSampler, "__init__", ["self", "logprobs_mode", "use_fp64_gumbel"])
    yield TopKTopPSampler, "__init__", _keeping(TopKTopPSampler.__init__)
    yield from _of_newer_runner()


LISTED = "gather_specific_token_logprobs"
"""The function of the older runner's sampler that returns log-probs of `logprob_token_ids`."""


def _parameters(owner: Any, name: str) -> list[str] | None:
    function = getattr(owner, name, None)
    return None if function is None else list(inspect.signature(function).parameters)


def _check(owner: Any, name: str, parameters: list[str]) -> None:
    actual = _parameters(owner, name)
    if actual != parameters:
        raise NotSupported(f"log-probs: {name} of this vLLM takes {actual} instead of {parameters}")


def _copy_logits(logits: Tensor) -> Tensor:
    """The logits instead of the log-probs of all tokens, copied before sampling writes into them.
    The log-probs are computed when the requested tokens are known."""
    return logits.to(torch.float32, copy=True)


def _keeping(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, logprobs_mode: str = "raw_logprobs", *args: Any, **more: Any) -> None:
        mode = "processed_logits" if logprobs_mode == "processed_logprobs" else logprobs_mode
        original(self, mode, *args, **more)

    return init


def _gathering(original: Any) -> Any:
    @functools.wraps(original)
    def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        # `logprobs` are logits: their largest tokens and their ranks are the same.
        gathered = original(logprobs, num_logprobs, token_ids)
        return gathered._replace(logprobs=COMPUTED(logprobs, gathered.logprob_token_ids))

    return gather


def _listing(original: Any) -> Any:
    @functools.wraps(original)
    def gather(self: Any, logprobs: Tensor, *args: Any) -> Any:
        gathered = original(self, logprobs, *args)
        computed = COMPUTED(logprobs, gathered.logprob_token_ids)
        # vLLM pads with -inf where a request lists fewer tokens than another.
        return gathered._replace(
            logprobs=computed.masked_fill(gathered.logprobs.isneginf(), -torch.inf)
        )

    return gather


def _refusing(original: Any, listed: bool) -> Any:
    """A forward that refuses requests without a kernel. listed: whether the kernels compute the
    log-probs of `logprob_token_ids`."""

    @functools.wraps(original)
    def forward(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> Any:
        if sampling_metadata.max_num_logprobs == -1:
            raise NotSupported("log-probs of all tokens, unsorted, are not supported")
        if sampling_metadata.logprob_token_ids and not listed:
            raise NotSupported("this vLLM does not support logprob_token_ids: use logprobs=-1")
        return original(self, logits, sampling_metadata, *args, **more)

    return forward


def _of_newer_runner() -> Iterator[tuple[Any, str, Any]]:
    name = "compute_token_logprobs"
    try:
        module = importlib.import_module(f"{NEWER}.logprob")
    except ImportError:
        return
    _check(module, name, ["logits", "token_ids"])
    yield module, name, COMPUTED
    prompt = importlib.import_module(f"{NEWER}.prompt_logprob")
    if hasattr(prompt, name):
        yield prompt, name, COMPUTED
    states = importlib.import_module(f"{NEWER}.states")
    _check(states, "apply_temperature", ["logits", "expanded_idx_mapping", "temperature"])
    yield states, "apply_temperature", divide


def divide(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """Divides logits[N, V] in place by each row's temperature, of temperature[requests]; 0 stands
    for greedy decoding and divides by 1."""
    by = temperature[expanded_idx_mapping].to(torch.float32)
    logits.copy_(logits.float() / torch.where(by == 0, 1.0, by)[:, None])
