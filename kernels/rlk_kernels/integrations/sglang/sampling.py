"""The sampler of SGLang, as a class in front of its own, with the log-probs of `logprobs.py`.

Penalties, biases and grammars stay SGLang's. What is replaced starts at the logits that they leave:
temperature, min-p, top-k, top-p and the draw are one call of `rlk_kernels.sample`, with the
request's seed (`sampling_seed`) as the key and the number of tokens before the new one as the
position. SGLang keeps seeds in its deterministic mode alone, so the batch's settings get them here.
Log-probs are those among the kept tokens, where SGLang's ignore top-k, top-p and min-p; those of a
greedy request are of its logits.

N = rows, V = vocabulary
"""

from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.sglang.logprobs import Sampling
from rlk_kernels.integrations.token_draws import TokenDraws, key_of, processed

DRAWN = TokenDraws()


class Drawing(Sampling):
    """Before SGLang's Sampler."""

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool,
        top_logprobs_nums: list[int], token_ids_logprobs: list[Any], positions: Tensor,
        *, logprob_logits: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if logprob_logits is not None or sampling_info.sampling_mask_batch_indices is not None:
            raise NotSupported("watermarks and returned sampling masks with the kernels' sampler")
        self.rlk_wanted = False  # the log-probs are of other logits
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        settings, keys = _settings(sampling_info), sampling_info.sampling_seed
        if keys is None:  # a batch of SGLang's own, before any request
            keys = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        ids = DRAWN(logits, keys, positions.long() + 1, settings)
        if return_logprob:
            raw = sampler.SGLANG_RETURN_ORIGINAL_LOGPROB
            scored = logits.float() if raw else processed(logits, settings)
            self.output_logprob_processor.rlk_logits = scored
            self.output_logprob_processor.compute_logprobs(
                None, top_logprobs_nums, token_ids_logprobs, ids
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(ids, sampling_info)
        return ids


def _settings(info: Any) -> dict[str, Tensor | None]:
    """The settings of the rows, as `rlk_kernels.sample` takes them. SGLang decodes greedily by
    top-k 1."""
    greedy, heat = info.top_ks <= 1, info.temperatures.flatten()
    return {
        "temperature": torch.where(greedy, 0.0, heat),
        "top_k": torch.where(info.top_ks >= TOP_K_ALL, 0, info.top_ks),
        "top_p": info.top_ps if info.need_top_p_sampling else None,
        "min_p": info.min_ps if info.need_min_p_sampling else None,
    }


def give_seeds(undo: ExitStack, engine_seed: int) -> None:
    """Makes the settings of every batch hold a key of each request, until `undo` is closed."""
    original = vars(SamplingBatchInfo)["from_schedule_batch"]

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original.__func__(cls, batch, vocab_size)
        keys = [key_of(r.sampling_params.sampling_seed, engine_seed, r.rid) for r in batch.reqs]
        info.sampling_seed = torch.tensor(keys, dtype=torch.int64).to(batch.device)
        return info

    undo.callback(setattr, SamplingBatchInfo, "from_schedule_batch", original)
    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
