"""The sampler in vLLM's newer runner, which runs on GPUs: see `sampling.py`.

A row of logits without a distribution has the id -1. Nothing waits for it on the GPU: the next step
may begin with that id, so the runner gets 0, and a mark of the row travels to the host with the
step's tokens. Where vLLM reads the tokens, the mark becomes an error that names the request.

N = rows, V = vocabulary
"""

import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.token_draws import NO_TOKEN, TokenDraws, processed, refuse_marked
from rlk_kernels.integrations.vllm.logprobs import NEWER

Patches: TypeAlias = Iterator[tuple[Any, str, Any]]
LEAST_TEMPERATURE = 1e-5
"""vLLM decodes greedily below."""
PROCESSED = ("processed_logits", "processed_logprobs")
ROWS = {
    "0.26": (
        "logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids",
        "expanded_local_pos",
    ),
    "0.32": (
        "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids",
        "expanded_local_pos", "seq_lens_upper_bound_np",
    ),
}  # fmt: skip
"""Version of vLLM -> what its `sample` and `apply_sampling_params` take of a step's rows."""


def known_form(owner: Any, name: str, *forms: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters of a function of vLLM. Raises NotSupported if they are none of `forms`."""
    function = getattr(owner, name, None)
    actual = () if function is None else tuple(inspect.signature(function).parameters)
    if actual not in forms:
        known = " or ".join(map(str, forms))
        raise NotSupported(f"sampler: {name} of this vLLM takes {actual} instead of {known}")
    return actual


def refuse_fp64_noise(sampler: Any) -> None:
    """Raises NotSupported if vLLM is to draw by noise in fp64."""
    if sampler.use_fp64_gumbel:
        raise NotSupported("use_fp64_gumbel with the kernels' sampler, which has no such noise")


def drawn_temperature(temperature: Tensor) -> Tensor:
    """vLLM's temperatures, as `rlk_kernels.sample` takes them."""
    return torch.where(temperature < LEAST_TEMPERATURE, 0.0, temperature)


def patches(drawn: TokenDraws) -> Patches:
    """(owner, attribute, replacement), without any for a vLLM that lacks the runner. Raises
    NotSupported for a vLLM whose functions differ from the known ones."""
    try:
        sampler = importlib.import_module(f"{NEWER}.sampler").Sampler
        states = importlib.import_module(f"{NEWER}.states").SamplingStates
        output = importlib.import_module(f"{NEWER.rpartition('.')[0]}.async_utils").AsyncOutput
    except ImportError:
        return
    forms = [("self", *rows, "return_logprobs") for rows in ROWS.values()]
    _, *rows, _ = known_form(sampler, "sample", *forms)
    known_form(sampler, "apply_sampling_params", ("self", *rows, "skip_top_k_top_p"))
    yield sampler, "sample", _sampling(drawn, rows)
    known_form(sampler, "__call__", ("self", "logits", "input_batch"))
    yield sampler, "__call__", _marking(sampler.__call__)
    for name in ("apply_temperature", "apply_min_p"):
        known_form(states, name, ("self", "logits", "expanded_idx_mapping", "idx_mapping_np"))
        yield states, name, _left_to_the_draw
    copied = ("self", "model_runner_output", "sampler_output", "num_sampled_tokens")
    copied += ("main_stream", "copy_stream")
    known_form(output, "__init__", copied, (*copied, "check_ep_fault", "pending_aux_output"))
    yield output, "__init__", _copying(output.__init__)
    known_form(output, "get_output", ("self",))
    yield output, "get_output", _raising(output.get_output)


def _left_to_the_draw(*_: Any) -> None:
    """Temperature and min-p are settings of the draw."""


def _sampling(drawn: TokenDraws, names: list[str]) -> Any:
    """The replacement of `Sampler.sample`, whose rows have these names."""

    def sample(self: Any, *rows: Any, return_logprobs: bool = False) -> tuple[Tensor, Tensor]:
        """(ids, processed logits)."""
        refuse_fp64_noise(self)
        step = dict(zip(names, rows, strict=True))
        logits = self.apply_sampling_params(*rows, skip_top_k_top_p=True)
        settings = _settings(self.sampling_states, step)
        keys = self.sampling_states.seeds.gpu[step["expanded_idx_mapping"]]
        ids = drawn(logits, keys, step["pos"].long() + 1, settings)
        self.rlk_without_token = ids == NO_TOKEN
        # Version 0.26 returns no sampling masks.
        masks = getattr(self, "return_sampling_mask", False)
        if masks or (return_logprobs and self.logprobs_mode in PROCESSED):
            logits = processed(logits, settings)
        return ids.clamp(min=0), logits

    return sample


def _settings(states: Any, step: dict[str, Any]) -> dict[str, Tensor | None]:
    """The settings of a step's rows, as `rlk_kernels.sample` takes them."""
    rows, requests = step["expanded_idx_mapping"], step["idx_mapping_np"]
    top_k, top_p = states.get_top_k_top_p(rows, requests)
    min_p = states.min_p.gpu[rows] if states.min_p.np[requests].any() else None
    heat = drawn_temperature(states.temperature.gpu[rows])
    return {"temperature": heat, "top_k": top_k, "top_p": top_p, "min_p": min_p}


def _marking(original: Any) -> Any:
    """A `Sampler.__call__` whose output has the marks of the step's rows."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        output = original(self, *args, **more)
        output.rlk_without_token = self.rlk_without_token
        return output

    return call


def _copying(original: Any) -> Any:
    """An `AsyncOutput.__init__` that copies the marks to the host, with the tokens."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        step = signature.bind(self, *args, **more).arguments
        # Other samplers, as those of drafts, mark nothing.
        marks = getattr(step["sampler_output"], "rlk_without_token", None)
        self.rlk_without_token = None
        if marks is not None:
            with torch.cuda.stream(step["copy_stream"]):
                self.rlk_without_token = marks.to("cpu", non_blocking=True)
                self.copy_event.record(step["copy_stream"])

    return init


def _raising(original: Any) -> Any:
    """An `AsyncOutput.get_output` that raises an error for a request without a token."""

    @functools.wraps(original)
    def get_output(self: Any) -> Any:
        output = original(self)
        if self.rlk_without_token is not None:
            # A chunk of a prompt has a row, and no token.
            rows = zip(output.sampled_token_ids, self.rlk_without_token.tolist(), strict=True)
            refuse_marked(output.req_ids, [bool(tokens) and mark for tokens, mark in rows])
        return output

    return get_output
