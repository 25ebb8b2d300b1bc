"""The real SGLang by itself, with the kernels: every way to compute a token's log-prob has the same
bits, and they are those of HF transformers with the kernels."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sglang_env
import torch
from changed_weights import trained
from random_model import write_random_model
from safetensors.torch import load_file, save_file

from rlk_align.data import data_path

pytestmark = [sglang_env.needed, pytest.mark.whole_matrix, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 12, 33, 40)
NEW = 8


def python(
    script: str, *words: object, ranks: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    paths = (ROOT, ROOT / "kernels", ROOT / "tests/support")
    variables = {
        **os.environ,
        **{"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        **environment,
    }
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    launch = several if ranks > 1 else ()
    words = [sglang_env.PYTHON, *launch, Path(__file__).with_name(script), *words]
    return subprocess.run(
        [str(word) for word in words], env=variables, capture_output=True, text=True, timeout=400
    )


def prompts() -> list[list[int]]:
    made = torch.Generator().manual_seed(3)
    return [torch.randint(2, 1000, (n,), generator=made).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Name of a model -> its checkpoint, and one with the weights of a later step."""
    folder = tmp_path_factory.mktemp("sglang")

    def stored(name: str) -> tuple[Path, Path]:
        model = data_path("model") if name == "dense" else folder / name
        if not model.exists():
            write_random_model(
                model, **sglang_env.EVERY_LAYER_SPARSE, dtype="bfloat16", vocab_size=1031
            )
        changed = folder / f"{name}-changed"
        if not changed.exists():
            changed.mkdir()
            tensors: dict[str, torch.Tensor] = {}
            for file in model.glob("*.safetensors"):
                tensors |= load_file(file)
            save_file(trained(tensors, 1), changed / "model.safetensors")
            (changed / "config.json").write_text((model / "config.json").read_text())
        return model, changed

    return stored


MIXED = {"page_size": 1, "enable_mixed_chunk": True, "chunked_prefill_size": 16}


@pytest.mark.parametrize(
    ("name", "dtype", "settings", "ranks"),
    [
        ("dense", "bfloat16", {"page_size": 16}, 1),
        ("dense", "float32", {"page_size": 1}, 1),
        ("sparse", "bfloat16", {"page_size": 1}, 1),
        ("sparse", "float32", {"page_size": 16}, 1),
        ("dense", "float16", {"page_size": 4}, 1),
        ("dense", "bfloat16", MIXED, 1),
        ("dense", "bfloat16", {"page_size": 16}, 2),
        ("sparse", "bfloat16", {"page_size": 1}, 2),
    ],
)
def test_every_pass_has_the_same_bits(
    models: Any, tmp_path: Path, name: str, dtype: str, settings: dict[str, Any], ranks: int
) -> None:
    model, changed = models(name)
    job = {
        **{"model": str(model), "changed": str(changed), "prompts": prompts(), "new_tokens": NEW},
        "settings": settings | {"dtype": dtype},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = python("sglang_bits.py", tmp_path / "job.json", tmp_path / "found.json", ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    said = found["said"]
    assert [len(row) for row in said["decode"]] == [8 * NEW] * len(LENGTHS)
    for other in ("prefill", "chunks", "cached prefix", "hf", "sums inside"):
        assert said[other] == said["decode"], other
    assert (said["no sums"] == said["decode"]) == (ranks == 1)
    assert said["cool"] == said["hf of cool"] != said["decode"]
    assert said["greedy"] == said["top"] == said["hf of greedy"] == said["retracted"]
    assert found["retractions"] > 1
    assert found["cached"] > 2 * NEW
    chunked = settings.get("chunked_prefill_size") == 16
    assert found["steps"]["chunks"] > 4
    assert chunked or found["steps"]["prefill"] == 1

    operators = found["replaced"]
    assert {"embed", "layers.1.q_norm", "layers.0.attn", "logits", "logprob"} <= set(operators)
    assert ("layers.1.router" in operators) == (name == "sparse")
    left = "layers.0." if name == "sparse" else "layers.0.act"
    assert found["named"].startswith(f"the engine still computes {left}")
    assert said["a kernel left out"] != said["decode"]

    assert "has the kernels already" in found["twice"]
    layers = 2 if name == "sparse" else 4
    assert found["left"] == [*(f"layers.{i}.mlp_norm" for i in range(layers)), "logprob"]
    assert said["excluded"] != said["decode"]

    assert found["restored"]
    assert said["stock again"] == said["stock"]
    assert said["stock"] != said["hf of stock"]
    if name == "dense":
        assert said["stock"] != said["stock prefill"]

    assert said["updated"] == said["updated prefill"] == said["hf of updated"]
    assert said["updated, old tokens"] != said["decode"] == said["from disk"]


def test_a_request_draws_the_same_tokens_in_every_batch(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(5)
    requests = [torch.randint(2, 1000, (5 + n % 37,), generator=made).tolist() for n in range(64)]
    job = {"model": str(data_path("model")), "prompts": requests, "new_tokens": NEW}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = python("sglang_draws.py", tmp_path / "job.json", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    draws = found["draws"]
    together = draws["together"]
    assert [len(tokens) for tokens, _ in together] == [NEW] * 64
    assert len({tuple(tokens) for tokens, _ in together}) > 48
    for name in ("alone", "seven", "chunks", "retracted"):
        assert draws[name] == together, name
    assert found["retractions"] > 1
    # Greedy requests draw nothing, and the others draw from a generator that all share.
    own = draws["SGLang's own"]
    same = [i % 6 for i in range(64) if own[i][0] == together[i][0]]
    assert len(same) < 32
    assert {4} <= {*same}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_in_processes_of_its_own_gets_the_kernels_by_the_plug_in(
    tmp_path: Path, ranks: int
) -> None:
    """A log-prob travels as a double that holds its fp32 bits."""
    found = {}
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * ranks)}
    for switch in ("1", "0"):
        job = {"model": str(data_path("model")), "prompts": prompts(), "new_tokens": NEW}
        job |= {"settings": {"dtype": "bfloat16", "page_size": 16, "tp_size": ranks}}
        (tmp_path / "job.json").write_text(json.dumps(job))
        answer = tmp_path / f"found-{switch}.json"
        bound |= {"RLK_KERNELS": switch}
        done = python("sglang_engine.py", tmp_path / "job.json", answer, **bound)
        assert answer.exists(), done.stderr[-4000:]
        found[switch] = json.loads(answer.read_text())
    on, off = found["1"], found["0"]
    assert on["decode"] == on["prefill"]
    assert len(on["replaced"]) == 64
    assert off["decode"] != off["prefill"]
    assert "RLK_KERNELS=1 was not set" in off["refusal"]


def test_a_refused_setting_ends_the_engine_before_the_model_is_loaded(tmp_path: Path) -> None:
    job = {"model": str(data_path("model")), "prompts": prompts(), "new_tokens": NEW}
    job |= {"settings": {"dtype": "bfloat16", "is_embedding": True}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = python("sglang_engine.py", tmp_path / "job.json", tmp_path / "x", RLK_KERNELS="1")
    assert not (tmp_path / "x").exists()
    assert "is_embedding=True: only generation is supported" in done.stderr
    assert "Loading safetensors" not in done.stderr
    assert "Multi-thread loading shards" not in done.stderr
