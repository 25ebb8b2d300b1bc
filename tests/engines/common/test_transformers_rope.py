"""The heads that transformers rotates, also where an attention cuts off the part that turns."""

from collections.abc import Callable

import pytest
import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.transformers_rope import on_rotation

IDS = torch.arange(1, 7)[None]


@pytest.fixture
def model() -> torch.nn.Module:
    from transformers import StableLmConfig, StableLmForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 16}
    config = StableLmConfig(**sizes, **more, partial_rotary_factor=0.5, initializer_range=0.5)
    return StableLmForCausalLM(config).eval()


@torch.no_grad()
def logits(model: torch.nn.Module, see: Callable[[torch.Tensor], None]) -> torch.Tensor:
    with Hooks() as hooks:
        on_rotation(hooks, model, see)
        return model(IDS).logits


def test_a_cut_off_part_is_shown_beside_the_rest_of_its_head(model: torch.nn.Module) -> None:
    seen: list[torch.Tensor] = []
    alone = logits(model, lambda x: seen.append(x.clone()))
    with torch.no_grad():
        assert torch.equal(alone, model(IDS).logits)
    assert [x.shape for x in seen] == [(1, 6, 2, 16), (1, 6, 1, 16)]
    layer = model.get_submodule("model.layers.0")
    normed = layer.input_layernorm(model.get_submodule("model.embed_tokens")(IDS))
    query = layer.self_attn.q_proj(normed).unflatten(-1, (2, 16))
    assert torch.equal(seen[0][..., 8:], query[..., 8:])
    assert torch.equal(seen[0][:, 0], query[:, 0])
    assert not torch.equal(seen[0][:, 1:, :, :8], query[:, 1:, :, :8])


@pytest.mark.parametrize("part", [slice(0, 8), slice(8, 16)])
def test_what_is_written_to_either_part_of_a_head_is_read_by_attention(
    model: torch.nn.Module, part: slice
) -> None:
    def scaled(x: torch.Tensor) -> None:
        x[..., part] *= 3

    before, changed = logits(model, lambda x: None), logits(model, scaled)
    assert not torch.allclose(changed, before, atol=1e-2)
    for product in ("q_proj", "k_proj"):
        weight = model.get_submodule(f"model.layers.0.self_attn.{product}").weight
        weight.data.unflatten(0, (-1, 16))[:, part] *= 3
    with torch.no_grad():
        assert torch.allclose(changed, model(IDS).logits, atol=1e-4)
