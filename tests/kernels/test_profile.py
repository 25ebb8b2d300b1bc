"""PROFILE.md, line by line: the roundings that all engines share, against a computation in float64
that rounds where the page says so, and nowhere else."""

import math
import re
from pathlib import Path

import pytest
import rlk_kernels
import torch
from bf16_rows import BF16, once, rand
from kernel_suite import packed, paged_cache
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.finish import Finish
from rlk_kernels.integrations.rotary import NEEDED, NOT_FIXED, rotation
from rlk_kernels.ops.sample.draws import uniform

PAGE = Path(__file__).resolve().parents[2] / "kernels" / "rlk_kernels" / "PROFILE.md"
RANKS = Path(__file__).with_name("parallel")
"""Where the tests of what ranks share are."""
ELSEWHERE = (
    Path(__file__).with_name("test_profile_delta_net.py"),
    Path(__file__).with_name("test_profile_latent.py"),
    Path(__file__).parent / "ops/test_delta_net.py",
)
"""Where those of gated delta nets and of latent attention are."""


def twice(exact: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    """Rounded before it is multiplied as well: what the page says is not done."""
    return (once(exact).float() * then.float()).to(BF16)


def test_every_line_has_its_test() -> None:
    named = re.findall(r"`(test_\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    files = [*RANKS.rglob("test_*.py"), *ELSEWHERE]
    texts = "".join(path.read_text(encoding="utf-8") for path in files)
    elsewhere = set(re.findall(r"^def (test_\w+)", texts, re.MULTILINE))
    assert len(named) == 76
    assert set(named) <= {*globals(), *elsewhere}


def test_embed_copies() -> None:
    table, ids = rand(7, 5), torch.tensor([6, 0, 6])
    assert torch.equal(profile.embed(ids, table), table[ids])


def test_norm_rounds_once() -> None:
    x, weight = rand(40, 96), rand(96, seed=1) + 1
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert torch.equal(profile.norm(x, weight, 1e-6), once(normed * weight.double()))
    assert not torch.equal(profile.norm(x, weight, 1e-6), twice(normed, weight))
    # No rollout has one: vLLM's norms are of the model's dtype.
    for norm in (profile.norm, lambda *options: profile.add_norm(x, *options)):
        with pytest.raises(ValueError, match=r"a norm's weight in torch\.float32 is not supported"):
            norm(x, weight.float(), 1e-6)


def test_one_is_added_to_the_weight_in_fp32() -> None:
    x, weight = rand(40, 96), rand(96, seed=1, scale=0.1)
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    one_plus = profile.norm(x, weight, 1e-6, one_plus=True)
    assert torch.equal(one_plus, once(normed * (weight.double() + 1)))
    # The sum rounded to the model's dtype.
    assert not torch.equal(one_plus, profile.norm(x, weight + 1, 1e-6))
    y, total = profile.add_norm(x, x.flip(0), weight, 1e-6, one_plus=True)
    assert torch.equal(y, profile.norm(total, weight, 1e-6, one_plus=True))


def test_layer_norm_rounds_once() -> None:
    x, weight, bias = rand(40, 96, scale=3) + 2, rand(96, seed=1), rand(96, seed=2)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = normed * weight.double() + bias.double()
    assert torch.equal(profile.layer_norm(x, weight, bias, 1e-6), once(exact))
    # The product rounded before the bias is added.
    assert not torch.equal(
        profile.layer_norm(x, weight, None, 1e-6) + bias, profile.layer_norm(x, weight, bias, 1e-6)
    )
    with pytest.raises(NotSupported, match=r"a norm's weight in torch\.float32"):
        profile.layer_norm(x, weight.float(), bias, 1e-6)


def test_a_scale_of_the_embedding_is_rounded_first() -> None:
    from hf_models import small_model
    from rlk_kernels.integrations import hf

    model = small_model("Gemma", hidden_size=96, head_dim=32).to(BF16)
    hf.use_kernels(model)
    table, ids, scale = model.model.embed_tokens, torch.arange(9), torch.tensor(96**0.5)
    rows = profile.embed(ids, table.weight).double()
    assert torch.equal(table(ids), once(rows * scale.to(BF16).double()))
    assert not torch.equal(table(ids), once(rows * scale.double()))


def test_the_norm_reads_the_rounded_residual() -> None:
    x, stream, weight = rand(40, 96), rand(40, 96, seed=1, scale=30), rand(96, seed=2)
    y, total = profile.add_norm(x, stream, weight, 1e-6)
    assert torch.equal(total, x + stream)
    assert torch.equal(y, profile.norm(x + stream, weight, 1e-6))
    unrounded = x.double() + stream.double()
    normed = unrounded * (unrounded.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert not torch.equal(y, once(normed * weight.double()))


def test_a_multiplied_branch_is_rounded_before_it_is_added() -> None:
    from hf_models import small_model
    from rlk_kernels.integrations import hf

    model = small_model("Granite", embedding_multiplier=0.7, residual_multiplier=0.3).to(BF16)
    hf.use_kernels(model)
    layer, seen = model.model.layers[0], {}
    for name in ("self_attn", "mlp", "post_attention_layernorm"):
        layer.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: (args, out)})
        )
    layer.register_forward_hook(lambda _, args, out: seen.update(layer=(args, out)))
    ids = torch.arange(9)[None]
    model(ids, use_cache=False)
    ((stream,), out), ((mid,), _) = seen["layer"], seen["post_attention_layernorm"]
    assert torch.equal(stream, once(profile.embed(ids, model.model.embed_tokens.weight) * 0.7))
    for before, branch, after in (
        (stream, seen["self_attn"][1][0], mid),
        (mid, seen["mlp"][1], out),
    ):
        assert torch.equal(after, before + once(branch.double() * 0.3))
        assert not torch.equal(after, once(before.double() + branch.double() * 0.3))


