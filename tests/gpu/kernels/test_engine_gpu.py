"""On a GPU: what engines ask for, launches past Triton's dispatch,
and NaN that stays where it is."""

import functools

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import same
from rlk_kernels import launching, memory, private_api
from rlk_kernels.matmul import product, self_check
from rlk_kernels.ops.attention import backward
from rlk_kernels.ops.attention import forward as attention
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.linear_logp import launch as linear_logp

HALF = torch.bfloat16


def rand(*shape, dtype=HALF):
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("layout", ["separate", "vLLM"])
def test_keys_and_values_lie_in_their_slots(layout):
    if layout == "separate":
        k_cache, v_cache = rand(2, 9, 16, 8, 128)
    else:
        k_cache, v_cache = rand(9, 8, 16, 256).transpose(1, 2).split(128, -1)
    expected = [x.clone() for x in (k_cache, v_cache)]
    qkv = rand(50, 48, 128)
    k, v = qkv[:, 32:40], qkv[:, 40:]
    slots = torch.randperm(9 * 16, device="cuda")[:50]
    slots[7] = -1
    for cache, x in zip(expected, (k, v), strict=True):
        at = slots[slots >= 0]
        cache[at // 16, at % 16] = x[slots >= 0]
    rk.write_kv_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("v", [1000, 151936])
def test_the_largest_logits_and_given_ids_have_the_bits_of_targets(v):
    x = rand(9, v)  # bf16: many are equal
    target = torch.arange(9, device="cuda") * 100 - 100
    token_ids = torch.randint(0, v, (9, 4), device="cuda")
    logps, id_logp, top, ids = rk.logp(x, target, token_ids=token_ids, top_k=20, temperature=0.7)
    assert torch.equal(logps, rk.logp(x, target, temperature=0.7))
    exact = torch.sort(x.cpu().float(), dim=-1, descending=True, stable=True).indices[:, :20]
    assert torch.equal(ids.cpu(), exact)
    for column, values in ((token_ids, id_logp), (ids, top)):
        for j in range(column.shape[1]):
            alone = rk.logp(x, column[:, j].contiguous(), temperature=0.7)
            assert torch.equal(values[:, j], alone)
    lone = rk.logp(x[3:4], target[3:4], token_ids=token_ids[3:4], top_k=20, temperature=0.7)
    whole = (logps, id_logp, top, ids)
    assert all(torch.equal(a, b[3:4]) for a, b in zip(lone, whole, strict=True))


def gradients(bad, run, hidden, weight, target):
    """Of hidden and weight, with `bad` in the rows of ignored targets."""
    leaves = [hidden.clone(), weight.clone()]
    leaves[0][target < 0] = bad
    leaves = [x.requires_grad_() for x in leaves]
    return torch.autograd.grad(run(*leaves), leaves)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("operator", ["linear_logp", "linear_grpo_loss", "logp"])
def test_what_an_ignored_token_holds_reaches_no_gradient(operator, bad):
    hidden, weight = rand(300, 256), rand(4096, 256)
    target = torch.randint(0, 4096, (300,), device="cuda")
    target[::7] = -100
    mask = (target >= 0).float()

    def run(hidden, weight):
        if operator == "linear_logp":
            return rk.linear_logp(hidden, weight, target).sum()
        if operator == "logp":
            return rk.logp(hidden, target % 256 * mask.long() - 100 * (1 - mask.long())).sum()
        loss, _ = rk.linear_grpo_loss(
            hidden[None], weight, target.clamp(min=0)[None], None, mask[:1] + 1, mask[None]
        )
        return loss

    if operator == "logp":
        leaf = hidden.clone()
        leaf[target < 0] = bad
        (outputs,) = torch.autograd.grad(run(leaf.requires_grad_(), None), leaf)
        assert bool(outputs.isfinite().all())
        assert not bool(outputs[target < 0].any())
        return
    clean = gradients(0.0, run, hidden, weight, target)
    outputs = gradients(bad, run, hidden, weight, target)
    assert bool(clean[1].any())
    assert same(outputs, clean)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_statistics_of_logits_are_compiled_and_kept_in_graphs(mode):
    hidden, weight = rand(300, 256), rand(4096, 256)
    target = torch.randint(0, 4096, (300,), device="cuda")

    def run(hidden):
        logp, lse, entropy = rk.linear_logp(
            hidden, weight, target, return_lse=True, return_entropy=True
        )
        return logp * 2, lse + entropy

    with torch.no_grad():
        expected = run(hidden)
        compiled = torch.compile(run, mode=mode, fullgraph=True)
        for _ in range(4):
            assert same(compiled(hidden), expected)


def test_no_two_outputs_of_an_operator_share_memory():
    hidden, weight = rand(300, 256), rand(4096, 256)
    ids = torch.randint(0, 4096, (300,), device="cuda")
    options = torch.float32, 0.0, 1.0, 1.0, True, "triton"
    outputs = torch.ops.rlk.linear_logp(hidden, weight, None, ids, *options)
    outputs += torch.ops.rlk.logp(weight, ids.new_zeros(4096), 0.0, 1.0, 1.0, "triton")
    assert len({x.untyped_storage().data_ptr() for x in outputs}) == len(outputs)


def test_a_loss_is_changed_in_place_like_any_tensor():
    hidden, weight = rand(1, 300, 256).requires_grad_(), rand(4096, 256)
    ids, ones = torch.randint(0, 4096, (1, 300), device="cuda"), torch.ones(1, 300, device="cuda")

    def run():
        return rk.linear_grpo_loss(hidden, weight, ids, None, ones[:, 0], ones)[0]

    expected = torch.autograd.grad(run() * 0.5, hidden)
    loss = run()
    loss *= 0.5
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], expected[0])


