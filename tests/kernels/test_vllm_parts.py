"""What the integration with vLLM does with tensors alone: log-probs of given tokens, draws of rows,
and which rows of a padded batch reach the cache. No vLLM is needed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rlk_kernels
import torch
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.token_draws import (
    NO_TOKEN,
    NoDistribution,
    TokenDraws,
    refuse_marked,
)
from rlk_kernels.integrations.token_logprobs import MOST, TokenLogprobs
from rlk_kernels.integrations.vllm import newer_sampling
from rlk_kernels.integrations.vllm.attention import VllmAttention, keys_and_values
from rlk_kernels.integrations.vllm.logprobs import divide


def test_each_given_token_has_the_bits_that_it_has_alone() -> None:
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 300, generator=made)
    ids = torch.randint(0, 300, (7, 6), generator=made)
    computed = TokenLogprobs()
    logprobs = computed(logits, ids)
    for column in range(6):
        assert torch.equal(logprobs[:, column], profile.logp(logits, ids[:, column].contiguous()))
    assert torch.equal(computed(logits, ids[:, :1]), logprobs[:, :1])
    assert computed.rlk_calls == 2


def test_all_tokens_of_a_row_have_the_bits_that_each_has_alone() -> None:
    """More than one reading of the logits serves."""
    width = 2 * MOST + 5
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    every = torch.arange(width).expand(2, width).flip(1)
    logprobs = TokenLogprobs()(logits, torch.cat([every[:, :1], every], dim=1))
    assert logprobs.shape == (2, width + 1)
    for column in (0, 1, MOST, MOST + 1, width):
        token = every[:, max(column - 1, 0)].contiguous()
        assert torch.equal(logprobs[:, column], profile.logp(logits, token))


def test_each_row_is_divided_by_its_own_temperature() -> None:
    """As vLLM's newer runner has them: by request, 0 where it is greedy."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    temperatures, rows = torch.tensor([0.7, 0.0, 1.0]), torch.tensor([0, 1, 2, 0])
    divided = logits.clone()
    divide(divided, rows, temperatures)
    target = torch.arange(4)
    for row, temperature in enumerate((0.7, 1.0, 1.0, 0.7)):
        alone = profile.logp(logits[row : row + 1], target[row : row + 1], temperature)
        assert torch.equal(profile.logp(divided, target)[row : row + 1], alone)


def newer_step(version: str, rows: int) -> tuple[SimpleNamespace, list[Any], dict[str, Any]]:
    """(the newer runner's sampler, what its `sample` takes, what it draws by), as vLLM has them: by
    request, in tensors and in arrays."""
    numbers = np.array([2, 0, 1, 2])[:rows]
    at, heat = torch.from_numpy(numbers), torch.tensor([0.7, 0.0, 1.2])
    top_p, min_p, seeds = torch.tensor([0.9, 1.0, 0.5]), torch.tensor([0, 0, 0.05]), torch.arange(3)

    def held(values: torch.Tensor) -> Any:
        return SimpleNamespace(gpu=values, np=values.numpy())

    states = SimpleNamespace(
        temperature=held(heat), min_p=held(min_p), seeds=held(seeds),
        get_top_k_top_p=lambda at, rows: (None, top_p[at]),
    )  # fmt: skip
    sampler = SimpleNamespace(
        sampling_states=states, logprobs_mode="processed_logprobs", use_fp64_gumbel=False,
        apply_sampling_params=lambda logits, *_, skip_top_k_top_p: logits,
    )  # fmt: skip
    step = {
        "logits": torch.randn(rows, 300, generator=torch.Generator().manual_seed(0)) * 4,
        "expanded_idx_mapping": at, "idx_mapping_np": numbers, "pos": torch.arange(10, 10 + rows),
    }  # fmt: skip
    settings = {"temperature": heat[at], "top_p": top_p[at], "min_p": min_p[at]}
    where = {"keys": seeds[at], "positions": step["pos"] + 1}
    return sampler, [step.get(name) for name in newer_sampling.ROWS[version]], settings | where


@pytest.mark.parametrize("version", newer_sampling.ROWS)
def test_a_row_of_the_newer_runner_draws_by_its_requests_settings(version: str) -> None:
    sampler, step, settings = newer_step(version, 4)
    draws = TokenDraws()
    sample = newer_sampling._sampling(draws, newer_sampling.ROWS[version])
    ids, z = sample(sampler, *step, return_logprobs=True)
    expected = rlk_kernels.sample(step[0], **settings)
    assert ids.equal(expected.ids)
    assert not sampler.rlk_without_token.any()
    # A greedy row's log-probs are of its logits.
    assert z.isfinite().sum(1)[[0, 1, 3]].equal(expected.kept[[0, 1, 3]].long())
    assert z[2].equal(step[0][2])
    assert draws.rlk_calls == 1


def test_a_row_without_a_token_is_marked_and_its_request_is_named() -> None:
    """As a GPU draws it: the next step begins with a token that exists."""
    sampler, step, _ = newer_step("0.32", 3)
    sample = newer_sampling._sampling(
        lambda *_: torch.tensor([5, NO_TOKEN, NO_TOKEN]), newer_sampling.ROWS["0.32"]
    )
    assert sample(sampler, *step)[0].tolist() == [5, 0, 0]
    marks = sampler.rlk_without_token
    # The second row is that of a prompt's chunk.
    output = SimpleNamespace(req_ids=["a", "b", "c"], sampled_token_ids=[[5], [], [0]])
    read = newer_sampling._raising(lambda _: output)
    with pytest.raises(NoDistribution, match="the logits of request c have NaN"):
        read(SimpleNamespace(rlk_without_token=marks))
    assert read(SimpleNamespace(rlk_without_token=None)) is output
    with pytest.raises(NoDistribution, match="of request b, and of 1 more requests have NaN"):
        refuse_marked(output.req_ids, marks.tolist())


@pytest.mark.parametrize("slots", [[5, 0, -1, -1], [5, 0]], ids=["no slot", "fewer slots"])
def test_rows_of_padding_reach_no_cache(slots: list[int]) -> None:
    """A batch padded to the size of a CUDA graph: its last rows are nobody's."""
    cache = torch.full((2, 3, 4, 16), 7.0)  # blocks, heads, places, keys beside values
    key, value = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    VllmAttention().do_kv_cache_update(None, key, value, cache, torch.tensor(slots))
    k, v = keys_and_values(cache)
    for row, slot in ((0, 5), (1, 0)):
        assert torch.equal(k[slot // 4, slot % 4], key[row])
        assert torch.equal(v[slot // 4, slot % 4], value[row])
    assert int((cache != 7.0).sum()) == 2 * 3 * 16


def test_each_cache_is_written_that_is_given() -> None:
    """Also one instead of another, and one object whose memory is another."""
    attention, slot = VllmAttention(), torch.tensor([1])
    caches = [torch.zeros(1, 1, 4, 16) for _ in range(2)]
    for number in (0, 1, 0, 1):
        key = torch.randn(1, 1, 8)
        attention.do_kv_cache_update(None, key, key, caches[number], slot)
        assert torch.equal(caches[number][0, 0, 1], key.flatten().repeat(2))
    caches[1].set_(torch.zeros(1, 1, 4, 16))
    attention.do_kv_cache_update(None, key, key, caches[1], slot)
    assert torch.equal(caches[1][0, 0, 1], key.flatten().repeat(2))
