"""PROFILE.md, line by line, for latent attention: the roundings that all engines share, against a
computation in float64 that rounds where the page says so, and nowhere else."""

import pytest
import rlk_kernels as rk
import torch
from bf16_rows import BF16, once, rand
from hf_models import small_model
from rlk_kernels.integrations import hf, profile

HEADS, UNROTATED, ROTATED, VALUES, LATENT = 4, 16, 8, 12, 32
MODEL = {
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 24,
    "kv_lora_rank": LATENT, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": UNROTATED,
    "v_head_dim": VALUES, "first_k_dense_replace": 1, "rms_norm_eps": 1e-2,
}  # fmt: skip
SCALE = 0.2


def bounds(length: int) -> torch.Tensor:
    return torch.tensor([0, length], dtype=torch.int32)


def rows(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, profile.Absorbed]:
    """(q, rotated, latents, the absorbed weight)."""
    weight = rand(HEADS * (UNROTATED + VALUES), LATENT, seed=1)
    q, rotated = rand(length, HEADS, UNROTATED, seed=2), rand(length, HEADS, ROTATED, seed=3)
    absorbed = profile.absorbed(weight, HEADS, UNROTATED)
    return q, rotated, rand(length, LATENT + ROTATED, seed=4), absorbed


def test_latent_attention_rounds_where_the_page_says() -> None:
    length = 40
    q, rotated, latents, weight = rows(length)
    queries = profile.latent_queries(q, rotated, weight)
    exact = torch.einsum("thn,hln->thl", q.double(), weight.keys.double())
    assert torch.equal(queries, torch.cat([once(exact), rotated], -1))

    cu = bounds(length)
    out = profile.latent_attention(queries, latents, weight, cu, cu, SCALE)
    seen = rk.latent_attention(queries, latents, cu, cu, latent=LATENT, scale=SCALE)
    scores = torch.einsum("thd,sd->hts", queries.double(), latents.double()) * SCALE
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    exact = torch.einsum("hts,sl->thl", scores.softmax(-1), latents[:, :LATENT].double())
    # Scores are fp32, so that few sums are rounded to the neighbour.
    assert (seen != once(exact)).sum() < seen.numel() / 100
    values = weight.values.double()
    assert torch.equal(out, once(torch.einsum("thl,hel->the", seen.double(), values)))
    assert not torch.equal(out, once(torch.einsum("thl,hel->the", exact, values)))


def test_prefill_and_paged_decode_of_latents_are_one() -> None:
    length, page = 300, 16
    q, rotated, latents, weight = rows(length)
    queries = profile.latent_queries(q, rotated, weight)
    whole = profile.latent_attention(
        queries, latents, weight, bounds(length), bounds(length), SCALE
    )
    blocks = -(-length // page)
    cache = torch.zeros(blocks * page, LATENT + ROTATED, dtype=BF16)
    cache[:length] = latents
    table = torch.arange(blocks, dtype=torch.int32)[None]
    for at in (1, 37, 299):
        one = profile.paged_latent_attention(
            queries[at : at + 1], cache.view(blocks, page, -1), weight, table,
            torch.tensor([at + 1]), bounds(1), SCALE,
        )  # fmt: skip
        assert torch.equal(one, whole[at : at + 1])


def test_norms_of_latents_have_the_epsilon_of_the_config() -> None:
    model = small_model("DeepseekV3", **MODEL).to(BF16).eval()
    attention, seen = model.model.layers[0].self_attn, {}
    with hf.use_kernels(model):
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            module = attention.get_submodule(name)
            module.register_forward_hook(
                lambda _, args, out, name=name: seen.update({name: (args[0], out)})
            )
        model(torch.arange(9)[None], use_cache=False)
    for name, (x, out) in seen.items():
        weight, wide = attention.get_submodule(name).weight, x.double()
        mean = wide.square().mean(-1, keepdim=True)
        assert torch.equal(out, once(wide * (mean + 1e-2).rsqrt() * weight.double()))
        assert not torch.equal(out, once(wide * (mean + 1e-6).rsqrt() * weight.double()))
        # transformers' own, as it was.
        assert attention.get_submodule(name).variance_epsilon == 1e-6
    assert len(seen) == 2


@pytest.mark.parametrize("of_all", [0.0, 1.0])
def test_the_scale_of_latent_attention_is_that_of_transformers(of_all: float) -> None:
    from rlk_kernels.integrations.rotary import latent_scale

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0}
    rope |= {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": of_all}
    model = small_model("DeepseekV3", **MODEL, rope_parameters=rope)
    scale = model.model.layers[0].self_attn.scaling
    assert profile.float32(latent_scale(rope, UNROTATED + ROTATED)) == profile.float32(scale)
    assert (scale == (UNROTATED + ROTATED) ** -0.5) == (of_all == 0.0)
