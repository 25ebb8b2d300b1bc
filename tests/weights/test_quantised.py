"""`rlk-align weights` where the synced side is stored in blocks of fp8."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from block_fp8 import BLOCK, write_fp8
from changed_weights import q_proj, save, tensors, trained, unequal
from rlk_kernels.block_fp8 import quantise
from safetensors.torch import load_file, save_file

from rlk_align.data import data_path
from rlk_align.errors import ModelError
from rlk_align.weights.findings import WeightsReport
from rlk_align.weights.pipeline import compare_weights

MODEL = data_path("model")
BASE = tensors()
WEIGHTS = "model.safetensors"


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return write_fp8(tmp_path / "fp8", MODEL)


def compared(a: Path | str, b: Path, **more: Any) -> WeightsReport:
    return compare_weights(str(a), str(b), **more)


def test_an_image_of_what_was_trained_passes(fp8: Path) -> None:
    report = compared(MODEL, fp8)
    assert (report.status, report.counts["quantised"]) == ("pass", 28)
    assert report.counts["equal"] == len(report.findings) - 28
    (detail,) = {f.detail for f in unequal(report).values()}
    assert detail == ("fp8 e4m3 in blocks of 64 x 64, float32 scales: the quantiser's image of A")


def test_a_quantised_checkpoint_is_equal_to_itself(fp8: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(fp8, again)
    report = compared(fp8, again)
    assert report.counts["equal"] == len(report.findings)
    assert report.status == "pass"


def test_what_an_engine_dequantised_is_a_cast(fp8: Path, tmp_path: Path) -> None:
    stored = load_file(fp8 / "model.safetensors")
    values, scales = (stored[f"{q_proj(0)}{end}"] for end in ("", "_scale_inv"))
    wide = scales.repeat_interleave(64, 0).repeat_interleave(64, 1)
    whole = (values.float() * wide).bfloat16()
    b = save(tmp_path / "dequantised", BASE | {q_proj(0): whole})
    found = compare_weights(str(fp8), b).findings
    (of_q,) = (f for f in found if f.name == "layers.0.q_proj")
    assert (of_q.status, of_q.detail) == ("cast", "B is A rounded to bfloat16")


def test_a_stale_image_is_named_with_its_step(tmp_path: Path) -> None:
    for step in (100, 200):
        save(tmp_path / f"checkpoint-{step}", trained(BASE, step))
        config = (MODEL / "config.json").read_bytes()
        (tmp_path / f"checkpoint-{step}/config.json").write_bytes(config)
    fp8 = write_fp8(tmp_path / "synced", tmp_path / "checkpoint-100")
    report = compared(tmp_path / "checkpoint-200", fp8)
    assert report.exit_code == 1
    found = unequal(report)
    assert found["layers.0.q_proj"].status == "stale"
    assert found["layers.0.q_proj"].step == "step 100"
    assert found["layers.0.q_proj"].detail == "the quantiser's image of step 100"


def test_another_quantiser_is_named(tmp_path: Path) -> None:
    fp8 = write_fp8(tmp_path / "fp8", MODEL, lambda w: quantise(w, BLOCK, powers_of_two=True))
    report = compared(MODEL, fp8)
    assert (report.status, report.counts["other"]) == ("fail", 28)
    assert "rounded up to powers of two" in unequal(report)["layers.3.up_proj"].detail


def test_modules_that_a_substring_left_out_are_named(tmp_path: Path) -> None:
    fp8 = write_fp8(
        tmp_path / "fp8", MODEL, left_out=("mlp.gate",), modules_to_not_convert=["mlp.gate"]
    )
    report = compared(MODEL, fp8)
    assert (report.status, report.counts["other"]) == ("fail", 4)
    found = unequal(report)["layers.2.gate_proj"]
    assert found.status == "other"
    assert "the quantiser matched it as a substring" in found.detail
    listed = [f"model.layers.{i}.mlp.gate_proj" for i in range(4)]
    whole = write_fp8(
        tmp_path / "whole", MODEL, left_out=("mlp.gate",), modules_to_not_convert=listed
    )
    assert compared(MODEL, whole).status == "pass"


def test_a_format_that_is_not_read_is_compared_as_it_is_stored(fp8: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(fp8, again)
    for folder in (fp8, again):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fbgemm_fp8"}
        (folder / "config.json").write_text(json.dumps(config))
    report = compared(fp8, again)
    assert report.counts["equal"] == len(report.findings) == len(load_file(fp8 / WEIGHTS))


def test_blocks_of_fused_weights_are_refused(fp8: Path) -> None:
    path = fp8 / "model.safetensors"
    stored = load_file(path)
    start = "model.layers.0.self_attn"
    for end in ("weight", "weight_scale_inv"):
        parts = [stored.pop(f"{start}.{op}_proj.{end}") for op in ("q", "k", "v")]
        joined = torch.cat([p.view(torch.uint8) for p in parts]).view(parts[0].dtype)
        stored[f"{start}.qkv_proj.{end}"] = joined
    save_file(stored, path)
    with pytest.raises(ModelError, match="several operators or layers"):
        compared(MODEL, fp8)