def test_linear_rounds_once() -> None:
    x, weight = rand(33, 100), rand(21, 100, seed=1)
    assert torch.equal(profile.linear(x, weight), once(x.double() @ weight.double().T))


def test_a_bias_is_added_before_rounding() -> None:
    x, weight, bias = rand(33, 100), rand(21, 100, seed=1), rand(21, seed=2)
    exact = x.double() @ weight.double().T
    actual = profile.linear(x, weight, bias)
    assert torch.equal(actual, once(exact + bias.double()))
    assert not torch.equal(actual, once(exact) + bias)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32768}
ROPES: dict[str, dict] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": LLAMA3,
    "proportional": {
        **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "proportional, whole": {"rope_type": "proportional", "rope_theta": 1e6},
    "yarn": YARN,
    "yarn, whole numbers": YARN | {"rope_theta": 1000000, "factor": 40},
    "yarn, short": YARN | {"original_max_position_embeddings": 32},
    "yarn, another ramp": YARN | {"beta_fast": 16, "beta_slow": 2.0, "truncate": False},
    "yarn, a step": YARN | {"beta_fast": 1, "truncate": False},
    "yarn, scaled": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, half scaled": YARN | {"mscale": 0.7},
    "yarn, given": YARN | {"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, unscaled": YARN | {"factor": 1.0},
}


def of_transformers(rope: dict, width: int) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=width, rope_parameters=dict(rope), max_position_embeddings=131072)
    make = ROPE_INIT_FUNCTIONS.get(rope["rope_type"])
    return (make or LlamaRotaryEmbedding.compute_default_rope_parameters)(config)


def test_an_adapter_rounds_where_the_page_says() -> None:
    x, weight, a, b = rand(40, 96), rand(64, 96, seed=1), rand(8, 96, seed=2), rand(64, 8, seed=3)
    a_master, scale = a.float() + 2.0**-20, torch.tensor([0.3])
    base = profile.linear(x, weight)
    y = profile.add_lora(base, x, a_master[None], b[None], scale)

    h = once(x.double() @ a.double().T)
    product = (h.double() @ b.double().T).float()
    wanted = (base.float() + scale * product).to(BF16)
    assert torch.equal(y, wanted)
    # What is not done: a scale that is folded into B, a product that is rounded, h that is not,
    # and one rounding of all.
    folded = (base.float() + (h.double() @ (b * 0.3).double().T).float()).to(BF16)
    rounded = base + (product.to(BF16) * 0.3)
    unrounded = x.double() @ a.double().T @ b.double().T
    at_once = once(x.double() @ weight.double().T + scale.double() * (h.double() @ b.double().T))
    for other in (folded, rounded, (base.float() + scale * unrounded.float()).to(BF16), at_once):
        assert not torch.equal(y, other)


