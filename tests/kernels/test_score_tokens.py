"""Log-probs from hidden states, in a model of transformers: the bits of those from logits, without
logits in memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import rlk_kernels
import torch
from gloo_ranks import only_rank
from hf_models import small_model
from rlk_kernels.integrations import hf, profile
from rlk_kernels.integrations.errors import NotSupported
from torch.autograd.graph import saved_tensors_hooks

VOCABULARY = 100
IDS = torch.randint(2, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
MASK[2, 15:] = 0
COUNTED = (MASK.cumsum(-1) - 1).clamp(min=0)
REAL = (MASK[:, 1:] & MASK[:, :-1]).bool()


@pytest.fixture(scope="module")
def model() -> Any:
    model = small_model(vocab_size=VOCABULARY)
    hf.use_kernels(model.to(torch.bfloat16))
    return model


@pytest.fixture
def one_rank() -> Iterator[None]:
    with only_rank():
        yield


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False, **inputs).logits[:, :-1]


def from_logits(model: Any, temperature: float = 1.0, **inputs: Any) -> torch.Tensor:
    rows = logits(model, **inputs).flatten(0, 1)
    return hf.token_logprobs(rows, IDS[:, 1:].flatten(), temperature).view(3, 16)


def grads(model: Any, scores: torch.Tensor) -> list[torch.Tensor]:
    up = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (scores * up).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_bits_are_those_of_logits(model: Any, temperature: float) -> None:
    actual, entropy = hf.score_tokens(
        model, IDS, MASK, temperature=temperature, return_entropy=True
    )
    inputs = {"attention_mask": MASK, "position_ids": COUNTED}
    expected = from_logits(model, temperature, **inputs)
    assert actual.shape == entropy.shape == (3, 16)
    assert actual[REAL].equal(expected[REAL])
    assert bool((actual[~REAL] == 0).all())
    exact = torch.log_softmax(logits(model, **inputs).double() / temperature, -1)
    assert ((entropy + (exact.exp() * exact).sum(-1)).abs() < 1e-5)[REAL].all()
    last = hf.score_tokens(model, IDS, MASK, last=4, temperature=temperature)
    assert last.equal(actual[:, -4:])
    if temperature != 1.0:  # of a reciprocal they are others
        assert not from_logits(model, 1.0, **inputs).equal(expected)


def test_gradients_are_those_of_the_operator(model: Any) -> None:
    hidden = model.model(IDS, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    target = IDS[:, 1:].flatten()
    direct = rlk_kernels.linear_logp(hidden, model.lm_head.weight, target, return_entropy=True)
    expected = grads(model, torch.stack(direct, -1).view(3, 16, 2))
    both = torch.stack(hf.score_tokens(model, IDS, return_entropy=True), -1)
    assert all(a.equal(b) for a, b in zip(grads(model, both), expected, strict=True))
    divided = grads(model, hf.score_tokens(model, IDS, temperature=0.5))
    of_logits = grads(model, from_logits(model, 0.5))
    assert all(a.equal(b) for a, b in zip(divided, of_logits, strict=True))


def test_no_logits_are_held(model: Any) -> None:
    """What the forward keeps for the backward; the other way keeps [tokens, vocabulary]."""

    def held(run: Any) -> bool:
        kept: list[torch.Size] = []
        with saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
            run()
        return any(s[-1:] == (VOCABULARY,) and s.numel() >= 48 * VOCABULARY for s in kept)

    assert held(lambda: from_logits(model))
    assert not held(lambda: hf.score_tokens(model, IDS, return_entropy=True))
    assert not held(lambda: hf.score_tokens(model, IDS, temperature=0.7))


def test_sequences_in_one_row_do_not_predict_each_other(model: Any) -> None:
    packed = torch.cat([IDS[0, :7], IDS[1, :10]])[None]
    at = torch.cat([torch.arange(7), torch.arange(10)])[None]
    (row,) = hf.score_tokens(model, packed, position_ids=at)
    first = hf.score_tokens(model, IDS[:1, :7])[0]
    second = hf.score_tokens(model, IDS[1:2, :10])[0]
    assert row.equal(torch.cat([first, torch.zeros(1), second]))


def test_sequences_are_looked_for_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is waited for where they are."""
    from rlk_kernels.integrations.hf import score, sequences

    asked, packed_starts = [], sequences.packed_starts

    def counting(positions: torch.Tensor, batch: int) -> torch.Tensor:
        asked.append(packed_starts(positions, batch))
        return asked[-1]

    for module in (score, sequences):
        monkeypatch.setattr(module, "packed_starts", counting)
    at = torch.cat([torch.arange(7), torch.arange(10)])
    hf.score_tokens(model, IDS, position_ids=at.expand(3, -1))
    assert [found.tolist() for found in asked] == [[0, 7, 17, 24, 34, 41, 51]]


