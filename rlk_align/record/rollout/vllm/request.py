"""A request as vLLM's engine core has it."""

import re
from typing import Any

from rlk_align.record.rollout.vllm.engine import adapter_number

_OF_VLLM = re.compile(r"(?:\d+_)?(?:cmpl-|chatcmpl-|generate-tokens-)?")
"""What vLLM puts before the id that a client gives a request."""


class VLLMRequest:
    """A `LiveRequest`."""

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def name(self) -> str:
        return str(self._request.request_id)

    @property
    def given_name(self) -> str:
        return _OF_VLLM.sub("", self.name, count=1)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self._request.prompt_token_ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self._request.output_token_ids)

    @property
    def lora(self) -> Any:
        """vLLM's request for the adapter; None for none."""
        return self._request.lora_request

    @property
    def adapter(self) -> int:
        return adapter_number(self._request)

    @property
    def preemptions(self) -> int:
        return int(self._request.num_preemptions)

    @property
    def refusal(self) -> str:
        request, params = self._request, self._request.sampling_params
        reasons = {
            "it is not sampled": params is None,
            "a prompt of embeddings": request.prompt_token_ids is None
            or request.prompt_embeds is not None,
            "images, audio or video": bool(request.mm_features),
            "a prompt that is streamed": bool(getattr(request, "resumable", False)),
            "stop strings, which end a response where its tokens do not say": params is not None
            and bool(params.stop),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")
