"""vLLM's own fp8 beside transformers in bf16: weights, activations and the cache. vLLM's build for
CPUs lacks the kernels, which `fp8_engine` adds; a GPU runs its own by tests/gpu/quantised.sh."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Cli, Outcome, command_line, require_engine
from family_models import family_model

from rlk_align.data import data_path

HERE = Path(__file__).parent
MODEL = data_path("model")
QUANTISE = HERE.parents[1] / "fixtures" / "quantise.py"
IMAGE = "the quantiser's image of the other side's weights, bit by bit, in 28 projections"
NO_CACHE = not torch.cpu._is_avx512_supported()
"""Whether vLLM has no cache in fp8 on this processor."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("vllm-fp8")
    lines = (f'{{"id": "{i}", "ids": {[7 * i + k * k for k in range(1, 9)]}}}' for i in range(1, 5))
    (here / "prompts.jsonl").write_text("\n".join(lines))
    installed = here / "site" / "fp8_engine-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8-engine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rlk_align.engines]\nvllm_fp8 = fp8_info:INFO\n")
    return here


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


def quantised(folder: Path, fmt: str, model: Path = MODEL) -> Path:
    """A checkpoint in a format, made by the script that users have."""
    out = folder / f"{model.name}-{fmt}"
    if not out.exists():
        words = [str(QUANTISE), str(model), "--format", fmt, "--out", str(out)]
        words += ["--prompts", str(folder / "prompts.jsonl")] if fmt == "static" else []
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return out


def compared(cli: Cli, folder: Path, options: str, *more: Any, model: Path = MODEL) -> Outcome:
    require_engine("vllm")
    found = [folder / "site", HERE, os.environ.get("PYTHONPATH")]
    return cli(
        "compare", "--model", model, "--prompts", folder / "prompts.jsonl",
        "--max-new-tokens", 8, "--run-dir", folder / "run", "--fresh", "--no-production",
        "--rollout", f"vllm_fp8:{options}", "--train", "hf", *more,
        env={"PYTHONPATH": os.pathsep.join(str(path) for path in found if path)},
    )  # fmt: skip


def said_of(done: Outcome) -> str:
    return " ".join(done.out.split())


def assert_healthy(done: Outcome, operators: int = 144) -> str:
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "pass", done.out
    said = said_of(done)
    assert f"no operator beyond its budget on either side: {operators} of {operators}" in said
    assert "no limit of this contract judges" in said
    return said


def test_weights_that_are_quantised_as_they_are_loaded(cli: Cli, folder: Path) -> None:
    said = assert_healthy(compared(cli, folder, "quantization=fp8_per_tensor"))
    assert IMAGE in said
    assert "with the largest scale of projections that an engine fuses" in said
    assert "the engine quantised the checkpoint's weights as it loaded them: 28" in said
    assert "e4m3 with a scale for each row (Product) in 28 projections" in said
    assert "decode_vs_prefill: the sides differ by quantisation (fp8-activations)" in said


@pytest.mark.whole_matrix
def test_static_scales_of_activations(cli: Cli, folder: Path) -> None:
    said = assert_healthy(compared(cli, folder, f"model={quantised(folder, 'static')}"))
    assert IMAGE in said
    assert "with the largest of their scales: 12 projections" in said
    assert "e4m3 with a static scale (Product) in 28 projections" in said


@pytest.mark.whole_matrix
@pytest.mark.parametrize("fmt", ["tensor", "channel"])
def test_stored_scales_of_tensors_and_of_rows(cli: Cli, folder: Path, fmt: str) -> None:
    said = assert_healthy(compared(cli, folder, f"model={quantised(folder, fmt)}"))
    assert IMAGE in said
    assert f"(fp8-activations, fp8-{fmt})" in said


@pytest.mark.whole_matrix
@pytest.mark.parametrize("stored", [True, False])
def test_blocks_with_a_scale_for_each_group_of_inputs(
    cli: Cli, folder: Path, tmp_path: Path, stored: bool
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = family_model(tmp_path, "qwen3", **sizes)
    here = f"model={quantised(tmp_path, 'block', model)}" if stored else ""
    done = compared(cli, folder, here or "quantization=fp8_per_block", model=model)
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "pass", done.out
    said = said_of(done)
    assert "image of the other side's weights, bit by bit" in said
    assert "e4m3 with a scale for each 128 entries (BlockProduct)" in said


@pytest.mark.skipif(NO_CACHE, reason="vLLM caches keys and values in fp8 on AVX-512 only")
def test_a_cache_in_fp8(cli: Cli, folder: Path) -> None:
    said = assert_healthy(compared(cli, folder, "kv_cache_dtype=fp8_e4m3"))
    assert "kv_cache: rollout float8_e4m3fn (CPUAttentionBackendImpl, vec), cut off" in said
    assert "prefill_vs_train: the sides differ by quantisation (fp8-cache)" in said


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("patch", "code", "words"),
    [
        ("one_scale_moved", 4, "own checkpoint in 1 projection (layers.1.o_proj): they were"),
        ("one_value_moved", 4, "own checkpoint in 1 projection (layers.1.o_proj): they were"),
        ("rows_on_amds_grid", 1, "layers.1.o_proj the rollout side is off"),
        ("rows_not_scaled_back", 1, "layers.1.o_proj the rollout side is off"),
    ],
)
def test_what_goes_wrong_is_named(
    cli: Cli, folder: Path, patch: str, code: int, words: str
) -> None:
    options = f"quantization=fp8_per_tensor,patch=fp8_patches:{patch}"
    done = compared(cli, folder, options)
    assert done.code == code, done.out + done.err
    assert words in said_of(done)


@pytest.mark.whole_matrix
def test_weights_of_another_step_are_named(cli: Cli, folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    moved = tmp_path / "moved"
    moved.mkdir()
    for path in MODEL.iterdir():
        if path.suffix != ".safetensors":
            (moved / path.name).write_bytes(path.read_bytes())
    tensors = load_file(MODEL / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, moved / "model.safetensors", {"format": "pt"})
    done = compared(cli, folder, f"model={quantised(tmp_path, 'tensor', moved)}")
    assert done.code == 4
    said = said_of(done)
    assert "of an earlier step, or by another quantiser, in 1 projection (layers.1.up_proj)" in said
    assert "in 27 projections" in said