def test_a_sharded_model_and_a_compiled_one_have_the_same(model: Any, one_rank: None) -> None:
    from torch.distributed.fsdp import fully_shard

    expected = hf.score_tokens(model, IDS, MASK, return_entropy=True)
    gradients = grads(model, torch.stack(expected, -1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second asks for other targets of the same code
        actual = hf.score_tokens(compiled, IDS, MASK, return_entropy=True)
        assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))
        other = hf.score_tokens(compiled, IDS.flip(0), MASK.flip(0))
        assert other.flip(0).equal(expected[0])
    sharded = small_model(vocab_size=VOCABULARY).to(torch.bfloat16)
    hf.use_kernels(sharded)
    sharded.load_state_dict(model.state_dict())
    for module in (*sharded.model.layers, sharded):
        fully_shard(module)
    actual = hf.score_tokens(sharded, IDS, MASK, return_entropy=True)
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))
    whole = [g.full_tensor() for g in grads(sharded, torch.stack(actual, -1))]
    assert all(a.equal(b) for a, b in zip(whole, gradients, strict=True))
    hf.check(hf.operators(sharded))


def test_what_is_not_served_is_refused(model: Any) -> None:
    with pytest.raises(NotSupported, match="do not exclude the logits"):
        hf.score_tokens(small_model(), IDS % 60)
    with pytest.raises(ValueError, match="last=17 of 17 tokens"):
        hf.score_tokens(model, IDS, last=17)
    with pytest.raises(NotSupported, match="temperature=0"):
        hf.score_tokens(model, IDS, temperature=0.0)
    with pytest.raises(ValueError, match=r"input_ids\[B, L\] are needed, not \(17,\)"):
        hf.score_tokens(model, IDS[0])
    with pytest.raises(ValueError, match=r"attention_mask \(3, 16\) does not fit input_ids"):
        hf.score_tokens(model, IDS, MASK[:, 1:])
    # A mask that hides nothing would hide that a sequence's first token follows another sequence.
    starts = torch.tensor([0, 9, 17], dtype=torch.int32)
    positions = torch.cat([torch.arange(9), torch.arange(8)])[None]
    with pytest.raises(ValueError, match="pass one of them"):
        hf.score_tokens(model, IDS[:1], MASK[:1] | 1, positions, cu_seq_lens=starts)
    # Logits are logits again afterwards.
    assert logits(model).shape == (3, 16, VOCABULARY)


LIMITS: dict[str, Any] = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01}


