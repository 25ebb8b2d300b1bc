"""What transformers' code says that a module computes."""

from pathlib import Path

import pytest
import torch
from undescribed_models import undescribed_model

from rlk_align.errors import ModelError
from rlk_align.modules.definition import KnownModule, define
from rlk_align.probe.referee.formulas import ACTIVATIONS

RMS, LAYER_NORM = (
    KnownModule(formula="rms_norm", eps=1e-5),
    KnownModule(formula="layer_norm", eps=1e-5),
)
ONE_PLUS = KnownModule(formula="layer_norm", eps=1e-5, one_plus=True)
LINEAR, TURNED = KnownModule(formula="linear"), KnownModule(formula="linear", transposed=True)
EMBEDDING = KnownModule(formula="embedding")
KNOWN = {
    "falcon_h1": {
        "model.layers.1.input_layernorm": RMS,
        "model.layers.1.mamba.in_proj": LINEAR,
        "model.layers.1.mamba.conv1d": None,
        "model.layers.1.mamba": None,
        "model.layers.1.feed_forward.act_fn": KnownModule(formula="activation", activation="silu"),
        "model.embed_tokens": EMBEDDING,
    },
    "nemotron": {
        "model.layers.1.input_layernorm": ONE_PLUS,
        "model.layers.1.mlp.act_fn": KnownModule(formula="activation", activation="relu2"),
    },
    "gpt2": {
        "transformer.h.1.ln_2": LAYER_NORM,
        "transformer.h.1.attn.c_attn": TURNED,
        "transformer.wpe": EMBEDDING,
        "lm_head": LINEAR,
    },
}


@pytest.mark.parametrize("family", KNOWN)
def test_norms_products_and_activations_are_told_apart(tmp_path: Path, family: str) -> None:
    defined = define(undescribed_model(tmp_path, family))
    for path, known in KNOWN[family].items():
        assert defined[path].known == known, path


def test_an_activation_of_several_steps_is_judged_by_its_steps(tmp_path: Path) -> None:
    known = define(undescribed_model(tmp_path, "gpt2"))["transformer.h.0.mlp.act"].known
    assert known is not None
    assert known.activation == "gelu_pytorch_tanh"
    x = torch.linspace(-4, 4, 64).bfloat16()
    exact, variance = known.activate(x)
    assert torch.equal(exact, ACTIVATIONS["gelu_pytorch_tanh"](x.double()))
    error = known.in_steps(x).double() - exact
    assert torch.equal(variance, error.square())
    assert variance.max() > 0


def test_a_model_that_transformers_does_not_know_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ModelError, match="transformers cannot build"):
        define(tmp_path)
