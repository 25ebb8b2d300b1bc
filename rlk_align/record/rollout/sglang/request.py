"""A request as SGLang's scheduler has it."""

from typing import Any

from rlk_align.record.rollout.core import Output


class SGLangRequest:
    """A `LiveRequest`. Until SGLang has made its own object of it, it has no response."""

    adapter = 0
    live: Any = None
    """SGLang's own object."""

    def __init__(self, received: Any, raw: bool) -> None:
        """received: the request as the scheduler got it; raw: whether SGLang's log-probs of sampled
        tokens are raw at any temperature."""
        self._received, self._raw = received, raw

    @property
    def name(self) -> str:
        return str(self._received.rid)

    given_name = name

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(map(int, self._received.input_ids))

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *map(int, self.live.output_ids_through_stop))

    @property
    def preemptions(self) -> int:
        return int(self.live.retraction_count)

    @property
    def refusal(self) -> str:
        received, params = self._received, self._received.sampling_params
        stops = params.stop_strs or getattr(params, "stop_regex_strs", None)
        reasons = {
            "a prompt of embeddings": received.input_embeds is not None,
            "images, audio or video": received.mm_inputs is not None,
            "a request of a session": received.session_params is not None,
            "it samples nothing": not params.max_new_tokens,
            "beam search": (getattr(params, "beam_width", None) or 1) > 1,
            "stop strings, which end a response where its tokens do not say": bool(stops),
            "its log-probs are of logits / temperature; SGLANG_RETURN_ORIGINAL_LOGPROB=1 makes "
            "them raw": params.temperature != 1.0 and not self._raw,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def ended(self) -> Output:
        """What SGLang says of it at its end."""
        said, own = self.live.logprob, self.live.output_ids_through_stop
        kind = self.live.finished_reason.to_json()["type"]
        return Output(
            name=self.name,
            logprobs=list(said.output_token_logprobs_val or ())[: len(own)],
            # The first has none.
            scores=list(said.input_token_logprobs_val or ())[1:],
            ended=True,
            left_out="" if kind in ("stop", "length") else f"it ended by {kind}",
        )
