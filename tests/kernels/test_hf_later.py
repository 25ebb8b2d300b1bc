"""What is done to a model of transformers after it got the kernels: it keeps them, or its next
forward is refused."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import small_model, with_kernels
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported
from torch import nn
from torch.nn.utils import parametrize, prune

IDS = torch.arange(24).view(2, 12)
BY_NOW = "without the kernels that were installed"


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False, **inputs).logits


class Adapter(nn.Module):
    """As libraries put one around a linear."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize(
    "place", ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"]
)
def test_an_adapter_is_refused_and_served_once_it_is_merged(place: str) -> None:
    model = with_kernels(num_hidden_layers=2)
    parent, _, name = place.rpartition(".")
    base = model.get_submodule(place)
    adapter = Adapter(base)
    setattr(model.get_submodule(parent), name, adapter)
    # As peft calls it: past the hooks of the model itself.
    with pytest.raises(NotSupported, match=f"Adapter {BY_NOW}"):
        model.forward(IDS, use_cache=False)
    with torch.no_grad():
        base.weight += adapter.up.weight @ adapter.down.weight
    setattr(model.get_submodule(parent), name, base)
    plain = small_model(num_hidden_layers=2)
    plain.load_state_dict(model.state_dict())
    hf.use_kernels(plain)
    assert logits(model).equal(logits(plain))


def test_an_attention_that_is_wrapped_is_refused() -> None:
    model = with_kernels()
    layer = model.model.layers[0]
    layer.self_attn = nn.Sequential(layer.self_attn)
    with pytest.raises(NotSupported, match=r"layers\.0 is not transformers' own: 'Sequential'"):
        logits(model)


def test_a_vocabulary_of_another_size_takes_the_kernels_again() -> None:
    model = with_kernels()
    model.resize_token_embeddings(80, mean_resizing=False)
    with pytest.raises(NotSupported, match=rf"logits is now a torch\.nn.*Linear {BY_NOW}"):
        logits(model)
    hf.use_kernels(model)
    plain = small_model(vocab_size=80)
    plain.load_state_dict(model.state_dict())
    hf.use_kernels(plain)
    assert logits(model).shape == (2, 12, 80)
    assert logits(model).equal(logits(plain))


def test_a_copy_is_watched_by_itself() -> None:
    model = with_kernels()
    average = copy.deepcopy(copy.deepcopy(model))
    assert logits(average).equal(logits(model))
    average.lm_head = nn.Linear(64, 64, bias=False)
    logits(model)
    with pytest.raises(NotSupported, match=BY_NOW):
        logits(average)
    alone = copy.deepcopy(model.model)
    assert alone(IDS, use_cache=False)[0].equal(model.model(IDS, use_cache=False)[0])


def test_the_watch_keeps_no_model_alive() -> None:
    reference = weakref.ref(with_kernels())
    gc.collect()
    assert reference() is None


def test_a_pickle_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"cannot be pickled: save its state_dict\(\)"):
        pickle.dumps(with_kernels())


def test_without_the_kernels_nothing_is_watched() -> None:
    model = small_model().eval()
    before = logits(model)
    hf.use_kernels(model).close()
    model.model.layers[0].mlp.down_proj = copy.deepcopy(model.model.layers[0].mlp.down_proj)
    assert logits(model).equal(before)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def parametrized(linear: Any) -> None:
    parametrize.register_parametrization(linear, "weight", Doubled())


def pruned(linear: Any) -> None:
    prune.l1_unstructured(linear, "weight", 0.5)


def new(linear: Any) -> None:
    linear.weight = nn.Parameter(linear.weight.detach().flip(0))


def hooked(linear: Any) -> None:
    linear.register_forward_hook(lambda _module, _inputs, out: out * 2)
    linear.rlk_factor = 2


@pytest.mark.parametrize("change", [parametrized, pruned, new, hooked])
def test_a_weight_is_that_of_the_live_module(change: Callable[[Any], None]) -> None:
    model, plain = with_kernels(), small_model()
    before = logits(model)
    linear = model.model.layers[0].mlp.up_proj
    change(linear)
    values = logits(model)
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight.copy_(
            linear.weight * getattr(linear, "rlk_factor", 1)
        )
    hf.use_kernels(plain)
    assert values.equal(logits(plain))
    assert not values.equal(before)


def test_an_activation_that_the_kernels_would_pass_by_is_refused() -> None:
    for change, says in (
        (lambda mlp: setattr(mlp, "act_fn", nn.GELU()), "act_fn is a GELU; only a plain"),
        (lambda mlp: mlp.act_fn.register_forward_hook(lambda *_: None), r"act_fn is .* with hooks"),
    ):
        early, late = small_model(), with_kernels()
        for model in (early, late):
            change(model.model.layers[0].mlp)
        with pytest.raises(NotSupported, match=says):
            hf.use_kernels(early)
        with pytest.raises(NotSupported, match=says):
            logits(late)
        hf.use_kernels(early, excluded=["act"])


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_what_an_embedding_does_beside_copying_is_refused(option: str) -> None:
    model = small_model()
    setattr(model.model.embed_tokens, option, 0.5)
    with pytest.raises(NotSupported, match=f"embed with {option} is not supported"):
        hf.use_kernels(model)


def test_layers_that_are_not_numbered_from_the_first_are_refused() -> None:
    """The checks of a forward are the first layer's."""
    model = small_model(num_hidden_layers=2)
    model.model.layers = model.model.layers[1:]
    with pytest.raises(NotSupported, match=r"layers\.0 has layer_idx=1"):
        hf.use_kernels(model)


def test_positions_that_count_the_padding_in_front_are_refused() -> None:
    """transformers counts it where no positions are given: the same row alone has other bits."""
    model = with_kernels()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = model(IDS[:1, 4:], use_cache=False).logits[0]
    assert logits(model, attention_mask=mask, position_ids=at)[0, 4:].equal(alone)
    counted = pytest.raises(NotSupported, match="positions that count the padding before")
    with counted:
        logits(model, attention_mask=mask)
    # In decoding too, behind a first pass that was given them.
    cache = model(IDS[:, :8], attention_mask=mask[:, :8], position_ids=at[:, :8]).past_key_values
    with counted:
        model(IDS[:, 8:9], attention_mask=mask[:, :9], past_key_values=cache)
    behind = mask.flip(1)
    assert logits(model, attention_mask=behind)[0, :8].equal(
        model(IDS[:1, :8], use_cache=False).logits[0]
    )
    nothing = torch.zeros_like(IDS)
    assert bool(logits(model, attention_mask=nothing).isfinite().all())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_log_prob_at_no_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(NotSupported, match=f"temperature={temperature} is not supported"):
        hf.token_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), temperature)
