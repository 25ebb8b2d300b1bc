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
