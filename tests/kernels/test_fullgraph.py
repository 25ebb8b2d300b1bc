"""torch.compile(fullgraph=True) traces every public operator: no graph break, the same bits.

The graphs run eagerly (aot_eager): what is shown is that they can be traced, not what becomes of
them.
"""

import pytest
import rlk_kernels as rk
import torch

T, H, V = 6, 16, 40


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


X, W, HEAD, GAIN = rand(T, H), rand(H, H, seed=1), rand(V, H, seed=2), rand(H, seed=3)
Q, K = rand(T, 4, 8), rand(T, 2, 8, seed=4)
IDS, CU, ONE = torch.arange(T) % V, torch.tensor([0, 4, T]), torch.arange(T + 1)
EXPERTS = rand(5, H, H)
CACHE, TABLE = rand(8, 2, 2, 8), torch.arange(T)[:, None] % 8
MASK, OLD = (torch.arange(T) > 1).long(), rand(1, T)


def written(x):
    k_cache, v_cache = CACHE.clone(), CACHE.clone()
    rk.write_kv_cache(x.detach().view(T, 2, 8), K, k_cache, v_cache, IDS)
    return k_cache + v_cache


def sparse(x):
    """A sparse layer, by all of its operators."""
    weights, ids = rk.route(rk.linear(x, HEAD[:5], out_dtype=torch.float32), 2)
    groups = rk.group_by_expert(ids, 5)
    rows = rk.grouped_linear(x, EXPERTS, groups)
    return rk.combine_experts(rk.grouped_linear(rows, EXPERTS, groups), weights, ids, 5)


def in_one(x):
    """A layer's first product and its activation, which no gradient passes."""
    _, ids = rk.route(rk.linear(x, HEAD[:5], out_dtype=torch.float32), 2)
    groups = rk.group_by_expert(ids, 5)
    return rk.grouped_swiglu(x.detach(), EXPERTS, groups)


OPERATORS = {
    "grouped_swiglu": in_one,
    "route": lambda x: rk.route(x, 2, normalize=False)[0],
    "route_corrected": lambda x: rk.route_corrected(
        x, GAIN.detach().float(), 2, groups=4, top_groups=2, scale=2.5
    )[0],
    "combine_experts, grouped_linear, group_by_expert": sparse,
    "linear": lambda x: rk.linear(x, W, GAIN),
    "rms_norm": lambda x: rk.rms_norm(x, GAIN, 1e-6),
    "rms_norm, residual": lambda x: torch.cat(rk.rms_norm(x, GAIN, 1e-6, residual=x)),
    "rope": lambda x: torch.cat(rk.rope(x.view(T, 2, 8), K, IDS, theta=1e4), 1),
    "norm_rope": lambda x: torch.cat(
        rk.norm_rope(x.view(T, 2, 8), K, GAIN[:8], GAIN[8:], IDS, eps=1e-6, theta=1e4), 1
    ),
    "swiglu": lambda x: rk.swiglu(x, x * 2),
    "embedding": lambda x: rk.embedding(IDS, HEAD) + x,
    "attention": lambda x: rk.attention(Q, x.view(T, 2, 8), K, CU, CU),
    "paged_attention": lambda x: rk.paged_attention(
        x.detach().view(T, 2, 8), CACHE, CACHE, TABLE, torch.ones(T).int(), cu_seqlens_q=ONE
    ),
    "write_kv_cache": written,
    "logp, with the largest": lambda x: rk.logp(x, IDS % H, token_ids=IDS[:, None] % H, top_k=2)[1],
    "logp": lambda x: rk.logp(x, IDS % H),
    "linear_logp": lambda x: rk.linear_logp(x, HEAD, IDS),
    "group_advantages": lambda x: rk.group_advantages(x[:, 0], 3),
    "linear_grpo_loss": lambda x: rk.linear_grpo_loss(
        x[None], HEAD, IDS[None], OLD, torch.ones(1), MASK[None], ref_logp=OLD, beta=0.1
    )[0],
    "linear_grpo_loss, packed": lambda x: rk.linear_grpo_loss(
        x, HEAD, IDS, None, IDS + 1.0, MASK, cu_seqlens=CU
    )[1]["k3"] + rk.linear_grpo_loss(x, HEAD, IDS, None, IDS + 1.0, MASK, cu_seqlens=CU)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_traced_whole(name, backend, monkeypatch):
    monkeypatch.setenv("RLK_BACKEND", backend)
    run = OPERATORS[name]
    leaves = [X.clone().requires_grad_() for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    plain, traced = run(leaves[0]), compiled(leaves[1])
    assert torch.equal(plain, traced)
    if plain.requires_grad:
        up = rand(plain.numel(), seed=9).view(plain.shape)
        grads = [
            torch.autograd.grad(y, x, up)[0] for y, x in zip((plain, traced), leaves, strict=True)
        ]
        assert torch.equal(*grads)
        assert bool(grads[0].isfinite().all())


def test_a_graph_break_is_noticed():
    def broken(x):
        torch._dynamo.graph_break()
        return 2 * x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, fullgraph=True, backend="eager")(X)


def test_all_of_them_are_here():
    about = {"backend_calls", "last_backend", "reset_backend_calls"}
    about |= {"warm_up", "warm_up_experts", "warm_up_paged_attention"}
    about.add("paged_schedule")  # called outside of what is compiled
    # they wait for the sequences' lengths
    about |= {"policy_loss", "linear_policy_loss", "dpo_loss"}
    errors = {n for n in rk.__all__ if isinstance(getattr(rk, n), type)}
    sparse_parts = {"grouped_linear", "group_by_expert"}
    # a custom backward of torch, in float64: outside of what is compiled
    losses = {"load_balancing_loss", "router_z_loss"}
    inside = {name.partition(",")[0] for name in OPERATORS} | sparse_parts
    assert inside == set(rk.__all__) - about - errors - losses
