"""The log-probs of sampled tokens and of the prompt's tokens.

SGLang scores sampled tokens by the logits divided by the temperature, or by the raw logits with
SGLANG_RETURN_ORIGINAL_LOGPROB=1 and in batches that are all greedy; a prompt's tokens always by the
raw ones. These classes come in front of SGLang's own, and keep that.

N = rows, V = vocabulary
"""

from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.layers.logprob_processor import LogprobResult
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.token_logprobs import TokenLogprobs


class Sampling:
    """Before SGLang's Sampler, which overwrites the logits while it samples."""

    output_logprob_processor: Any
    rlk_wanted = False

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool, *args: Any, **more: Any
    ) -> Tensor:
        self.rlk_wanted = return_logprob
        sampled: Tensor = super().forward(
            logits_output, sampling_info, return_logprob, *args, **more
        )
        return sampled

    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
        logits = super()._preprocess_logits(logits, sampling_info)
        if self.rlk_wanted:
            self.output_logprob_processor.rlk_logits = _scored(logits, sampling_info)
        return logits


def _scored(logits: Tensor, sampling_info: Any) -> Tensor:
    """A copy of the logits whose softmax is reported."""
    if sampling_info.is_all_greedy or sampler.SGLANG_RETURN_ORIGINAL_LOGPROB:
        return logits.to(torch.float32, copy=True)
    return logits.float() / sampling_info.temperatures.float()


class SampledLogprobs:
    """Before SGLang's OutputLogprobProcessor."""

    rlk_computed: TokenLogprobs
    rlk_logits: Tensor | None

    def compute_logprobs(
        self, logprobs: Tensor, top_logprobs_nums: list[int], token_ids_logprobs: list[Any],
        batch_next_token_ids: Tensor,
    ) -> Any:  # fmt: skip
        logits, self.rlk_logits = self.rlk_logits, None
        assert logits is not None
        if any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs):
            every = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
            return super().compute_logprobs(
                self.rlk_computed(logits, every), top_logprobs_nums, token_ids_logprobs,
                batch_next_token_ids,
            )  # fmt: skip
        computed = self.rlk_computed(logits, batch_next_token_ids.long()[:, None])[:, 0]
        return LogprobResult(token_logprobs=computed.clamp(min=torch.finfo(computed.dtype).min))

    def compute_logprobs_only(self, *_: Any, **__: Any) -> Any:
        raise NotSupported("log-probs of listed tokens without sampling are not supported")


class PromptLogprobs:
    """Before SGLang's InputLogprobProcessor, which computes the logits of some rows at a time."""

    rlk_computed: TokenLogprobs

    def _forward_by_chunk(
        self, pruned_states: Tensor, sample_indices: Tensor, input_logprob_indices: Tensor,
        token_to_seq_idx: list[int], lm_head: Any, get_logits_fn: Any, logits_metadata: Any,
        chunk_size: int, **borrowing: Any,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        rows, targets = input_logprob_indices, logits_metadata.extend_input_logprob_token_ids_gpu
        others = logits_metadata.extend_return_top_logprob, logits_metadata.extend_token_ids_logprob
        if any(others) and len(rows):
            raise NotSupported(
                "log-probs of a prompt's top or listed tokens are not supported; those of its own "
                "tokens are (top_logprobs_num=0, or logprob_start_len=-1)"
            )
        first, parts = 0, [pruned_states.new_empty(0, dtype=torch.float32)]

        def logits_of(states: Tensor, *args: Any, **more: Any) -> Tensor:
            nonlocal first
            logits: Tensor = get_logits_fn(states, *args, **more)
            inside = (rows >= first) & (rows < first + len(states))
            if inside.any():
                some = logits[rows[inside] - first], targets[inside].long()[:, None]
                parts.append(self.rlk_computed(*some)[:, 0])
            first += len(states)
            return logits

        result, sampled = super()._forward_by_chunk(
            pruned_states, sample_indices, rows, token_to_seq_idx, lm_head, logits_of,
            logits_metadata, chunk_size, **borrowing,
        )  # fmt: skip
        computed = torch.cat(parts)
        assert computed.shape == result.token_logprobs.shape
        result.token_logprobs = computed.to(result.token_logprobs.device)
        return result, sampled
