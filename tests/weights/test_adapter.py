"""LoRA adapters: the dtype and order in which one was merged, or that it was not merged."""

import json
from pathlib import Path

import pytest
import torch
from changed_weights import Tensors, q_proj, save, save_adapter, tensors, unequal

from rlk_align.errors import ModelError
from rlk_align.weights.adapter import ways
from rlk_align.weights.findings import Finding
from rlk_align.weights.pipeline import compare_weights

BASE = tensors()
MODULE = "model.layers.1.self_attn.q_proj"
NAME = q_proj(1)
RANK, SCALE = 8, 3.0


def factors(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out, width = BASE[NAME].shape
    a = torch.randn(RANK, width, generator=generator) * 0.05
    b = torch.randn(out, RANK, generator=generator) * 0.05
    return a.to(dtype), b.to(dtype)


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, order: str
) -> torch.Tensor:
    """Merges like trainers, with torch's products in that dtype."""
    weight, a, b = weight.to(dtype), a.to(dtype), b.to(dtype)
    if order == "product":
        return weight + (b @ a) * SCALE
    return weight + (b * SCALE) @ a


def compared(tmp_path: Path, base: Tensors, value: torch.Tensor, adapter: str) -> Finding:
    a = save(tmp_path / "a", base)
    b = save(tmp_path / "b", base | {NAME: value})
    report = compare_weights(a, b, adapter=adapter)
    [found] = unequal(report).values()
    assert found.name == "layers.1.q_proj"
    assert report.exit_code == (0 if found.status == "merged" else 1)
    return found


def test_a_merge_in_float32(tmp_path: Path) -> None:
    a, b = factors()
    adapter = save_adapter(tmp_path / "adapter", {MODULE: (a, b)})
    for order in ("product", "factor"):
        value = merged(BASE[NAME], a, b, torch.float32, order).bfloat16()
        found = compared(tmp_path / order, BASE, value, adapter)
        assert found.status == "merged"
        expected = "W in bfloat16, added up in float32, rounded once to bfloat16"
        assert found.detail.startswith(f"the adapter: {expected}")


@pytest.mark.parametrize(
    ("order", "words"), [("product", "scale · (B · A)"), ("factor", "(scale · B) · A")]
)
def test_a_merge_in_bfloat16(tmp_path: Path, order: str, words: str) -> None:
    a, b = factors(dtype=torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", {MODULE: (a, b)})
    value = merged(BASE[NAME], a, b, torch.bfloat16, order)
    found = compared(tmp_path, BASE, value, adapter)
    assert found.status == "merged"
    assert found.detail.startswith(f"the adapter: W + {words} with each step in bfloat16")


@pytest.mark.parametrize("order", ["product", "factor"])
def test_a_float32_master_with_the_adapter_merged_on_the_bfloat16_grid(
    tmp_path: Path, order: str
) -> None:
    master = {n: v.float() * 1.001 for n, v in BASE.items()}
    a, b = factors()
    adapter = save_adapter(tmp_path / "adapter", {MODULE: (a, b)})
    on_the_grid = merged(master[NAME], a, b, torch.bfloat16, order).float()
    found = compared(tmp_path / "low", master, on_the_grid, adapter)
    assert found.status == "merged"
    assert "with each step in bfloat16" in found.detail
    exact = compared(
        tmp_path / "exact", master, merged(master[NAME], a, b, torch.float32, order), adapter
    )
    assert exact.detail.startswith("the adapter: W in float32, added up in float32")
    rounded_base = merged(master[NAME].bfloat16().float(), a, b, torch.float32, order)
    found = compared(tmp_path / "base", master, rounded_base, adapter)
    assert found.detail.startswith("the adapter: W in bfloat16, added up in float32")


def test_an_adapter_that_was_not_delivered(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", {MODULE: factors()})
    report = compare_weights(
        save(tmp_path / "a", BASE), save(tmp_path / "b", BASE), adapter=adapter
    )
    [found] = unequal(report).values()
    assert (found.name, found.status, found.step) == ("layers.1.q_proj", "stale", "the base")
    assert report.exit_code == 1


def test_an_adapter_of_another_step(tmp_path: Path) -> None:
    """A factor differs by a thousandth, so that the result differs by less than a rounding."""
    a, b = factors()
    adapter = save_adapter(tmp_path / "adapter", {MODULE: (a, b * 1.001)})
    value = merged(BASE[NAME], a, b, torch.float32, "product").bfloat16()
    assert compared(tmp_path, BASE, value, adapter).status == "other"


def test_one_entry_that_no_merge_gives(tmp_path: Path) -> None:
    a, b = factors()
    adapter = save_adapter(tmp_path / "adapter", {MODULE: (a, b)})
    value = merged(BASE[NAME], a, b, torch.float32, "product").bfloat16()
    value.view(torch.int16)[7, 7] += 2
    assert compared(tmp_path, BASE, value, adapter).status == "other"


def test_an_adapter_before_its_first_step_changes_nothing(tmp_path: Path) -> None:
    a, b = factors()
    adapter = save_adapter(tmp_path / "adapter", {MODULE: (a, torch.zeros_like(b))})
    report = compare_weights(
        save(tmp_path / "a", BASE), save(tmp_path / "b", BASE), adapter=adapter
    )
    assert report.counts["equal"] == len(BASE)


def test_the_scale_of_rslora(tmp_path: Path) -> None:
    a, b = factors()
    adapter = save_adapter(
        tmp_path / "adapter", {MODULE: (a, b)}, use_rslora=True, lora_alpha=SCALE * RANK**0.5
    )
    value = merged(BASE[NAME], a, b, torch.float32, "product").bfloat16()
    assert compared(tmp_path, BASE, value, adapter).status == "merged"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"r": 4}, "does not have rank 4"),
        ({"lora_alpha": "x"}, "does not describe a LoRA"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    adapter = Path(save_adapter(tmp_path / "adapter", {MODULE: factors()}))
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    a = save(tmp_path / "a", BASE)
    with pytest.raises(ModelError, match=words):
        compare_weights(a, a, adapter=str(adapter))
    with pytest.raises(ModelError, match="is not an adapter"):
        compare_weights(a, a, adapter=a)


def test_every_way_of_merging_is_another() -> None:
    for base, result in (("bfloat16",) * 2, ("float32", "bfloat16"), ("float32",) * 2):
        assert len(set(map(str, ways(base, result)))) == len(ways(base, result))
