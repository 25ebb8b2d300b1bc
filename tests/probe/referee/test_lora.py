"""The formula of a projection with an adapter, against the roundings of PEFT and of vLLM."""

from pathlib import Path

import pytest
import torch
from lora import write_adapter
from random_model import write_random_model

from rlk_align.engines.common.lora import folded, record_adapter
from rlk_align.engines.hf.lora import add_adapters, live_adapter
from rlk_align.engines.hf.places import hf_places
from rlk_align.model.adapter import fitting_adapter
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape
from rlk_align.probe.referee.formulas import sum_rounding
from rlk_align.probe.referee.lora import AdapterReference, Factors, add_update
from rlk_align.probe.referee.rounding import rounding_variance
from rlk_align.probe.referee.weights import NotRefereed, OtherWeight

ROWS, IN, OUT, RANK, SCALE = 64, 96, 80, 8, 3.0
GENERATOR = torch.Generator().manual_seed(1)


def drawn(*shape: int, std: float = 0.2) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR) * std


X, W = drawn(ROWS, IN, std=1.0).bfloat16(), drawn(OUT, IN).bfloat16()
A, B = drawn(RANK, IN), drawn(OUT, RANK)


def roundings(out: torch.Tensor, factors: Factors) -> float:
    """The rms error of an output in roundings, as the referee counts it."""
    x, w = X.double(), W.double()
    exact, variance = add_update(x, x @ w.T, sum_rounding(x, w, "bfloat16"), factors, "bfloat16")
    variance = variance + rounding_variance(exact, "bfloat16")
    return float(((out.double() - exact).square().sum() / variance.sum()).sqrt())


def peft(a: torch.Tensor, b: torch.Tensor, scale: float = SCALE) -> torch.Tensor:
    """As `peft.tuners.lora.Linear.forward`."""
    base = X @ W.T
    return (base + (X.to(a.dtype) @ a.T @ b.T) * scale).to(base.dtype)


def vllm(b: torch.Tensor) -> torch.Tensor:
    """As vLLM's wrapper on a CPU; b: with the scale."""
    h = (X.float() @ A.bfloat16().float().T).bfloat16()
    return (X @ W.T) + (h @ b.T)


def kernels(b: torch.Tensor, scale: float = SCALE) -> torch.Tensor:
    """As the kernels' profile."""
    h = (X.float() @ A.bfloat16().float().T).bfloat16()
    base = (X @ W.T).float()
    return (base + scale * (h.float() @ b.float().T)).bfloat16()


@pytest.mark.parametrize("side", ["peft", "peft in bfloat16", "vllm", "kernels"])
def test_each_engines_roundings_are_within_one(side: str) -> None:
    if side == "peft":
        factors = Factors(A.double(), B.double(), SCALE, "", "")
        right, twice = peft(A, B), peft(A, B, SCALE * SCALE)
    elif side == "vllm":
        b = folded(B, SCALE, torch.bfloat16)
        factors = Factors(A.bfloat16().double(), b.double(), 1.0, "bfloat16", "bfloat16")
        right, twice = vllm(b), vllm(b * SCALE)
    elif side == "kernels":
        a, b = A.bfloat16(), B.bfloat16()
        factors = Factors(a.double(), b.double(), SCALE, "bfloat16", "")
        right, twice = kernels(b), kernels(b, SCALE * SCALE)
    else:
        a, b = A.bfloat16(), B.bfloat16()
        factors = Factors(a.double(), b.double(), SCALE, "bfloat16", "bfloat16")
        right, twice = peft(a, b), peft(a, b, SCALE * SCALE)
    assert 0.85 < roundings(right, factors) < 1.1
    assert roundings(twice, factors) > 50


def test_pefts_layers_and_the_adapter_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = write_random_model(tmp_path / "m", model_type="llama", dtype="bfloat16")
    path, shape, config = (
        write_adapter(tmp_path / "a", model),
        read_shape(model),
        read_config(model),
    )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    add_adapters(loaded, [str(path)], in_float32=True)
    record = record_adapter(str(path), live_adapter(loaded, hf_places(loaded, shape)), "bfloat16")
    adapter = fitting_adapter(str(path), config, shape)
    assert list(record.modules) == list(adapter.modules)
    first = record.modules["layers.0.q_proj"]
    assert (first.dtype, first.scale, first.rank, first.zero) == ("float32", 2.0, 4, False)

    reference = AdapterReference(record, "bfloat16", config, shape, torch.device("cpu"))
    factors = reference.factors("layers.1.up_proj")
    assert factors is not None
    assert (factors.h, factors.product) == ("", "")
    up = loaded.model.layers[1].mlp.up_proj
    x = torch.randn(32, shape.hidden, dtype=torch.bfloat16)
    with torch.no_grad():
        out = up(x).double()
        base = x.double() @ up.base_layer.weight.double().T
    exact, _ = add_update(x.double(), base, 0 * base, factors, "bfloat16")
    assert float((out - exact).abs().max() / exact.abs().max()) < 2.0**-7
    assert float((base - exact).abs().max() / exact.abs().max()) > 2.0**-4
    assert reference.factors("layers.0.attn") is None

    # A live adapter that is not that of the file is not judged by it.
    up.lora_B["default"].weight.data *= 1.5
    record = record_adapter(str(path), live_adapter(loaded, hf_places(loaded, shape)), "bfloat16")
    reference = AdapterReference(record, "bfloat16", config, shape, torch.device("cpu"))
    with pytest.raises(OtherWeight, match=r"the adapter of layers.1.up_proj in its engine differs"):
        reference.factors("layers.1.up_proj")
    (path / "adapter_model.safetensors").unlink()
    reference = AdapterReference(record, "bfloat16", config, shape, torch.device("cpu"))
    with pytest.raises(NotRefereed, match="the adapter cannot be read"):
        reference.factors("layers.0.q_proj")