def calls(m):
    x, weight, gain, head = rand(m, 1024), rand(1024, 1024), rand(1024), rand(16384, 1024)
    q, k = rand(m, 8, 128), rand(m, 2, 128)
    cu, one = torch.tensor([0, m]).cuda().int(), torch.arange(m + 1).cuda().int()
    cache, lens = rand(64, 16, 2, 128), torch.full((m,), 64).cuda().int()
    tables = [torch.zeros(m, n, device="cuda").int() for n in (4, 2560)]
    ids, at = torch.arange(m).cuda() % 1024, torch.arange(m).cuda()
    schedule = rk.paged_schedule(q, cache, cache, tables[1], lens, cu_seqlens_q=one)
    return {
        "linear": lambda: rk.linear(x, weight),
        "linear, fp32": lambda: rk.linear(x, weight, gain, out_dtype=torch.float32),
        "rms_norm": lambda: rk.rms_norm(x, gain, 1e-6),
        "residual": lambda: rk.rms_norm(x, gain, 1e-6, residual=x)[1],
        "rope": lambda: rk.rope(q, k, at, theta=1e6)[1],
        "swiglu": lambda: rk.swiglu(x, x),
        "embedding": lambda: rk.embedding(ids, weight),
        "attention": lambda: rk.attention(q, k, k, cu, cu),
        "attention_backward": lambda: backward.backward(
            AttentionCall(q, k, k, cu, cu, None, True, 0.1, None, out=q),
            q[..., 0].T.float().contiguous(),
            q,
        )[0],
        "paged": lambda: rk.paged_attention(q, cache, cache, tables[0], lens, cu_seqlens_q=one),
        "split": lambda: rk.paged_attention(q, cache, cache, tables[1], lens, cu_seqlens_q=one),
        "given": lambda: rk.paged_attention(
            q, cache, cache, tables[1], lens, cu_seqlens_q=one, schedule=schedule
        ),
        "logp": lambda: rk.logp(x, ids),
        "top": lambda: rk.logp(x, ids, top_k=3)[1],
        "lone": lambda: rk.paged_attention(
            q[:1], cache, cache, tables[1][:1], lens[:1], cu_seqlens_q=cu[:1].new_tensor([0, 1])
        ),
        "linear_logp": lambda: rk.linear_logp(x, head, ids),
        "statistics": lambda: rk.linear_logp(
            x, head, ids, temperature=0.7, return_lse=True, return_entropy=True
        )[2],
        "linear_grpo_loss": lambda: rk.linear_grpo_loss(
            x[None], head, ids[None], None, one[:1].float() + 1, (one[None, :m] >= 0).float()
        )[0],
    }


def test_what_is_launched_again_is_what_triton_would_launch(monkeypatch):
    for module in (product, attention, backward, linear_logp):
        monkeypatch.setattr(module, "shape_cache", launching.shape_cache)
    monkeypatch.setattr(self_check, "tiles_agree", lambda *a, **k: True)
    launch_compiled, launched = launching.launch_compiled, []

    def ask_triton(compiled, kernel, grid, arguments, options, addressed):
        launched.append(kernel.__name__)
        assert kernel[grid](*arguments, **options) is compiled.kernel, kernel.__name__

    with torch.no_grad():
        for m in (1, 7, 16, 33, 2048):
            for name, call in calls(m).items():
                monkeypatch.setattr(launching, "launch_compiled", ask_triton)
                first, *_ = [call() for _ in range(3)]
                monkeypatch.setattr(launching, "launch_compiled", launch_compiled)
                assert torch.equal(call(), first), (name, m)
    assert len(set(launched)) >= 21, set(launched)


def _cases(m):
    """Calls that launch several kernels, and what they read."""
    q, cache, x, head = rand(m, 8, 128), rand(64, 16, 2, 128), rand(m, 1024), rand(16384, 1024)
    table = torch.randint(0, 64, (m, 2560), device="cuda").int()
    lens = torch.randint(1, 1000, (m,), device="cuda").int()
    one, ids = torch.arange(m + 1).cuda().int(), torch.arange(m).cuda()
    wide = q, cache, cache, table, lens

    def with_schedule():
        schedule = rk.paged_schedule(*wide, cu_seqlens_q=one)
        return rk.paged_attention(*wide, cu_seqlens_q=one, schedule=schedule, return_lse=True)

    return {
        "its own list": lambda: rk.paged_attention(*wide, cu_seqlens_q=one, return_lse=True),
        "a given list": with_schedule,
        "no lse": lambda: (rk.paged_attention(*wide, cu_seqlens_q=one),),
        "linear_logp": lambda: rk.linear_logp(x, head, ids, return_lse=True, return_entropy=True),
    }, (q, cache, x, head, table, lens)


@pytest.mark.parametrize("m", [1, 2, 33, 300])
def test_a_sequence_that_is_launched_again_reads_what_is_there_by_then(m, monkeypatch):
    for module in (attention, linear_logp):
        monkeypatch.setattr(module, "shape_cache", launching.shape_cache)
        # results lie where those before them lay
        monkeypatch.setattr(module, "empty", functools.cache(memory.empty))
    cases, inputs = _cases(m)
    others = _cases(m)[1]
    with torch.no_grad():
        for name, call in cases.items():
            for _ in range(3):  # compiled, recorded, launched again
                call()
            for x, other in zip(inputs, others, strict=True):
                x.add_(1) if x.dtype == torch.int32 and x.dim() == 1 else x.copy_(other)
            with monkeypatch.context() as replaying:
                replaying.setattr(launching, "Recording", _never)
                outputs = [x.clone() for x in call()]
            with monkeypatch.context() as running:
                running.setattr(private_api, "REPLAY", False)
                assert same(outputs, call()), name


def _never(*_):
    raise AssertionError("the call's own code ran")
