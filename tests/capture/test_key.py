"""A capture's key: equivalent requests share a capture, and different ones do not."""

import shutil
from pathlib import Path

import pytest

from rlk_align.capture import key
from rlk_align.capture.request import CaptureRequest
from rlk_align.data import data_path
from rlk_align.engines.info import EngineInfo
from rlk_align.engines.spec import EngineSpec

PROMPTS = data_path("prompts.jsonl")


def key_of(text: str) -> str:
    """The key for that engine on the embedded model, whose checkpoint is bfloat16."""
    spec = EngineSpec.parse(text)
    request = CaptureRequest(engine=spec, model="", prompts=PROMPTS)
    return key.capture_key(request, spec.canonical("bfloat16"), data_path("model"), None)


@pytest.fixture(autouse=True)
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "engine_versions", lambda spec: {"torch": "1"})


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("vllm", "vllm:dtype=bfloat16"),
        ("vllm", "vllm:tp=1,dtype=auto"),
        ("megatron", "megatron:batch=8,tp=1"),
        ("megatron:tp=2,batch=4", "megatron:batch=4,tp=2"),
        ("hf", "hf:attn=sdpa,padding=right,timeout=5"),
        ("fsdp:dp=2", "fsdp:dp=2,port=2000"),
    ],
)
def test_what_says_the_same_is_one_capture(text: str, same: str) -> None:
    assert key_of(text) == key_of(same)


def test_other_options_are_other_captures() -> None:
    texts = [
        *("vllm", "vllm:dtype=float32", "vllm:tp=2", "megatron", "megatron:batch=4"),
        *("megatron:tp=2", "megatron:tp=2,sp=1", "hf", "hf:attn=eager", "hf:device=cpu"),
    ]
    assert len({key_of(t) for t in texts}) == len(texts)


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("engines/vllm/taps.py", {"vllm"}),
        ("engines/hf/taps.py", {"hf", "fsdp", "deepspeed"}),
        ("engines/deepspeed/engine.py", {"deepspeed"}),
        ("engines/sglang/taps.py", {"sglang"}),
        ("engines/megatron/layout.py", {"megatron"}),
        ("engines/common/rows.py", {"hf", "fsdp", "deepspeed", "vllm", "megatron", "sglang"}),
        ("engines/process/plan.py", {"hf", "fsdp", "deepspeed", "vllm", "megatron", "sglang"}),
        ("trace/writer.py", {"hf", "fsdp", "deepspeed", "vllm", "megatron", "sglang"}),
        ("model/sites.py", {"hf", "fsdp", "deepspeed", "vllm", "megatron", "sglang"}),
        ("judge/verdict.py", set()),
    ],
)
def test_an_edited_adapter_makes_another_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, changed: set[str]
) -> None:
    package = tmp_path / "rlk_align"
    ignored = shutil.ignore_patterns("__pycache__", "data")
    shutil.copytree(key.PACKAGE, package, ignore=ignored)
    monkeypatch.setattr(key, "PACKAGE", package)

    def find(module: str) -> object:
        path = tmp_path / Path(*module.split(".")).with_suffix(".py")
        return type("Found", (), {"origin": str(path)})

    monkeypatch.setattr(key.importlib.util, "find_spec", find)
    engines = ("hf", "fsdp", "deepspeed", "vllm", "megatron", "sglang")
    before = {e: key_of(e) for e in engines}
    path = package / file
    path.write_text(path.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    assert {e for e in engines if key_of(e) != before[e]} == changed


def test_another_device_makes_another_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_gpus", lambda: [])
    monkeypatch.setattr(key, "_processor", lambda: "one")
    before, on_cpu = key_of("hf"), key_of("hf:device=cpu")
    monkeypatch.setattr(key, "_gpus", lambda: ["NVIDIA H200"])
    assert key_of("hf") != before
    assert key_of("hf:device=cpu") == on_cpu, "it does not look at GPUs"
    monkeypatch.setattr(key, "_processor", lambda: "another")
    assert key_of("hf:device=cpu") != on_cpu


def test_what_a_patch_may_import_makes_another_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import beside")
    (tmp_path / "beside.py").write_text("S = 1.0")
    first = key_of("hf:patch=mine:f")
    assert key_of("hf:patch=mine:f") == first
    (tmp_path / "beside.py").write_text("S = 1.5")
    second = key_of("hf:patch=mine:f")
    assert second != first
    package = tmp_path / "mine"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "f.py").write_text("S = 1.0")
    third = key_of("hf:patch=mine:f")
    assert third not in (first, second)
    (package / "deep" / "f.py").write_text("S = 1.5")
    assert key_of("hf:patch=mine:f") != third


def test_a_patch_without_a_source_is_never_taken_from_an_earlier_capture() -> None:
    assert key_of("hf:patch=nowhere.to.be.found:f") != key_of("hf:patch=nowhere.to.be.found:f")


def test_the_environment_that_engines_read_makes_another_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = key_of("hf")
    monkeypatch.setenv("SOME_OTHER_VARIABLE", "1")
    assert key_of("hf") == first
    for name in ("ONEDNN_MAX_CPU_ISA", "VLLM_X", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "77")
            assert key_of("hf") != first, name
    assert key_of("hf") == first


def test_prompts_of_another_kind_make_another_capture(tmp_path: Path) -> None:
    spec, found = EngineSpec.parse("hf"), set()
    for name in ("p.txt", "p.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
        request = CaptureRequest(engine=spec, model="", prompts=tmp_path / name)
        found.add(key.capture_key(request, spec, data_path("model"), None))
    assert len(found) == 2


def test_any_edited_file_of_an_engines_package_makes_another_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a top-level module, only its own file counts."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs").mkdir()
    for name in ("theirs/engine.py", "theirs/model.py", "alone.py", "beside.py"):
        (tmp_path / name).write_text("")
    for target, edited, changed in (
        ("theirs.engine:E", "theirs/model.py", True),
        ("alone:E", "beside.py", False),
        ("alone:E", "alone.py", True),
    ):
        monkeypatch.setattr(EngineSpec, "info", EngineInfo(target))
        before = key.adapter_digest(EngineSpec("hf"))
        (tmp_path / edited).write_text("S = 1.5")
        assert (key.adapter_digest(EngineSpec("hf")) != before) == changed, edited
