"""A trainer with fake-quantised weights has the bits of a model whose weights were dequantised."""

from pathlib import Path
from typing import Any

import pytest
import torch
from block_fp8 import BLOCK, write_fp8
from hf_models import small_model
from rlk_kernels.block_fp8 import quantise
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported

from rlk_align.data import data_path

MODEL = data_path("model")
IDS = torch.randint(2, 1000, (2, 24), generator=torch.Generator().manual_seed(0))


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    hf.use_kernels(model)
    return model


def trained(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The log-probs, and the gradients of their mean."""
    logprobs = hf.score_tokens(model, IDS)
    logprobs.mean().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_forward_and_gradients_are_those_of_the_dequantised_model(
    tmp_path: Path, powers_of_two: bool
) -> None:
    scales = {"scale_fmt": "ue8m0"} if powers_of_two else {}
    fp8 = write_fp8(tmp_path / "fp8", MODEL, lambda w: quantise(w, BLOCK, powers_of_two), **scales)
    fake, dequantised, plain = loaded(MODEL), loaded(fp8), loaded(MODEL)
    names = hf.fake_quantise(fake, BLOCK, powers_of_two)
    assert len(names) == 28
    assert "lm_head" not in names
    mine, theirs, usual = trained(fake), trained(dequantised), trained(plain)
    assert torch.equal(mine[0], theirs[0])
    assert not torch.equal(mine[0], usual[0])
    assert mine[1].keys() == theirs[1].keys()
    assert all(torch.equal(grad, theirs[1][name]) for name, grad in mine[1].items())
    # The trainer's own weights are not the quantised ones.
    for name, weight in fake.named_parameters():
        assert torch.equal(weight, plain.get_parameter(name)), name


def test_a_module_may_be_left_out(tmp_path: Path) -> None:
    fp8 = write_fp8(tmp_path / "fp8", MODEL, left_out=("down_proj",))
    fake = loaded(MODEL)
    names = hf.fake_quantise(fake, BLOCK, ignored=("mlp.down_proj", "lm_head"))
    assert len(names) == 24
    assert torch.equal(trained(fake)[0], trained(loaded(fp8))[0])


def test_what_is_not_quantised_is_refused() -> None:
    model = small_model()
    with pytest.raises(NotSupported, match="call use_kernels first"):
        hf.fake_quantise(model)
    hf.use_kernels(model)
    # A part of a name is no module.
    with pytest.raises(NotSupported, match=r"ignored=mlp\.gat: the model has no such module"):
        hf.fake_quantise(model, ignored=("mlp.gat",))
