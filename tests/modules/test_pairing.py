"""Parameters are paired with a checkpoint's tensors by the values of their rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlk_align.engines.common.modules import as_rows
from rlk_align.modules.names import NameIndex, likeness
from rlk_align.modules.pairing import Pairing, ParameterRows, pair
from rlk_align.modules.stored import StoredWeights
from rlk_align.trace.digest import digest_slices

H, INNER, E = 16, 24, 3
LAYER = "model.layers.0"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


Q, K, V = (random(n, H, seed=n + i) for i, n in enumerate((16, 8, 8)))
TENSORS = {
    "model.embed_tokens.weight": random(40, H),
    f"{LAYER}.self_attn.q_proj.weight": Q,
    f"{LAYER}.self_attn.k_proj.weight": K,
    f"{LAYER}.self_attn.v_proj.weight": V,
    f"{LAYER}.self_attn.q_proj.bias": torch.zeros(16, dtype=torch.bfloat16),
    f"{LAYER}.self_attn.k_proj.bias": torch.zeros(8, dtype=torch.bfloat16),
    f"{LAYER}.self_attn.v_proj.bias": random(8, seed=5),
    f"{LAYER}.norm.weight": torch.ones(H, dtype=torch.bfloat16),
    "model.layers.1.norm.weight": torch.ones(H, dtype=torch.bfloat16),
    f"{LAYER}.conv1d.weight": random(H, 1, 4),
    f"{LAYER}.fused_experts.gate_up": random(E, 2 * INNER, H, seed=7),
    f"{LAYER}.down.weight": random(H, INNER),
    **{f"{LAYER}.experts.{e}.up_proj.weight": random(INNER, H, seed=20 + e) for e in range(E)},
}


@pytest.fixture
def stored(tmp_path: Path) -> StoredWeights:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return StoredWeights(tmp_path)


def paired(stored: StoredWeights, **values: torch.Tensor) -> Pairing:
    live = {}
    for name, value in values.items():
        rows = as_rows(value)
        width = rows.shape[1] if rows.dim() > 1 else 1
        dtype = str(value.dtype).removeprefix("torch.")
        path = name.replace("__", ".")
        live[path] = ParameterRows(path, dtype, width, digest_slices(rows)[0])
    return pair(stored, live)


def held(pairing: Pairing) -> dict[str, tuple[int, int, int]]:
    """Tensor -> the first and the last row of the parameter that hold it, and the changed rows."""
    assert all(h.whole for h in pairing.holdings)
    return {
        h.tensor.removeprefix(f"{LAYER}."): (int(h.offsets[0]), int(h.offsets[-1]), h.changed)
        for h in pairing.holdings
    }


FUSED = {
    "self_attn.q_proj.weight": (0, 15, 0),
    "self_attn.k_proj.weight": (16, 23, 0),
    "self_attn.v_proj.weight": (24, 31, 0),
}


def test_fused_tensors_are_found_in_their_order_and_zero_biases_beside_them(
    stored: StoredWeights,
) -> None:
    biases = [TENSORS[f"{LAYER}.self_attn.{n}_proj.bias"] for n in "qkv"]
    pairing = paired(stored, m__qkv__weight=torch.cat([Q, K, V]), m__qkv__bias=torch.cat(biases))
    assert held(pairing) == FUSED | {n.replace("weight", "bias"): at for n, at in FUSED.items()}
    assert not pairing.changed
    assert not pairing.strays


@pytest.mark.parametrize("row", [0, 15, 16, 20, 23, 31])
def test_one_changed_row_of_a_fused_parameter_belongs_to_its_tensor(
    stored: StoredWeights, row: int
) -> None:
    value = torch.cat([Q, K, V])
    value[row, 3] += 1
    [changed] = paired(stored, m__qkv__weight=value).changed
    name = next(n for n, (first, last, _) in FUSED.items() if first <= row <= last)
    assert (changed.tensor, changed.changed) == (f"{LAYER}.{name}", 1)
    assert changed.whole


def test_a_changed_bias_beside_a_fused_weight(stored: StoredWeights) -> None:
    bias = torch.cat([TENSORS[f"{LAYER}.self_attn.{n}_proj.bias"] for n in "qkv"])
    bias[17] = 1
    pairing = paired(stored, m__qkv__weight=torch.cat([Q, K, V]), m__qkv__bias=bias)
    [changed] = pairing.changed
    assert (changed.tensor, changed.changed) == (f"{LAYER}.self_attn.k_proj.bias", 1)


def test_rows_in_turn_a_transpose_and_a_stack(stored: StoredWeights) -> None:
    stack = TENSORS[f"{LAYER}.fused_experts.gate_up"]
    in_turn = torch.cat([stack[:, 0::2], stack[:, 1::2]], dim=1)
    pairing = paired(stored, m__gate_up=in_turn)
    [holding] = pairing.holdings
    assert holding.tensor == f"{LAYER}.fused_experts.gate_up"
    first = [*range(0, INNER), *range(INNER, 2 * INNER)]
    assert holding.offsets[: 2 * INNER].tolist() == [
        first[i // 2 + INNER * (i % 2)] for i in range(2 * INNER)
    ]
    down = TENSORS[f"{LAYER}.down.weight"]
    [turned] = paired(stored, m__weight=down.T.contiguous()).holdings
    assert (turned.tensor, turned.transposed, turned.whole) == (f"{LAYER}.down.weight", True, True)
    turned_stack = paired(stored, m__w=stack.transpose(1, 2).contiguous()).holdings
    assert [(h.tensor, h.transposed) for h in turned_stack] == [
        (f"{LAYER}.fused_experts.gate_up", True)
    ]
    experts = torch.stack([TENSORS[f"{LAYER}.experts.{e}.up_proj.weight"] for e in range(E)])
    assert held(paired(stored, m__w13=experts)) == {
        f"experts.{e}.up_proj.weight": (e * INNER, e * INNER + INNER - 1, 0) for e in range(E)
    }


def test_padding_a_tied_head_and_a_dimension_of_one(stored: StoredWeights) -> None:
    table = TENSORS["model.embed_tokens.weight"]
    padded = torch.cat([table, torch.zeros(24, H, dtype=table.dtype)])
    convolution = TENSORS[f"{LAYER}.conv1d.weight"].squeeze(1)
    pairing = paired(
        stored, model__embed_tokens__weight=padded, lm_head__weight=padded, m__conv=convolution
    )
    assert [h.tensor for h in pairing.by_parameter["lm_head.weight"]] == [
        "model.embed_tokens.weight"
    ]
    assert held(pairing)["model.embed_tokens.weight"] == (0, 39, 0)
    assert held(pairing)["conv1d.weight"] == (0, H - 1, 0)


def test_names_decide_between_equal_tensors_and_tell_a_changed_one(
    stored: StoredWeights,
) -> None:
    ones = torch.ones(H, dtype=torch.bfloat16)
    pairing = paired(stored, decoder__layers__1__rms__weight=ones)
    assert list(pairing.by_tensor) == ["model.layers.1.norm.weight"]
    ones[4] = 2
    [changed] = paired(stored, layers__1__norm__weight=ones).changed
    assert (changed.tensor, changed.changed) == ("model.layers.1.norm.weight", 1)
    every = random(40, H, seed=99)
    [other] = paired(stored, model__embed_tokens__weight=every).changed
    assert other.changed == 40


def test_a_parameter_of_no_tensor_is_a_stray_and_a_rounded_one_is_not(tmp_path: Path) -> None:
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    stored = StoredWeights(tmp_path)
    pairing = paired(stored, b__w=weight.bfloat16(), c__w=random(8, 4, seed=3))
    assert pairing.found == {"a.weight"}
    assert pairing.strays == ["c.w"]
    assert not paired(stored).found


def test_names_that_differ_by_what_is_before_them() -> None:
    index = NameIndex(["model.layers.1.norm.weight", "h.0.ln.bias", "ln.bias"])
    assert index.same("layers.1.norm.weight") == ["model.layers.1.norm.weight"]
    assert index.same("transformer.h.0.ln.bias") == ["h.0.ln.bias", "ln.bias"]
    assert index.same("norm.weights") == []
    near = "model.layers.1.mixer.norm.weight"
    assert likeness(near, "backbone.layers.1.norm.weight") > likeness(near, "layers.2.norm.weight")
    assert np.isfinite(likeness("", "a"))