def test_a_row_without_an_adapter_is_the_projections_own() -> None:
    x, a, b = rand(5, 96), rand(2, 8, 96, seed=2), rand(2, 64, 8, seed=3)
    base, slots = torch.full((5, 64), -0.0, dtype=BF16), torch.tensor([-1, 0, 1, 2, 0])
    for none in (a, torch.zeros_like(a)):
        y = profile.add_lora(base, x, none, b, torch.tensor([2.0, 0.0]), slots)
        kept = torch.tensor([0, 2, 3])
        assert torch.equal(y[kept].view(torch.int16), base[kept].view(torch.int16))
        assert not bool(torch.signbit(y[1]).all())


@pytest.mark.parametrize("width", [32, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str, width: int) -> None:
    theirs, _ = of_transformers(ROPES[name], width)
    assert torch.equal(rotation(ROPES[name], width)[0], theirs)


def test_the_factor_is_that_of_transformers() -> None:
    actual = {name: rotation(rope, 64)[1] for name, rope in ROPES.items()}
    for name, scaling in actual.items():
        _, theirs = of_transformers(ROPES[name], 64)
        # A number beside a tensor is rounded to fp32 before they are multiplied.
        assert (1.0 if scaling is None else scaling) == torch.tensor([theirs]), name
    scaled = {name: float(s) for name, s in actual.items() if s is not None}
    assert len(scaled) == 8
    assert scaled["yarn"] == pytest.approx(0.1 * math.log(4) + 1)
    assert len(set(scaled.values())) == 4


def test_a_rotation_does_not_follow_the_default_dtype() -> None:
    """vLLM sets it while it makes a model."""
    before = torch.get_default_dtype()
    for rope in ROPES.values():
        expected = rotation(rope, 64)
        torch.set_default_dtype(BF16)
        try:
            actual = rotation(rope, 64)
        finally:
            torch.set_default_dtype(before)
        for a, b in zip(actual, expected, strict=True):
            assert (a is b is None) or (a.dtype == torch.float32 and torch.equal(a, b))


def test_an_alpha_multiplies_theta_once_as_in_transformers() -> None:
    """Hunyuan names this kind of rope `dynamic`."""
    from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan

    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    config = hunyuan.HunYuanDenseV1Config(**sizes, rope_parameters=rope)
    frequencies, factor = rotation(rope, 32)
    assert factor is None
    assert torch.equal(frequencies, hunyuan.HunYuanDenseV1RotaryEmbedding(config).inv_freq)
    assert not torch.equal(frequencies, rotation(rope | {"rope_type": "default"}, 32)[0])


@pytest.mark.parametrize("kind", [*NOT_FIXED, "mrope"])
def test_another_rope_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type={kind} is not supported") as error:
        rotation({"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}, 32)
    assert ("the longest sequence of a batch" in str(error.value)) == (kind in NOT_FIXED)


@pytest.mark.parametrize("kind", NEEDED)
def test_a_scaled_rope_without_what_it_needs_is_refused(kind: str) -> None:
    for name in NEEDED[kind]:
        options = dict.fromkeys(NEEDED[kind], 2.0) | {"rope_type": kind, "rope_theta": 1e4}
        with pytest.raises(ValueError, match=f"without a {name}"):
            rotation(options | {name: None}, 32)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("name", ["default", "yarn"])
def test_the_table_is_rounded_and_the_rotation_once(name: str) -> None:
    q, k, at = rand(50, 3, 32), rand(50, 1, 32, seed=1), torch.arange(50) * 19
    inv_freq, scaling = rotation(ROPES[name], 32)
    angle = (at.float()[:, None] * inv_freq).double()
    wide = [t[:, None] for t in (angle.cos(), angle.sin())]
    if scaling is not None:
        wide = [(t.float() * scaling).double() for t in wide]
    cos, sin = (once(t) for t in wide)
    for x, actual in zip((q, k), profile.rope(q, k, at, inv_freq, scaling), strict=True):
        rotated = turned(x.double(), cos.double(), sin.double())
        # fp32 arithmetic may round to another neighbour where float64 is on the edge of two.
        assert (actual == once(rotated)).float().mean() > 0.999
        assert (actual == once(turned(x.double(), *wide))).float().mean() < 0.99
        assert (actual == turned(x, cos, sin)).float().mean() < 0.99, "each product rounded"


@pytest.mark.parametrize("size", [16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256])
def test_both_ways_to_write_the_scale_are_one(size: int) -> None:
    assert profile.float32(size**-0.5) == profile.float32(1 / size**0.5)


def test_prefill_and_paged_decode_are_one() -> None:
    q, k, v, cu_q, cu_k = packed([9, 300], [9, 300], 4, 2, 32, BF16, "cpu")
    whole = profile.attention(q, k, v, cu_q, cu_k, 32**-0.5)
    k_cache, v_cache, table, lengths = paged_cache(k, v, cu_k, page=16)
    last = cu_q[1:].long() - 1
    out = torch.empty(2, 4, 32, dtype=BF16)
    one = torch.arange(3, dtype=torch.int32)
    profile.paged_attention(q[last], k_cache, v_cache, table, lengths, one, 32**-0.5, None, out)
    assert torch.equal(out, whole[last])


def test_capped_scores_are_those_of_prefill_and_paged_decode() -> None:
    q, k, v, cu_q, cu_k = packed([9, 40], [9, 40], 4, 2, 32, BF16, "cpu")
    whole = profile.attention(q, k, v, cu_q, cu_k, 1.0, softcap=2.0)
    k_cache, v_cache, table, lengths = paged_cache(k, v, cu_k, page=16)
    out, paged = torch.empty_like(q), (table, lengths, cu_q, 1.0, None)
    profile.paged_attention(q, k_cache, v_cache, *paged, out, softcap=2.0)
    assert torch.equal(out, whole)
    for last, keys in ((8, slice(0, 9)), (48, slice(9, 49))):
        scores = k[keys, 0].double() @ q[last, 0].double()
        weights = torch.softmax(2 * torch.tanh(scores / 2), -1)
        assert torch.allclose(whole[last, 0].double(), weights @ v[keys, 0].double(), atol=1e-2)
        assert not torch.allclose(
            whole[last, 0].double(), scores.softmax(-1) @ v[keys, 0].double(), atol=1e-2
        )


def test_sinks_are_those_of_prefill_and_paged_decode() -> None:
    q, k, v, cu_q, cu_k = packed([9, 40], [9, 40], 4, 2, 32, BF16, "cpu")
    sinks = rand(4, seed=8) + 11
    whole = profile.attention(q, k, v, cu_q, cu_k, 1.0, window=7, sinks=sinks)
    k_cache, v_cache, table, lengths = paged_cache(k, v, cu_k, page=16)
    out, paged = torch.empty_like(q), (table, lengths, cu_q, 1.0, 7)
    profile.paged_attention(q, k_cache, v_cache, *paged, out, sinks=sinks)
    assert torch.equal(out, whole)
    for last, keys in ((8, slice(2, 9)), (48, slice(42, 49))):
        scores = k[keys, 0].double() @ q[last, 0].double()
        shares = torch.cat([scores, sinks[:1].double()]).softmax(-1)[:-1]
        assert torch.allclose(whole[last, 0].double(), shares @ v[keys, 0].double(), atol=1e-2)
        assert not torch.allclose(
            whole[last, 0].double(), scores.softmax(-1) @ v[keys, 0].double(), atol=1e-2
        )


def test_a_factor_of_the_position_is_rounded_first() -> None:
    from hf_models import small_model
    from rlk_kernels.integrations import hf
    from rlk_kernels.integrations.hf.attention import TemperedAttention

    positions, rope = torch.arange(0, 5000, 7), {"original_max_position_embeddings": 16}
    exact = 1 + 0.3 * torch.log1p((positions // 16).double())
    how = profile.temperature_of(rope | {"llama_4_scaling_beta": 0.3})
    factor = profile.query_scale(positions, *how, BF16)
    assert torch.equal(factor, once(exact))
    for some in (slice(3, 4), slice(90, 101)):
        assert torch.equal(profile.query_scale(positions[some], *how, BF16), factor[some])
    settings = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3}
    model = small_model("Ministral3", head_dim=32, rope_parameters=settings | rope).to(BF16)
    hf.use_kernels(model)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, TemperedAttention)
    query = rand(1, 2, len(positions), 32)
    tempered = attention.tempered(query, positions[None])
    assert torch.equal(tempered, once(query.double() * factor.double()[:, None]))
    for missing in (rope, settings):
        with pytest.raises(NotSupported, match="a number and a whole number are needed"):
            profile.temperature_of(missing)


def test_an_act_alone_rounds_once() -> None:
    x = rand(40, 96, scale=3)
    wide = x.double()
    assert torch.equal(profile.act_alone(x, "relu2"), once(wide.relu().square()))
    gelu = wide * torch.sigmoid(2 * (2 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    assert torch.equal(profile.act_alone(x, "gelu_tanh"), once(gelu))
    assert not torch.equal(profile.act_alone(x, "gelu_tanh"), torch.nn.functional.gelu(x))


def test_a_clamped_act_rounds_once() -> None:
    gate, up = rand(40, 96, scale=3), rand(40, 96, seed=1, scale=3)
    g, u = gate.double().clamp(max=2.0), up.double().clamp(-2.0, 2.0)
    exact = g * torch.sigmoid(1.702 * g) * (u + 1)
    assert torch.equal(profile.clamped_act(gate, up, 1.702, 2.0), once(exact))
    # As transformers rounds it, step by step.
    glu = gate.clamp(max=2.0) * torch.sigmoid(gate.clamp(max=2.0) * 1.702)
    stepwise = (up.clamp(-2.0, 2.0) + 1) * glu
    assert not torch.equal(profile.clamped_act(gate, up, 1.702, 2.0), stepwise)


def test_act_rounds_once() -> None:
    gate, up = rand(30, 64, scale=3), rand(30, 64, seed=1)
    silu = gate.double() / (1 + (-gate.double()).exp())
    assert torch.equal(profile.act(gate, up), once(silu * up.double()))
    assert not torch.equal(profile.act(gate, up), twice(silu, up))


def test_gelu_rounds_once() -> None:
    gate, up = rand(40, 96, scale=3), rand(40, 96, seed=1)
    wide = gate.double()
    # torch's own form, gate / 2 (1 + tanh), cancels where gate is far below 0.
    exact = wide * torch.sigmoid(2 * (2 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    gelu = torch.nn.functional.gelu(wide, approximate="tanh")
    assert torch.allclose(exact, gelu, rtol=0, atol=1e-14)
    assert torch.equal(profile.act(gate, up, "gelu_tanh"), once(exact * up.double()))
    assert not torch.equal(profile.act(gate, up, "gelu_tanh"), twice(exact, up))


def test_router_logits_are_the_sum() -> None:
    x, weight = rand(40, 96), rand(12, 96, seed=1)
    logits = profile.router(x, weight)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (x.double() @ weight.double().T).float())


def test_a_tie_goes_to_the_lowest_id() -> None:
    logits = (rand(200, 16) * 4).round().float()  # many are equal
    _, ids = profile.route(logits, 4, True)
    ties = 0
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        by_logit = sorted(range(16), key=lambda e: (-row[e], e))
        assert chosen == sorted(by_logit[:4])
        ties += row[by_logit[3]] == row[by_logit[4]]
    assert ties > 0


def test_routing_weights_are_fp32() -> None:
    logits = rand(40, 16, scale=3).float()
    for normalize in (True, False):
        weights, ids = profile.route(logits, 4, normalize)
        chosen = logits.double().gather(1, ids.long())
        over = chosen if normalize else logits.double()
        exact = (chosen - over.logsumexp(1, keepdim=True)).exp()
        assert weights.dtype == torch.float32
        assert bool(((weights - exact).abs() <= 3 * 2**-24 * exact).all())
        assert not torch.equal(weights, weights.to(BF16).float())


def corrected(logits: torch.Tensor, k: int, normalize: bool = True) -> tuple[torch.Tensor, ...]:
    """16 experts in 4 groups, of which the best 2 are taken."""
    bias = (rand(16, seed=8) * 4).round().float() / 16
    correction = profile.Correction(bias, 4, 2, 2.5)
    return *profile.route_corrected(logits, k, normalize, correction), bias


def test_a_corrected_choice_is_of_the_best_groups() -> None:
    logits = (rand(200, 16) * 2).round().float()  # many are equal
    _, ids, bias = corrected(logits, 4)
    scores = logits.double().sigmoid().float() + bias
    ties = 0
    for row, chosen in zip(scores.tolist(), ids.tolist(), strict=True):
        parts = torch.tensor(row).view(4, 4).sort(1, descending=True).values
        sums = (parts[:, 0] + parts[:, 1]).tolist()
        by_group = sorted(range(4), key=lambda g: (-sums[g], g))
        inside = [e for e in range(16) if e // 4 in by_group[:2]]
        by_score = sorted(inside, key=lambda e: (-row[e], e))
        assert chosen == sorted(by_score[:4])
        ties += sums[by_group[1]] == sums[by_group[2]] or row[by_score[3]] == row[by_score[4]]
    assert ties > 0


def test_corrected_weights_are_fp32() -> None:
    logits = rand(40, 16, scale=3).float()
    for normalize in (True, False):
        weights, ids, _ = corrected(logits, 4, normalize)
        chosen = logits.double().sigmoid().gather(1, ids.long())
        exact = 2.5 * chosen / (chosen.sum(1, keepdim=True) if normalize else 1.0)
        assert weights.dtype == torch.float32
        assert bool(((weights - exact).abs() <= 4 * 2**-24 * exact).all())
        assert not torch.equal(weights, weights.to(BF16).float())


def test_a_given_choice_is_weighed_as_the_routers_own() -> None:
    logits = rand(40, 16, scale=3).float()
    correction = profile.Correction(rand(16, seed=8).float(), 4, 2, 2.5)
    for normalize in (True, False):
        own, ids = profile.route(logits, 4, normalize)
        assert torch.equal(profile.weights_of(logits, ids, normalize), own)
        own, ids = profile.route_corrected(logits, 4, normalize, correction)
        assert torch.equal(profile.weights_of(logits, ids, normalize, correction), own)
        others = ((ids + torch.arange(4)) % 16).sort(1).values.int()
        for how in (None, correction):
            weights = profile.weights_of(logits, others, normalize, how)
            chosen = logits.double().gather(1, others.long())
            shares = chosen.exp() if how is None else chosen.sigmoid()
            over = shares.sum(1, keepdim=True) if normalize else 1.0
            if how is None and not normalize:
                over = logits.double().exp().sum(1, keepdim=True)
            exact = (1.0 if how is None else 2.5) * shares / over
            assert bool(((weights - exact).abs() <= 1e-6 * exact).all())
            assert not bool(((weights - own).abs() <= 1e-6 * own).all())


def test_the_shared_row_is_added_to_the_rounded_sum() -> None:
    routed, shared = rand(40, 64), rand(40, 64, seed=1)
    y = profile.add_shared(routed, shared)
    assert torch.equal(y, once(routed.double() + shared.double()))


def test_a_router_in_fp32_reads_widened_rows() -> None:
    x, weight = rand(40, 96), torch.randn(12, 96, generator=torch.Generator().manual_seed(1))
    logits = profile.router(x, weight)
    assert torch.equal(logits, (x.double() @ weight.double().mT).float())
    assert not torch.equal(logits, profile.router(x, weight.to(BF16)))


def test_a_corrected_softmax_is_for_the_choice_alone() -> None:
    logits = rand(60, 8).float()
    correction = torch.linspace(-0.2, 0.2, 8)
    how = profile.Correction(correction, 1, 1, 1.0, softmax=True)
    weights, ids = profile.route_corrected(logits, 3, True, how)
    shares = logits.double().softmax(-1)
    expected = (shares + correction).topk(3).indices.sort(-1).values
    assert torch.equal(ids.long(), expected)
    of_chosen = shares.gather(1, expected)
    exact = of_chosen / of_chosen.sum(-1, keepdim=True)
    assert bool(((weights - exact).abs() <= 1e-6 * exact).all())
    plain, uncorrected = profile.route(logits, 3, True)
    assert not torch.equal(uncorrected, ids)
    assert torch.equal(profile.weights_of(logits, uncorrected, True, how), plain)
    for some in (slice(3, 4), slice(10, 33)):
        part = profile.route_corrected(logits[some], 3, True, how)
        assert torch.equal(part[0], weights[some])
        assert torch.equal(part[1], ids[some])


def test_a_gated_row_is_rounded_before_it_is_added() -> None:
    x, gate, row = rand(40, 64), rand(1, 64, seed=1), rand(40, 64, seed=2)
    logit = profile.router(x, gate)
    gated = profile.gate_shared(logit, row)
    sigmoid = torch.sigmoid(logit.double())
    assert torch.equal(gated, once(sigmoid.float().double() * row.double()))
    # transformers and vLLM round the logit and the sigmoid to the model's dtype.
    assert not torch.equal(gated, torch.sigmoid(logit.to(BF16)) * row)
    for some in (slice(3, 4), slice(10, 33)):
        assert torch.equal(profile.gate_shared(logit[some], row[some]), gated[some])


def test_the_rest_of_a_head_is_copied() -> None:
    q, k, at = rand(9, 4, 32), rand(9, 2, 32, seed=1), torch.arange(9)
    inv_freq, _ = rotation({"rope_type": "default", "rope_theta": 1e4}, 16)
    turned = profile.rope(q, k, at, inv_freq)
    parts = profile.rope(q[..., :16].contiguous(), k[..., :16].contiguous(), at, inv_freq)
    for whole, part, x in zip(turned, parts, (q, k), strict=True):
        assert torch.equal(whole, torch.cat([part, x[..., 16:]], dim=-1))
    assert not torch.equal(turned[0][1:, :, :16], q[1:, :, :16])


def test_interleaved_pairs_are_neighbours() -> None:
    q, k, at = rand(9, 4, 32), rand(9, 2, 32, seed=1), torch.arange(9)
    inv_freq, _ = rotation({"rope_type": "default", "rope_theta": 1e4}, 32)
    neighbours = torch.arange(32).view(2, 16).t().flatten()

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., ::2], x[..., 1::2]], -1)

    halves = profile.rope(apart(q), apart(k), at, inv_freq)
    interleaved = profile.rope(q, k, at, inv_freq, interleaved=True)
    for actual, half in zip(interleaved, halves, strict=True):
        assert torch.equal(actual, half[..., neighbours])
    assert not torch.equal(interleaved[0], profile.rope(q, k, at, inv_freq)[0])


def test_a_row_of_an_expert_is_a_dense_row() -> None:
    x, gate_up, down = rand(30, 64), rand(6, 96, 64, seed=1), rand(6, 64, 48, seed=2)
    _, ids = profile.route(rand(30, 6, seed=3).float(), 2, True)
    groups = profile.expert_groups(ids, 6)
    both = profile.expert_linear(x, gate_up, groups)
    rows = profile.expert_linear(profile.act(*both.chunk(2, -1)), down, groups)
    for t, j in ((0, 0), (0, 1), (29, 1)):
        e = int(ids[t, j])
        gate, up = profile.linear(x[t : t + 1], gate_up[e]).chunk(2, -1)
        dense = profile.linear(profile.act(gate, up), down[e])
        assert torch.equal(rows[t, j], dense[0])


def test_the_rows_are_added_in_fp32_by_id() -> None:
    rows, ids = rand(40, 3, 64), torch.tensor([[0, 2, 5]] * 40, dtype=torch.int32)
    weights = rand(40, 3, seed=1).float().softmax(1)
    y = profile.combine(rows, weights, ids, 6)
    total = torch.zeros(40, 64)
    for j in range(3):
        total = total + rows[:, j].float() * weights[:, j, None]
    assert torch.equal(y, total.to(BF16))
    early = sum(((rows[:, j].float() * weights[:, j, None]).to(BF16) for j in range(3)), 0)
    assert not torch.equal(y, early)


def test_logits_are_the_sum() -> None:
    x, weight = rand(33, 100), rand(21, 100, seed=1)
    actual = profile.logits(x, weight)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, (x.double() @ weight.double().T).float())


def test_logp_is_of_fp32_logits() -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1)) * 4
    target = torch.arange(20)
    actual = profile.logp(logits, target)
    exact = torch.log_softmax(logits.double(), -1)[range(20), target]
    assert actual.dtype == torch.float32
    assert (actual.double() - exact).abs().max() < 1e-6
    assert not torch.equal(actual, profile.logp(logits.to(BF16), target))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_of_hidden_states_is_that_of_logits(temperature: float) -> None:
    x, weight, bias = rand(1100, 24), rand(90, 24, seed=1), rand(90, seed=2)
    target = torch.arange(1100) % 90
    z = profile.logits(x, weight, bias)
    actual = profile.logp_of_hidden(x, weight, bias, target, temperature=temperature, entropy=True)
    assert torch.equal(actual[:, 0], profile.logp(z, target, temperature))
    exact = torch.log_softmax(z.double() / temperature, -1)
    assert ((actual[:, 1] + (exact.exp() * exact).sum(-1)).abs() <= 1e-5).all()
    alone = profile.logp_of_hidden(x[7:8], weight, bias, target[7:8], temperature=temperature)
    assert torch.equal(alone[:, 0], actual[7:8, 0])


def test_capped_logits_have_the_log_probs_of_hidden_states() -> None:
    x, head, target, finish = rand(30, 64), rand(333, 64, seed=1), torch.arange(30), Finish(cap=9.0)
    capped, plain = profile.logits(x, head, finish=finish), profile.logits(x, head)
    assert torch.allclose(capped.double(), 9 * torch.tanh(plain.double() / 9), rtol=1e-6, atol=1e-6)
    for temperature in (1.0, 0.7):
        asked = {"temperature": temperature, "finish": finish}
        logprobs = profile.logp_of_hidden(x, head, None, target, **asked)[:, 0]
        assert torch.equal(logprobs, profile.logp(capped, target, temperature))
        assert not torch.equal(logprobs, profile.logp(plain, target, temperature))


def test_divided_logits_are_multiplied_by_the_reciprocal() -> None:
    x, head, target = rand(30, 64), rand(333, 64, seed=1), torch.arange(30)
    finish, plain = Finish(scale=1 / 6.0), profile.logits(x, head)
    divided = profile.logits(x, head, finish=finish)
    assert torch.equal(divided, plain * torch.tensor(1 / 6.0))
    assert not torch.equal(divided, plain / 6.0)
    for temperature in (1.0, 0.7):
        asked = {"temperature": temperature, "finish": finish}
        logprobs = profile.logp_of_hidden(x, head, None, target, **asked)[:, 0]
        assert torch.equal(logprobs, profile.logp(divided, target, temperature))


def test_a_temperature_divides_each_logit() -> None:
    logits = torch.randn(2000, 5, generator=torch.Generator().manual_seed(1))
    target = torch.arange(2000) % 5
    divided = (logits.double() / torch.tensor(0.7).double()).float()
    actual = profile.logp(logits, target, 0.7)
    assert torch.equal(actual, profile.logp(divided, target))
    assert not torch.equal(actual, profile.logp(logits * torch.tensor(1 / 0.7), target))


def sampled_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with ties, keys and positions."""
    x = rand(40, 100, seed=21, scale=3.0).float()
    return x, torch.arange(40) * 7919, torch.arange(40) + 5


def test_kept_tokens_are_those_of_the_page() -> None:
    x, *_ = sampled_rows()
    got = rlk_kernels.kept_tokens(x, temperature=0.7, top_k=30, top_p=0.9, min_p=0.01)
    sizes = set()
    for row, kept in zip(x, got, strict=True):
        z = (row / torch.tensor(0.7)).double()
        order = sorted(range(100), key=lambda v, row=row: (-float(row[v]), v))
        least = (row.max().double() + torch.tensor(0.7).double() * math.log(0.01)).float()
        order = [v for v in order if row[v] >= least][:30]
        mass = [math.floor(2**40 * math.exp(z[v] - z.max())) for v in order]
        need = math.ceil(float(torch.tensor(0.9)) * sum(mass))
        expected = [v for i, v in enumerate(order) if sum(mass[:i]) < need]
        assert kept.nonzero().flatten().tolist() == sorted(expected)
        sizes.add(len(expected))
    assert 1 < len(sizes) < 30


def test_a_draw_is_a_walk_down_the_tree() -> None:
    x, keys, positions = sampled_rows()
    ids = rlk_kernels.sample(x, keys, positions).ids
    numbers = uniform(keys, positions, 7)
    for row, u, id in zip(x.double(), numbers, ids, strict=True):
        first, last = 0, 128
        for h in range(6, -1, -1):
            middle = first + (1 << h)
            left, right = row[first:middle].exp().sum(), row[middle:last].exp().sum()
            first, last = (first, middle) if u[h] * (left + right) < left else (middle, last)
        assert first == int(id)


def test_a_drawn_log_prob_is_that_of_the_kept_logits() -> None:
    x, *where = sampled_rows()
    limits = {"temperature": 0.7, "top_p": 0.8}
    got, kept = rlk_kernels.sample(x, *where, **limits), rlk_kernels.kept_tokens(x, **limits)
    masked = x.masked_fill(~kept, -math.inf)
    assert torch.equal(profile.logp(masked, got.ids, 0.7), got.logprobs)
    assert not torch.equal(profile.logp(x, got.ids, 0.7), got.logprobs)
