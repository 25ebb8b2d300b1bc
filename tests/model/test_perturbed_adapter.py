"""A copy of an adapter with numbers in each B of zeros."""

from pathlib import Path

import pytest
import torch
from lora import changed_adapter, write_adapter
from safetensors.torch import load_file

from rlk_align.api.pair import Pair, prepare
from rlk_align.data import data_path
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.adapter import TENSORS, read_settings
from rlk_align.model.perturbed_adapter import SIZE, perturb_adapter


def some_zero(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """B of q_proj in bfloat16, and zero."""
    return {n: x.bfloat16() * (0 if "q_proj.lora_B" in n else 1) for n, x in factors.items()}


def test_only_b_of_zeros_is_changed(tmp_path: Path) -> None:
    targets = ("q_proj", "down_proj")
    made = write_adapter(tmp_path / "a", data_path("model"), alpha=12.0, targets=targets)
    source = changed_adapter(tmp_path / "b", made, some_zero)
    changed = perturb_adapter(str(source), tmp_path / "c")
    before, after = (load_file(tmp_path / f / TENSORS) for f in "bc")
    assert len(changed) == 4
    assert after.keys() == before.keys()
    for name, value in after.items():
        if name not in changed:
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, before[name])
            continue
        assert "q_proj.lora_B" in name
        assert value.shape == before[name].shape
        # Rank 4, scale 3.
        assert abs(float(value.std()) * 3.0 * 2.0 / SIZE - 1) < 0.1
        assert abs(float(value.mean())) < 0.2 * float(value.std())
    assert not torch.equal(*(after[name] for name in changed[:2]))
    assert read_settings(str(tmp_path / "c")) == read_settings(str(source))
    # The same again, also where the other side's copy is made.
    assert perturb_adapter(str(source), tmp_path / "d") == changed
    assert (tmp_path / "d" / TENSORS).read_bytes() == (tmp_path / "c" / TENSORS).read_bytes()
    assert perturb_adapter(str(tmp_path / "c"), tmp_path / "e") == []
    with pytest.raises(ModelError, match="is not an adapter"):
        perturb_adapter(str(tmp_path), tmp_path / "f")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("hf", "--perturb-lora: hf has no lora=PATH, and the adapters of both sides are changed"),
        ("hf:lora={a}", "--perturb-lora: no B of .* is all zeros"),
    ],
)
def test_what_cannot_be_perturbed_is_refused(tmp_path: Path, train: str, words: str) -> None:
    path = write_adapter(tmp_path / "a", data_path("model"), targets=("q_proj",))
    zero = changed_adapter(tmp_path / "z", path, some_zero)
    pair = Pair(
        rollout=f"hf:lora={zero}",
        train=train.format(a=path),
        run_dir=tmp_path / "run",
        perturb_lora=True,
    )
    with pytest.raises(BadOption, match=words):
        prepare(pair, [], print)
