"""vLLM's adapters with the kernels, without an engine: their scale stays out of B, in every part of
a projection, and each function of vLLM is its own again afterwards."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rlk_kernels.integrations import vllm
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.vllm import lora
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights


@pytest.fixture
def registered() -> Iterator[None]:
    vllm.register()
    yield
    vllm.unregister()


def weights(name: str, alpha: int) -> LoRALayerWeights:
    return LoRALayerWeights(name, 4, alpha, torch.ones(4, 6), torch.ones(5, 4))


@pytest.mark.usefixtures("registered")
def test_a_scale_stays_out_of_b() -> None:
    loras = [weights("q_proj", 8), None, weights("v_proj", 2)]
    packed = PackedLoRALayerWeights.pack(loras).optimize()
    assert packed.scaling == [2.0, 0.0, 0.5]
    assert all(bool((b == 1).all()) for b in packed.lora_b if b is not None)
    assert lora._scaling(packed, 3) == [2.0, 0.0, 0.5]
    assert lora._scaling(weights("o_proj", 2).optimize(), 1) == [0.5]
    assert lora._scaling(None, 2) == [0.0, 0.0]
    with pytest.raises(NotSupported, match="an adapter of q_proj in 3 parts is not supported"):
        lora._scaling(packed, 4)


def test_vllm_folds_it_again_without_the_kernels() -> None:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in lora.patches()]
    vllm.register()
    assert all(vars(owner)[name] is not function for owner, name, function in before)
    vllm.unregister()
    assert all(vars(owner)[name] is function for owner, name, function in before)
    packed = PackedLoRALayerWeights.pack([weights("q_proj", 8), weights("k_proj", 2)])
    assert packed.scaling == [1, 1]
    assert [float(b[0, 0]) for b in packed.lora_b] == [2.0, 0.5]


def wrapper(slices: tuple[int, ...], slots: int = 2) -> Any:
    """What is read of a wrapper."""
    rows = torch.tensor([1, -1, 0, 7])
    return SimpleNamespace(
        lora_a_stacked=tuple(torch.randn(slots, 1, 4, 6) for _ in slices),
        lora_b_stacked=tuple(torch.randn(slots, 1, n, 4) for n in slices),
        output_slices=slices,
        punica_wrapper=SimpleNamespace(_token_lora_indices=rows),
    )


def test_each_slice_has_its_adapter_and_scale() -> None:
    of = wrapper((5, 3))
    update = lora.Update(of)
    x, output = torch.randn(4, 6), torch.randn(4, 8)
    assert torch.equal(update.add(x, output), output)
    update.set_scales(0, [2.0, 0.0])
    update.set_scales(1, [0.5, 3.0])
    y = update.add(x, output)
    assert torch.equal(y[[1, 3]], output[[1, 3]])
    assert torch.equal(y[2, 5:], output[2, 5:])
    for row, slot, part, scale in ((0, 1, 0, 0.5), (0, 1, 1, 3.0), (2, 0, 0, 2.0)):
        columns = slice(5 * part, 5 + 3 * part)
        a, b = of.lora_a_stacked[part][slot, 0], of.lora_b_stacked[part][slot, 0]
        wanted = output[row, columns] + scale * (x[row] @ a.T @ b.T)
        torch.testing.assert_close(y[row, columns], wanted)
    assert update.rlk_calls == 2
    # The transformers backend has a dimension of one batch in front.
    assert torch.equal(update.add(x[None], output[None])[0], y)
