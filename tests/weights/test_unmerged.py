"""What merging and unmerging an adapter leaves in a base of 16 bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from changed_weights import Tensors, q_proj, save, save_adapter, tensors, unequal

from rlk_align.report.weights import weights_document
from rlk_align.weights.findings import Finding, WeightsReport
from rlk_align.weights.pipeline import compare_weights

BASE = tensors()
MODULES = {q_proj(i): f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}
RANK, SCALE = 8, 3.0
LEFT = "what merging and unmerging the adapter once in bfloat16 leaves"
MAYBE = "merging and unmerging other adapters in bfloat16 may have left that"

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def factors(seed: int = 0, size: float = 0.05) -> Factors:
    """Module -> (A, B) of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in MODULES.items():
        out, width = BASE[name].shape
        a = torch.randn(RANK, width, generator=generator) * 0.05
        made[module] = a, torch.randn(out, RANK, generator=generator) * size
    return made


def merge_and_unmerge(weights: Tensors, adapter: Factors, safe: bool = False) -> Tensors:
    """As PEFT 0.21 does, in place of a module's weight: a merge adds the update in float32, or with
    `safe` rounded; unmerging subtracts it rounded."""
    after = dict(weights)
    for name, module in MODULES.items():
        a, b = adapter[module]
        weight, delta = weights[name].clone(), (b @ a) * SCALE
        weight += delta.to(weight.dtype) if safe else delta
        weight -= delta.to(weight.dtype)
        after[name] = weight
    return after


def compared(tmp_path: Path, adapter: Factors, held: Tensors) -> WeightsReport:
    return compare_weights(
        save(tmp_path / "a", BASE), save(tmp_path / "b", held),
        adapter=save_adapter(tmp_path / "adapter", adapter),
    )  # fmt: skip


def found(report: WeightsReport) -> dict[str, Finding]:
    assert report.exit_code == 1
    return unequal(report)


@pytest.mark.parametrize("safe", [False, True])
def test_one_merge_and_unmerge_is_named(tmp_path: Path, safe: bool) -> None:
    adapter = factors()
    held = merge_and_unmerge(BASE, adapter, safe)
    report = compared(tmp_path, adapter, held)
    findings = found(report)
    [step] = weights_document(report).next_steps
    assert "restore the base after each merge" in step
    assert set(findings) == {"layers.0.q_proj", "layers.1.q_proj"}
    for finding in findings.values():
        assert finding.status == "unmerged"
        assert finding.detail.endswith(LEFT)
        assert finding.detail.startswith("differs by at most ")
    share = (held[q_proj(0)] != BASE[q_proj(0)]).double().mean()
    assert share > 0.01
    assert f"in {share:.2%} of its entries" in findings["layers.0.q_proj"].detail


def test_that_of_peft_is_named(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = factors()
    held = dict(BASE)
    for name, module in MODULES.items():
        linear = torch.nn.Linear(*reversed(BASE[name].shape), bias=False, dtype=torch.bfloat16)
        linear.weight.data = BASE[name].clone()
        config = peft.LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules=["0"])
        model = peft.get_peft_model(torch.nn.Sequential(linear), config)
        layer = model.base_model.model[0]
        a, b = adapter[module]
        layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = a, b
        model.merge_adapter()
        model.unmerge_adapter()
        held[name] = linear.weight.detach()
    findings = found(compared(tmp_path, adapter, held))
    assert {f.status for f in findings.values()} == {"unmerged"}
    assert len(findings) == len(MODULES)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "an entry by two ulp": lambda w: w.view(torch.int16)[7, 7].add_(2),
    "a row scaled by 1.01": lambda w: w[3].mul_(1.01),
    "every entry by one ulp away from zero": lambda w: w.view(torch.int16).add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weight_besides_is_not_excused(tmp_path: Path, change: str) -> None:
    adapter = factors()
    held = merge_and_unmerge(BASE, adapter)
    CHANGES[change](held[q_proj(1)])
    findings = found(compared(tmp_path, adapter, held))
    assert findings["layers.0.q_proj"].status == "unmerged"
    assert findings["layers.1.q_proj"].status == "other"


def test_another_module_is_not_excused(tmp_path: Path) -> None:
    adapter = factors()
    held = merge_and_unmerge(BASE, adapter)
    adapter.pop(MODULES[q_proj(1)])
    finding = found(compared(tmp_path, adapter, held))["layers.1.q_proj"]
    assert finding.status == "other"
    assert "merging" not in finding.detail


def test_several_merges_are_suspected_only(tmp_path: Path) -> None:
    held = BASE
    for seed in range(5):
        held = merge_and_unmerge(held, factors(seed, size=0.005))
    findings = found(compared(tmp_path, factors(5, size=0.005), held))
    assert {f.status for f in findings.values()} == {"other"}
    assert all(MAYBE in f.detail for f in findings.values())


def test_a_change_to_one_side_and_a_large_one_are_not_suspected(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    held = dict(BASE)
    held[q_proj(0)] = BASE[q_proj(0)] + (BASE[q_proj(0)].abs() * 2**-8).bfloat16()
    noise = 1e-2 * torch.randn(BASE[q_proj(1)].shape, generator=generator)
    held[q_proj(1)] = (BASE[q_proj(1)].float() + noise).bfloat16()
    findings = found(compared(tmp_path, factors(size=0.005), held))
    assert len(findings) == 2
    assert all(f.status == "other" and "merging" not in f.detail for f in findings.values())
