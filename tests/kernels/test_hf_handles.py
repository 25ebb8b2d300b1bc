"""Several calls of `use_kernels` for one model of transformers, closed in any order: the kernels
stay as long as one is open, and afterwards the model is as it was."""

import gc
import weakref
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from hf_models import small_model, transformers, with_kernels
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.handle import Handle
from torch._inductor import config as inductor

IDS = torch.arange(24).view(2, 12)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def state(model: Any) -> dict[str, Any]:
    """All that a call may change, of the model and of the process."""
    settings: dict[str, Any] = {"attention": model.config._attn_implementation}
    for name, module in model.named_modules():
        settings[f"{name} class"] = type(module)
        settings[f"{name} own"] = sorted(vars(module))
        settings[f"{name} hooks"] = list(module._forward_pre_hooks)
    rotary = model.model.rotary_emb
    settings["scaling"], settings["frequencies"] = rotary.attention_scaling, id(rotary.inv_freq)
    settings["rotation"] = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    settings["loss"] = model.loss_function
    settings["rounding"] = inductor.emulate_precision_casts
    return settings


@pytest.fixture
def model() -> Iterator[Any]:
    """As it was made when a test ends, too."""
    made = small_model().eval()
    before, stock = state(made), logits(made)
    yield made
    assert state(made) == before
    assert logits(made).equal(stock)
    with pytest.raises(NotSupported, match="the engine still computes"):
        hf.check(hf.operators(made), called=False)


@pytest.fixture(scope="module")
def ours() -> torch.Tensor:
    return logits(with_kernels())


EXCLUDED = [((), ()), (("attn",), ()), ((), ("attn",)), (("attn", "logits"), ("q_rope", "k_rope"))]


@pytest.mark.parametrize("excluded", EXCLUDED, ids=str)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_calls_are_closed_in_any_order(model: Any, excluded: Any, order: Any) -> None:
    handles = [hf.use_kernels(model, excluded=excluded[0])]
    alone = logits(model)
    handles.append(hf.use_kernels(model, excluded=excluded[1]))
    both = logits(model)
    handles[order[0]].close()
    # What the first put in stays below the second; what the second added goes out with it.
    assert logits(model).equal(both if order[0] == 0 else alone)
    handles[order[0]].close()
    assert logits(model).equal(both if order[0] == 0 else alone)
    handles[order[1]].close()


def test_what_the_calls_leave_to_the_engine_shows(ours: torch.Tensor) -> None:
    """Or the orders above would compare one and the same."""
    for excluded in (["attn"], ["attn", "logits"]):
        model = small_model().eval()
        hf.use_kernels(model, excluded)
        assert not logits(model).equal(ours)
        hf.use_kernels(model)
        assert logits(model).equal(ours)


@pytest.mark.parametrize("order", permutations(range(3)))
def test_three_calls_are_closed_in_any_order(model: Any, order: Any, ours: torch.Tensor) -> None:
    handles = [hf.use_kernels(model) for _ in range(3)]
    for i in order:
        assert logits(model).equal(ours)
        hf.check(hf.operators(model))
        handles[i].close()


def test_calls_are_nested_as_context_managers(model: Any, ours: torch.Tensor) -> None:
    stock = logits(model)
    with hf.use_kernels(model, excluded=["attn"]):
        outer = logits(model)
        with hf.use_kernels(model):
            assert logits(model).equal(ours)
        assert logits(model).equal(outer)
    assert logits(model).equal(stock)
    with pytest.raises(ZeroDivisionError), hf.use_kernels(model):
        raise ZeroDivisionError


def test_a_closed_handle_closes_nothing_of_a_later_call(model: Any, ours: torch.Tensor) -> None:
    first = hf.use_kernels(model)
    first.close()
    second = hf.use_kernels(model)
    first.close()
    assert logits(model).equal(ours)
    second.close()


def test_a_later_call_that_nobody_keeps_ends_with_the_first(model: Any, ours: torch.Tensor) -> None:
    first = hf.use_kernels(model, excluded=["attn"])
    hf.use_kernels(model)
    assert logits(model).equal(ours)
    first.close()


def test_a_first_call_that_nobody_keeps_stays(ours: torch.Tensor) -> None:
    model = with_kernels()
    hf.use_kernels(model).close()
    assert logits(model).equal(ours)
    hf.check(hf.operators(model))


def test_calls_are_counted_from_when_the_kernels_are_put_in(model: Any) -> None:
    with hf.use_kernels(model):
        logits(model)
        hf.check(hf.operators(model))
    with hf.use_kernels(model), pytest.raises(NotSupported, match="never called"):
        hf.check(hf.operators(model))


def test_handles_keep_no_model_alive_once_they_are_gone() -> None:
    model = small_model()
    handles = [hf.use_kernels(model) for _ in range(2)]
    reference = weakref.ref(model)
    del model, handles
    gc.collect()
    assert reference() is None


def test_a_call_that_is_undone_beside_a_later_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it was when handles knew nothing of each other."""
    monkeypatch.setattr(Handle, "close", lambda handle: handle._undo.close())
    model = small_model().eval()
    before = state(model)
    handles = [hf.use_kernels(model) for _ in range(2)]
    handles[0].close()
    with pytest.raises(NotSupported, match="without the kernels that were installed"):
        logits(model)
    handles[1].close()
    assert state(model) != before
