"""Experts in each convention: one tensor for each, stacked, and Megatron's."""

import json
from pathlib import Path

import pytest
import torch
from changed_weights import Tensors, save, unequal
from safetensors.torch import load_file
from stacked_experts import stacked

from rlk_align.model.shape import read_shape
from rlk_align.weights.naming import pieces
from rlk_align.weights.pipeline import compare_weights

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
EXPERTS = "model.layers.2.mlp.experts"


@pytest.fixture(scope="module")
def base() -> Tensors:
    return load_file(SPARSE / "model.safetensors")


def stored(folder: Path, values: Tensors) -> str:
    """A checkpoint of the sparse model with these tensors."""
    where = save(folder, values)
    (folder / "config.json").write_bytes((SPARSE / "config.json").read_bytes())
    return where


def megatron(values: Tensors, grouped: bool) -> Tensors:
    """The experts with Megatron's names, one after another or in one grouped module."""
    kept = {n: v for n, v in values.items() if ".experts." not in n}
    for i in (1, 2, 3):
        of, here = f"model.layers.{i}.mlp.experts", f"decoder.layers.{i}.mlp"
        kept[f"{here}.router.weight"] = kept.pop(f"model.layers.{i}.mlp.gate.weight")
        for e in range(8):
            gate, up, down = (
                values[f"{of}.{e}.{op}.weight"] for op in ("gate_proj", "up_proj", "down_proj")
            )
            for linear, weight in (("linear_fc1", torch.cat([gate, up])), ("linear_fc2", down)):
                one = f"{here}.experts.local_experts.{e}.{linear}.weight"
                kept[f"{here}.experts.{linear}.weight{e}" if grouped else one] = weight
    return kept


@pytest.mark.parametrize("convention", ["stacked", "megatron", "grouped"])
def test_an_expert_is_found_in_every_convention(
    tmp_path: Path, base: Tensors, convention: str
) -> None:
    def convert(values: Tensors) -> Tensors:
        return (
            stacked(values) if convention == "stacked" else megatron(values, convention[0] == "g")
        )

    a = stored(tmp_path / "a", base)
    report = compare_weights(a, stored(tmp_path / "b", convert(base)))
    assert (report.status, report.counts["equal"]) == ("pass", len(report.findings))
    # 8 experts of three layers, each with three products.
    assert sum(".experts." in f.name for f in report.findings) == 8 * 3 * 3
    name = f"{EXPERTS}.5.up_proj.weight"
    wrong = base | {name: base[name] + 1}
    [found] = unequal(compare_weights(a, stored(tmp_path / "c", convert(wrong)))).values()
    assert (found.name, found.status) == ("layers.2.experts.5.up_proj", "other")


def test_two_experts_that_are_swapped(tmp_path: Path, base: Tensors) -> None:
    names = [f"{EXPERTS}.{e}.gate_proj.weight" for e in (0, 1)]
    wrong = base | {names[0]: base[names[1]], names[1]: base[names[0]]}
    a, b = stored(tmp_path / "a", base), stored(tmp_path / "b", stacked(wrong))
    found = unequal(compare_weights(a, b))
    assert set(found) == {f"layers.2.experts.{e}.gate_proj" for e in (0, 1)}
    assert "layers.2.experts.1.gate_proj" in found["layers.2.experts.0.gate_proj"].detail


def test_mixtrals_names(tmp_path: Path) -> None:
    config = json.loads((SPARSE / "config.json").read_text())
    config |= {"model_type": "mixtral", "intermediate_size": 160}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, of = read_shape(tmp_path), "model.layers.1.block_sparse_moe"
    names = {"gate": "router", "experts.3.w1": "experts.3.gate_proj"}
    names |= {"experts.3.w3": "experts.3.up_proj", "experts.7.w2": "experts.7.down_proj"}
    for name, parameter in names.items():
        (piece,) = pieces(f"{of}.{name}.weight", 2, shape)
        assert (piece.parameter, piece.rows, piece.layer) == (f"layers.1.{parameter}", (), None)


def test_names_of_corrected_scores_and_shared_experts(tmp_path: Path) -> None:
    config = json.loads((SPARSE / "config.json").read_text())
    config |= {"model_type": "glm4_moe", "n_routed_experts": 8, "n_shared_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    here, there = "model.layers.1.mlp", "decoder.layers.1.mlp"
    whole = {
        f"{here}.gate.e_score_correction_bias": (1, "experts"),
        f"{there}.router.expert_bias": (1, "experts"),
        f"{there}.router.weight": (2, "router"),
        f"{here}.shared_experts.down_proj.weight": (2, "shared_down_proj"),
        f"{there}.shared_experts.linear_fc2.weight": (2, "shared_down_proj"),
    }
    for name, (dimensions, parameter) in whole.items():
        (piece,) = pieces(name, dimensions, shape)
        assert (piece.parameter, piece.rows) == (f"layers.1.{parameter}", ()), name
    # Two experts of 160 features are one of 320.
    for name in (f"{here}.shared_experts.gate_up_proj", f"{there}.shared_experts.linear_fc1"):
        both = [(p.parameter, p.rows) for p in pieces(f"{name}.weight", 2, shape)]
        assert both == [
            ("layers.1.shared_gate_proj", ((0, 320),)),
            ("layers.1.shared_up_proj", ((320, 640),)),
        ]


def test_stacks_of_columns_in_turn_biases_and_sinks(tmp_path: Path) -> None:
    config = json.loads((SPARSE / "config.json").read_text())
    config |= {"model_type": "gpt_oss", "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"mlp_only_layers": []}
    experts, inner, hidden = 8, 16, config["hidden_size"]
    here = "model.layers.0.mlp"
    weights, biases = torch.randn(2, experts, inner, hidden), torch.randn(2, experts, inner)
    down, of_down = torch.randn(experts, hidden, inner), torch.randn(experts, hidden)
    beside = {
        "model.layers.0.self_attn.sinks": torch.randn(config["num_attention_heads"]),
        f"{here}.router.weight": torch.randn(experts, hidden),
        f"{here}.router.bias": torch.randn(experts),
    }
    whole = {
        f"{here}.experts.gate_up_proj": torch.stack([*weights], 2).flatten(1, 2).mT.contiguous(),
        f"{here}.experts.gate_up_proj_bias": torch.stack([*biases], 2).flatten(1),
        f"{here}.experts.down_proj": down.mT.contiguous(),
        f"{here}.experts.down_proj_bias": of_down,
    }
    one_by_one = {
        f"{here}.experts.{e}.{op}.{kind}": values[e].clone()
        for op, *both in (
            ("gate_proj", weights[0], biases[0]),
            ("up_proj", weights[1], biases[1]),
            ("down_proj", down, of_down),
        )
        for kind, values in zip(("weight", "bias"), both, strict=True)
        for e in range(experts)
    }
    name = f"{here}.experts.3.gate_proj.weight"
    wrong = one_by_one | {name: one_by_one[name] + 1}
    folders = [
        save(tmp_path / side, tensors | beside)
        for side, tensors in (("a", whole), ("b", one_by_one), ("c", wrong))
    ]
    for folder in folders:
        (Path(folder) / "config.json").write_text(json.dumps(config))
    report = compare_weights(*folders[:2])
    names = {f.name for f in report.findings}
    assert (report.status, len(names)) == ("pass", 3 + 6 * experts)
    assert {"layers.0.attn", "layers.0.router.bias", "layers.0.experts.3.up_proj.bias"} <= names
    [found] = unequal(compare_weights(folders[0], folders[2])).values()
    assert found.name == "layers.0.experts.3.gate_proj"
