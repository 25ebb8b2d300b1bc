"""What the integration with vLLM does with tensors alone: log-probs of given tokens, and which rows
of a padded batch reach the cache. No vLLM is needed."""

from types import SimpleNamespace

import pytest
import torch
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.vllm.attention import Attention, keys_and_values
from rlk_kernels.integrations.vllm.logprobs import MOST, TokenLogprobs


def test_each_given_token_has_the_bits_that_it_has_alone() -> None:
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 300, generator=made)
    ids = torch.randint(0, 300, (7, 6), generator=made)
    computed = TokenLogprobs()
    found = computed(logits, ids)
    for column in range(6):
        assert torch.equal(found[:, column], profile.logp(logits, ids[:, column].contiguous()))
    assert torch.equal(computed(logits, ids[:, :1]), found[:, :1])
    assert computed.rlk_calls == 2


def test_more_tokens_of_a_row_than_are_served_are_refused() -> None:
    ids = torch.zeros(1, MOST + 1, dtype=torch.int64)
    with pytest.raises(NotServed, match="1025 tokens"):
        TokenLogprobs()(torch.zeros(1, 10), ids)


@pytest.mark.parametrize("slots", [[5, 0, -1, -1], [5, 0]], ids=["no slot", "fewer slots"])
def test_rows_of_padding_reach_no_cache(slots: list[int]) -> None:
    """A batch padded to the size of a CUDA graph: its last rows are nobody's."""
    cache = torch.full((2, 3, 4, 16), 7.0)  # blocks, heads, places, keys beside values
    key, value = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    attention = Attention.do_kv_cache_update
    attention(SimpleNamespace(), None, key, value, cache, torch.tensor(slots))  # type: ignore[arg-type]
    k, v = keys_and_values(cache)
    for row, slot in ((0, 5), (1, 0)):
        assert torch.equal(k[slot // 4, slot % 4], key[row])
        assert torch.equal(v[slot // 4, slot % 4], value[row])
    assert int((cache != 7.0).sum()) == 2 * 3 * 16
