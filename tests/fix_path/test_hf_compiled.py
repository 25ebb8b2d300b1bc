"""A model of transformers with the kernels, compiled by Inductor."""

import torch
import torch._inductor.config as inductor
import transformers
from rlk_kernels.integrations import hf


def test_inductor_adds_gradients_as_eager_code_does() -> None:
    """Three products read the input of attention: their gradients are added in bf16, one by one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    hf.use_kernels(model)
    x, at = torch.randn(1, 20, 64).bfloat16(), torch.arange(20)[None]

    def attention(x: torch.Tensor) -> torch.Tensor:
        turns = model.model.rotary_emb(x, at)
        return model.model.layers[0].self_attn(x, position_embeddings=turns, position_ids=at)[0]

    def values(call: object) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        out = call(given)
        (gradient,) = torch.autograd.grad(out.float().pow(2).sum(), given)
        return [out, gradient]

    eager = values(attention)
    compiled = values(torch.compile(attention, fullgraph=True))
    assert all(a.equal(b) for a, b in zip(eager, compiled, strict=True))
    with inductor.patch(emulate_precision_casts=False):
        torch._dynamo.reset()
        out, gradient = values(torch.compile(attention, fullgraph=True))
    assert out.equal(eager[0])
    assert not gradient.equal(eager[1]), "what Inductor does by itself is noticed"