@torch.no_grad()
def sampled(model: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids[3, 17 + count], the log-probs that the sampler said of the last ones)."""
    ids, logprobs = IDS, []
    for step in range(count):
        last = model(input_ids=ids, use_cache=False).logits[:, -1]
        where = torch.arange(3) + 40, torch.full((3,), 17 + step)
        drawn = rlk_kernels.sample(last, *where, **LIMITS)
        ids = torch.cat([ids, drawn.ids[:, None]], 1)
        logprobs.append(drawn.logprobs)
    return ids, torch.stack(logprobs, 1)


def test_truncated_log_probs_are_those_of_the_sampler(model: Any) -> None:
    ids, said = sampled(model, 6)
    scored = hf.score_tokens(model, ids, last=6, **LIMITS)
    assert scored.equal(said)
    for name, value in (("top_p", 1.0), ("temperature", 0.8), ("top_k", 2)):
        assert not hf.score_tokens(model, ids, last=6, **(LIMITS | {name: value})).equal(said)
    # The loss sees a ratio of exactly 1.
    mask = torch.ones(18, dtype=torch.long)
    cu = torch.tensor([0, 6, 12, 18], dtype=torch.int32)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    loss, metrics = rlk_kernels.policy_loss(
        scored.flatten(), said.flatten(), advantages, mask, cu_seqlens=cu
    )
    loss.backward()
    assert float(metrics["ratio_mean"]) == 1.0
    gradient = model.lm_head.weight.grad
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().sum()) > 0


def test_the_gradient_of_a_truncated_log_prob_is_over_the_kept_tokens() -> None:
    logits = torch.randn(20, 90, generator=torch.Generator().manual_seed(3)) * 3
    limits = profile.Truncation(30, 0.9, 0.01)
    drawn = rlk_kernels.sample(
        logits, torch.arange(20), torch.arange(20), temperature=0.7, **limits._asdict()
    )
    kept = rlk_kernels.kept_tokens(logits, temperature=0.7, **limits._asdict())
    one = logits.clone().requires_grad_()
    profile.logp(one, drawn.ids, 0.7, None, limits).sum().backward()
    exact = logits.double().requires_grad_()
    z = (exact / 0.7).masked_fill(~kept, -torch.inf)
    torch.log_softmax(z, -1).gather(1, drawn.ids[:, None]).sum().backward()
    assert one.grad is not None
    assert exact.grad is not None
    assert float((one.grad - exact.grad).abs().max()) < 1e-5
    assert bool((one.grad[~kept] == 0).all())
    dropped = (~kept).int().argmax(1)
    assert bool((profile.logp(logits, dropped, 0.7, None, limits) == -torch.inf).all())


def other(model: Any) -> Any:
    """A trainer whose logits are not those of the rollout."""
    changed = small_model(vocab_size=VOCABULARY).to(torch.bfloat16)
    changed.load_state_dict(model.state_dict())
    hf.use_kernels(changed)
    with torch.no_grad():
        changed.lm_head.weight.mul_(1.05)
    return changed


def test_recorded_kept_tokens_are_those_of_the_log_prob_and_of_its_gradient(model: Any) -> None:
    ids, said = sampled(model, 6)
    with torch.no_grad():
        rows = model(input_ids=ids, use_cache=False).logits[:, -7:-1]
    kept = rlk_kernels.kept_tokens(rows.flatten(0, 1), **LIMITS).view(3, 6, VOCABULARY)
    heat = LIMITS["temperature"]
    scored = hf.score_tokens(model, ids, last=6, temperature=heat, kept=kept)
    assert scored.equal(said)
    trainer = other(model)
    limited = hf.score_tokens(trainer, ids, last=6, **LIMITS)
    replayed = hf.score_tokens(trainer, ids, last=6, temperature=heat, kept=kept)
    assert bool(replayed.isfinite().all())
    assert not replayed.equal(limited)
    logits = trainer(input_ids=ids, use_cache=False).logits[:, -7:-1]
    z = (logits.float() / heat).masked_fill(~kept, -torch.inf)
    exact = torch.log_softmax(z.double(), -1).gather(-1, ids[:, -6:, None])[..., 0]
    assert float((replayed - exact).detach().abs().max()) < 1e-5
    ours, truth = (grads(trainer, x.float())[-1].double() for x in (replayed, exact))
    assert float((ours - truth).norm() / truth.norm()) < 1e-2
    # A row of which nothing was recorded keeps all tokens.
    nothing = kept.clone()
    nothing[:, 2] = False
    partly = hf.score_tokens(trainer, ids, last=6, temperature=heat, kept=nothing)
    free = hf.score_tokens(trainer, ids, last=6, temperature=heat)
    assert partly[:, 2].equal(free[:, 2])
    assert partly[:, 3:].equal(replayed[:, 3:])
    # A sampled token that is not among the recorded ones belongs to another row.
    wrong = kept.roll(1, 1)
    assert bool((hf.score_tokens(trainer, ids, last=6, temperature=heat, kept=wrong) < -1e9).any())


def test_kept_tokens_that_do_not_fit_are_refused(model: Any) -> None:
    kept = torch.ones(3, 16, VOCABULARY, dtype=torch.bool)
    every = hf.score_tokens(model, IDS, kept=kept)
    assert every.equal(from_logits(model))
    with pytest.raises(ValueError, match="pass one of them"):
        hf.score_tokens(model, IDS, kept=kept, top_p=0.9)
    with pytest.raises(ValueError, match=r"bool kept\[3, 4, V\] is needed, not torch.bool"):
        hf.score_tokens(model, IDS, last=4, kept=kept)
    with pytest.raises(ValueError, match=r"is needed, not torch.int64"):
        hf.score_tokens(model, IDS, kept=kept.long())
    with pytest.raises(ValueError, match=r"kept tokens \(48, 99\) do not fit logits \(48, 100\)"):
        hf.score_tokens(model, IDS, kept=kept[..., 1:])
    with pytest.raises(NotSupported, match="entropy of truncated"):
        hf.score_tokens(model, IDS, kept=kept, return_entropy=True)


def test_a_truncation_refuses_what_it_lacks(model: Any, one_rank: None) -> None:
    with pytest.raises(NotSupported, match="entropy of truncated"):
        hf.score_tokens(model, IDS, return_entropy=True, top_p=0.9)
    with pytest.raises(ValueError, match="top_p"):
        hf.score_tokens(model, IDS, top_p=1.5)
    with pytest.raises(NotSupported, match="temperature=0"):
        hf.score_tokens(model, IDS, temperature=0.0, top_k=3)
