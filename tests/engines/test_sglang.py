"""The SGLang engine: the models, options and versions that it refuses, its stand-ins, and one
comparison."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang_env
from command import Cli, capture_of, write_few_prompts

from rlk_align.data import data_path
from rlk_align.engines.sglang.limits import check_sglang, check_version
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"


def check(model: Path, options: str = "", **changed: Any) -> None:
    """What happens before an engine with these options starts, for a model whose config.json is
    changed like this."""
    shape = read_shape(model)
    spec = EngineSpec.parse(f"sglang:{options}")
    check_sglang(spec.option, read_config(model) | changed, shape)


def edited(folder: Path, **changed: Any) -> Path:
    """The embedded sparse model with a changed config.json."""
    folder.mkdir()
    for file in SPARSE.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = read_config(SPARSE) | changed
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_dense_layers_of_a_sparse_model_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as raised:
        check(SPARSE)
    assert "ignores mlp_only_layers=[0]" in raised.value.message
    assert "layer 0 sparse" in raised.value.message
    assert "uninitialised memory" in raised.value.message
    every_other = edited(tmp_path / "m", mlp_only_layers=[], decoder_sparse_step=2)
    with pytest.raises(ModelError, match="ignores decoder_sparse_step=2"):
        check(every_other)


def test_a_tied_head_of_a_sparse_model_is_refused_by_name(tmp_path: Path) -> None:
    tied = edited(tmp_path / "tied", mlp_only_layers=[])
    with pytest.raises(ModelError, match="tie_word_embeddings=true for qwen3_moe"):
        check(tied)
    check(edited(tmp_path / "untied", mlp_only_layers=[], tie_word_embeddings=False))


def test_biases_that_sglang_leaves_out_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="ignores mlp_bias=true"):
        check(data_path("model"), mlp_bias=True)
    check(data_path("model"), mlp_bias=False)


def test_a_dense_model_may_tie_its_head() -> None:
    check(data_path("model"), tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("device=cuda,ep=2", "ep=2: experts that are divided among GPUs were not run"),
        ("device=cuda,tp=3", "8 heads cannot be divided among 3 ranks"),
        ("device=cuda,tp=8", "with tp=8 SGLang copies 4 key-value heads to a multiple of 8 on a"),
        ("device=cuda,attention_backend=torch_native", "does not run on device=cuda"),
        ("device=cpu,attention_backend=triton", "does not run on device=cpu"),
        ("device=cuda:1", "device=cuda:1: it computes on the first GPUs that it sees"),
        ("mem_fraction=1.5", "must be below 1"),
        ("ep=2", "cannot compute the experts of one rank"),
        ("tp=3", "8 heads cannot be divided among 3 ranks"),
        ("tp=8", "with tp=8 SGLang pads 4 key-value heads to a multiple of 8 on a CPU"),
    ],
)
def test_options_that_do_not_run_are_refused(options: str, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        check(data_path("model"), options)


def test_an_mlp_that_sglang_pads_is_refused() -> None:
    model, spec = data_path("model"), EngineSpec.parse("sglang")
    other = replace(read_shape(model), intermediate=500)
    with pytest.raises(BadOption, match="pads 500 features of an MLP to a multiple of 32"):
        check_sglang(spec.option, read_config(model), other)


def test_families_that_were_not_run_are_refused() -> None:
    model, option = data_path("model"), EngineSpec.parse("sglang").option
    other = replace(read_shape(model), model_type="mixtral")
    with pytest.raises(ModelError, match="this is a mixtral"):
        check_sglang(option, read_config(model), other)


def test_other_versions_are_refused_by_name() -> None:
    for device, tested, other in (("cpu", "0.5.23", "0.5.17"), ("cuda", "0.5.17", "0.5.23")):
        check_version(tested, device)
        for installed in (other, "0.5.24"):
            said = rf"SGLang {installed} is installed, and only {tested} is supported on .*{device}"
            with pytest.raises(BadOption, match=said):
                check_version(installed, device)


def test_on_a_gpu_nothing_is_padded() -> None:
    check(data_path("model"), "device=cuda,tp=2,attention_backend=fa3")
    check_sglang(
        EngineSpec.parse("sglang:device=cuda,tp=2").option,
        read_config(data_path("model")),
        replace(read_shape(data_path("model")), intermediate=500),
    )


STAND_INS = """
import rlk_align.engines.sglang.boot as boot
print(boot.prepare('cpu', raw=True))
import sgl_kernel, sgl_kernel.kvcacheio, torchvision.transforms.v2.functional
from torchvision.transforms import InterpolationMode
from transformers.utils import is_torchvision_available
print(is_torchvision_available(), boot.prepare('cpu', raw=True))
sgl_kernel.rmsnorm()
"""


def test_a_stand_in_is_announced_and_raises_an_error_when_it_is_called() -> None:
    done = subprocess.run([sys.executable, "-c", STAND_INS], capture_output=True, text=True)
    for name in ("torchvision", "sgl_kernel"):
        assert f"{name} is not installed: an empty stand-in takes its place" in done.stdout
    assert "('torchvision', 'sgl_kernel')\nFalse ()" in done.stdout, done.stdout + done.stderr
    assert "RuntimeError: sgl_kernel.rmsnorm is not installed; this is a stand-in" in done.stderr


@sglang_env.needed
def test_doctor_names_the_stand_ins() -> None:
    command = [str(sglang_env.PYTHON), "-m", "rlk_align", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("sglang"))
    assert "sglang 0.5.23, ready: samples and scores" in line
    assert line.endswith("without torchvision, sgl_kernel (empty stand-ins)")


@pytest.mark.whole_matrix
@sglang_env.needed
def test_sglang_and_hf_are_one_policy(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        *("compare", "--rollout", sglang_env.sglang(), "--train", "hf", "--max-new-tokens", 8),
        *("--prompts", write_few_prompts(tmp_path / "few.jsonl"), "--run-dir", tmp_path / "run"),
    )
    assert done.code == 0, done.out + done.err
    verdict = done.verdict
    assert verdict is not None
    assert verdict["precheck"]["mismatches"] == verdict["breaches"] == []
    assert verdict["controls"]["observer"] == "bitwise"
    assert verdict["controls"]["noise_floor"] == {"rollout": "bitwise", "train": "bitwise"}
    assert verdict["coverage"]["fraction"] == 1.0
    assert verdict["coverage"]["unpaired"] == []
    edges = verdict["edges"]
    assert all(edge["tokens"] == verdict["tokens"] > 40 for edge in edges.values())
    # Stock kernels decode by other sums than they prefill by.
    assert all(0 < edge["max_abs_dlogp"] < 0.2 for edge in edges.values())
    record = capture_of(tmp_path / "run", "rollout").record
    assert record.version == "0.5.23 without torchvision, sgl_kernel"
    assert record.code["layers.0.attn"].file == "sglang/srt/layers/radix_attention.py"
    assert record.code["logits"].file == "sglang/srt/layers/logits_processor.py"
