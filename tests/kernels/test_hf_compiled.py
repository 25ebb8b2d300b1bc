"""torch.compile of a model of transformers that has the kernels: eager bits, gradients included.

The graphs run eagerly here (aot_eager), but for one that goes through Inductor, in
tests/fix_path/test_hf_compiled.py.
"""

from functools import partial
from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported

B, T = 2, 12
IDS = torch.arange(B * T).view(B, T)
LEFT_PADDED = torch.ones(B, T, dtype=torch.int64)
LEFT_PADDED[0, :4] = 0
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(B, T)
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {"labels": IDS},
    "padded left": {
        "attention_mask": LEFT_PADDED,
        "position_ids": (LEFT_PADDED.cumsum(1) - 1).clamp(min=0),
    },
    "a mask of ones": {"attention_mask": torch.ones_like(LEFT_PADDED), "logits_to_keep": 3},
    "packed": {"position_ids": PACKED},
}


def run(model: Any, call: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Logits, and the gradients of all parameters."""
    model.zero_grad()
    logits = call(IDS, use_cache=False, **inputs).logits
    logits.pow(2).sum().backward()
    return [logits, *(p.grad for p in model.parameters())]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", INPUTS)
def test_it_is_traced_whole_and_has_eager_bits(name: str) -> None:
    model = small_model().bfloat16()
    hf.use_kernels(model)
    eager = run(model, model, INPUTS[name])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert equal(run(model, compiled, INPUTS[name]), eager)
    assert not equal(run(model, model, {"position_ids": PACKED + 1}), eager)


def test_logits_that_the_head_divides_are_traced() -> None:
    model = small_model("Granite", logits_scaling=6.0)
    hf.use_kernels(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert equal(run(model, compiled, INPUTS["plain"]), run(model, model, INPUTS["plain"]))
    assert model.config.logits_scaling == 6.0


def test_a_window_and_a_cache_are_traced() -> None:
    model = small_model("Mistral", sliding_window=6)
    hf.use_kernels(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    inputs = INPUTS["padded left"]
    assert equal(run(model, compiled, inputs), run(model, model, inputs))
    with torch.no_grad():
        both = [
            call(IDS[:, :5], past_key_values=None, use_cache=True).logits
            for call in (model, compiled)
        ]
    assert both[0].equal(both[1])


def test_what_lost_the_kernels_is_refused_compiled_too() -> None:
    model = small_model()
    hf.use_kernels(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        compiled(IDS, use_cache=False)
        model.lm_head = torch.nn.Linear(64, 64, bias=False)
        with pytest.raises(
            RuntimeError, match=r"logits is now a .* without the kernels that were installed"
        ):
            compiled(IDS, use_cache=False)


def test_packed_beside_a_mask_or_a_cache_is_refused() -> None:
    """transformers looks for packed sequences only where neither is given."""
    model = small_model()
    hf.use_kernels(model)
    ones = torch.ones_like(LEFT_PADDED)
    for inputs in ({"use_cache": True}, {"use_cache": False, "attention_mask": ones}):
        with pytest.raises(NotSupported, match="positions start again inside a row"):
            model(IDS, position_ids=PACKED, **inputs)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match="positions start again inside a row"):
        compiled(IDS, position_ids=PACKED, attention_mask=LEFT_PADDED, use_cache=False)


def test_a_gap_in_a_mask_is_refused_beside_a_window() -> None:
    gap = torch.ones_like(LEFT_PADDED)
    gap[0, 4:6] = 0
    second_layer = {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2}
    hf.use_kernels(model := small_model())
    model(IDS, attention_mask=gap, use_cache=False)
    for family, more in (("Mistral", {}), ("Qwen2", second_layer)):
        hf.use_kernels(model := small_model(family, sliding_window=6, **more))
        with pytest.raises(NotSupported, match="a gap in the attention mask"):
            model(IDS, attention_mask=gap, use_cache=False)


def test_a_row_of_padding_has_no_part_in_anything(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Its values, and those of its gradient, are zeros."""
    monkeypatch.setenv("RLK_BACKEND", backend)
    from rlk_kernels.integrations import profile
    from rlk_kernels.integrations.hf.attention import _padded

    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, n, 16, generator=made).requires_grad_() for n in (4, 2, 2))
    real = LEFT_PADDED.bool()
    core = partial(profile.attention, scale=0.25, window=None, softcap=None, sinks=None)
    out = _padded(q, (k, v), real, core)
    out.pow(2).sum().backward()
    for x in (out, q.grad, k.grad, v.grad):
        assert bool((x[~real] == 0).all())
        assert bool((x[real] != 0).any())
    q, k, v = (x[:1, 4:] for x in (q, k, v))
    alone = _padded(q, (k, v), real[:1, 4:], core)
    assert out[:1, 4:].equal(alone)
