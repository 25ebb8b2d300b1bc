"""What users give the operators: strided and empty inputs, transforms of torch.func, gradients of
gradients. Each is computed right or refused by name."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand

T, H, V = 5, 13, 37


def of(*shape, seed=0):
    return rand(*shape, dtype=torch.float32, device="cpu", seed=seed)


X, W, HEAD, BIAS, GAIN = of(T, H), of(V, H), of(V, H, seed=1), of(V), of(H)
Q, K = of(T, 4, 8), of(T, 2, 8, seed=1)
CU, IDS = torch.tensor([0, 2, T]), torch.arange(T)
CACHE, TABLE, LENS = of(4, 4, 2, 8), torch.tensor([[0, 1], [2, 3]]), torch.tensor([7, 5])

OPERATORS = {
    "linear": (lambda x, **o: rk.linear(x, W, BIAS, **o), X),
    "rms_norm": (lambda x, **o: rk.rms_norm(x, GAIN, 1e-6, **o), X),
    "rope": (lambda x, **o: rk.rope(x, K, IDS, theta=1e4, **o)[0], Q),
    "norm_rope": (
        lambda x, **o: rk.norm_rope(x, K, GAIN[:8], GAIN[:8], IDS, eps=1e-6, theta=1e4, **o)[0], Q,
    ),
    "swiglu": (lambda x, **o: rk.swiglu(x, X, **o), X),
    "embedding": (lambda x, **o: rk.embedding(IDS, x, **o), W),
    "attention": (lambda x, **o: rk.attention(x, K, K, CU, CU, **o), Q),
    "attention, softcap": (lambda x, **o: rk.attention(x, K, K, CU, CU, softcap=5.0, **o), Q),
    "logp": (lambda x, **o: rk.logp(x, IDS, **o), W[:T]),
    "linear_logp": (lambda x, **o: rk.linear_logp(x, HEAD, IDS, **o), X),
    "linear_grpo_loss": (
        lambda x, **o: rk.linear_grpo_loss(
            x, HEAD, IDS, None, CU[1:] * 1.0, IDS, cu_seqlens=CU, **o
        )[0], X,
    ),
}  # fmt: skip
ONCE = OPERATORS.keys() - {"rope"}  # whose gradient is a rotation, which has one


@pytest.mark.parametrize("name", OPERATORS)
def test_transforms_that_differentiate_are_refused(name, backend):
    """Forward mode gave zeros for tangents, and nobody said so."""
    run, x = OPERATORS[name]

    def total(x):
        return run(x, backend=backend).sum()

    for transformed in (
        lambda: torch.func.grad(total)(x),
        lambda: torch.func.jvp(total, (x,), (x,)),
        lambda: torch.func.grad(lambda x: torch.vmap(total)(x).sum())(torch.stack([x, x])),
    ):
        with pytest.raises(NotImplementedError, match=r"rlk::|linear_grpo_loss"):
            transformed()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right_or_refused(name, backend):
    run, x = OPERATORS[name]
    rows = torch.stack([x, 2 * x])
    if name == "linear_grpo_loss":
        with pytest.raises(NotImplementedError, match=name):
            torch.vmap(lambda x: run(x, backend=backend))(rows)
        return
    mapped = torch.vmap(lambda x: run(x, backend=backend))(rows)
    assert torch.equal(mapped, torch.stack([run(x, backend=backend) for x in rows]))


@pytest.mark.parametrize("name", sorted(ONCE))
def test_gradients_of_gradients_are_refused_by_name(name, backend):
    run, x = OPERATORS[name]
    x = x.clone().requires_grad_()
    y = run(x, backend=backend)
    up = torch.ones_like(y).requires_grad_()
    (grad,) = torch.autograd.grad(y, x, up, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"gradients of|twice"):
        grad.square().sum().backward()


def test_paged_attention_has_no_gradient_and_says_so(backend):
    options = {"cu_seqlens_q": torch.tensor([0, 2, T]), "backend": backend}
    q = Q.clone().requires_grad_()
    for more in ({}, {"softcap": 5.0}):
        y = rk.paged_attention(q, CACHE, CACHE, TABLE, LENS, **options, **more)
        with pytest.raises(NotImplementedError, match="paged_attention: it has no gradient"):
            y.sum().backward()
        with pytest.raises(ValueError, match="no_grad"):
            rk.paged_attention(q, CACHE, CACHE, TABLE, LENS, out=Q.clone(), **options, **more)
        with torch.no_grad():
            out = torch.empty_like(Q)
            rk.paged_attention(q, CACHE, CACHE, TABLE, LENS, out=out, **options, **more)
        assert torch.equal(out, y)


def test_linear_reads_a_bias_of_any_stride(backend):
    dense = rk.linear(X, W, BIAS, backend=backend)
    for bias in (torch.stack([BIAS, -BIAS], 1)[:, 0], torch.cat([BIAS, BIAS])[V:]):
        assert torch.equal(rk.linear(X, W, bias, backend=backend), dense)
    one = BIAS[:1].expand(V)
    assert torch.equal(
        rk.linear(X, W, one, backend=backend), rk.linear(X, W, one.clone(), backend=backend)
    )


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (3, 0), (0, 0)])
def test_linear_without_rows_or_columns(backend, rows, columns):
    x, weight, bias = of(rows, H), of(columns, H), of(columns)
    out = torch.empty(rows, columns)
    assert rk.linear(x, weight, bias, out=out, backend=backend) is out
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    rk.linear(*leaves, backend=backend).sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves)


def test_an_id_outside_of_the_table_is_named():
    for ids in ([0, -1], [V, 1]):
        with pytest.raises(IndexError, match=r"embedding: ids .* 0\.\.36"):
            rk.embedding(torch.tensor(ids), W, backend="torch")


def test_a_norm_takes_a_whole_number_for_eps(backend):
    """Triton makes a constant of a 1, and a kernel that is launched again would keep it."""
    normed = rk.rms_norm(X, GAIN, 1, backend=backend)
    assert torch.equal(normed, rk.rms_norm(X, GAIN, 1.0, backend=backend))
    assert torch.equal(normed, rk.rms_norm(X, GAIN, torch.tensor(1.0), backend=backend))


@pytest.mark.parametrize("which", ["target", "mask", "advantages", "old_logp", "ref_logp"])
def test_a_table_that_is_transposed_is_refused(which):
    tables = dict.fromkeys(["target", "mask", "advantages", "old_logp", "ref_logp"], IDS[:4])
    tables = {name: x.view(1, 4) for name, x in tables.items()}

    def loss():
        first = (tables["target"], tables["old_logp"], tables["advantages"], tables["mask"])
        return rk.linear_grpo_loss(X[None, :4], HEAD, *first, ref_logp=tables["ref_logp"])

    loss()
    tables[which] = tables[which].mT
    with pytest.raises(rk.UnsupportedShape, match=which):
        loss()


@pytest.mark.parametrize("bounds", [[0.0, 2.0, 5.0], [False, True]])
def test_bounds_that_are_no_integers_are_refused(bounds):
    rows = X[: 5 if bounds[-1] == 5 else 1]
    ids = IDS[: len(rows)]
    with pytest.raises(rk.UnsupportedShape, match="integers"):
        rk.linear_grpo_loss(rows, HEAD, ids, None, ids * 1.0, ids, cu_seqlens=torch.tensor(bounds))
