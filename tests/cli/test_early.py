"""What is wrong with an engine's options is said at once; and what `--help` and `doctor` say."""

from pathlib import Path

import pytest
from conftest import Cli, command_line, require_engine

REFUSED = {
    "hf:attn=flesh": ("attn=flesh is unknown", "eager, sdpa"),
    "hf:padding=middle": ("padding=middle is unknown", "right, left"),
    "megatron:spec=apex": ("spec=apex is unknown", "local, te"),
    "megatron:input=loose": ("input=loose is unknown", "padded, packed"),
    "megatron:sp=1": ("sp=1", "tp=2 or more"),
    "megatron:padding=left,input=packed": ("padding=left with input=packed",),
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


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
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
        *("the embedded model", "the embedded prompts", "vllm, else hf", "megatron, else hf"),
        *("by the lower-precision dtype", "below rlk-runs", "all three", "on GPUs"),
    ),
    "capture": ("the embedded model", "the embedded prompts", "sample"),
}


@pytest.mark.parametrize("command", DEFAULTS)
def test_help_shows_the_defaults(light: Cli, command: str) -> None:
    said = light(command, "--help", env={"COLUMNS": "200"}).out
    for default in DEFAULTS[command]:
        assert f"[default: ({default})]" in said or f"[default: {default}]" in said, said


def test_doctor_says_what_each_engine_can_do(cli: Cli) -> None:
    for name in ("vllm", "megatron"):
        require_engine(name)
    lines = cli("doctor", env={"COLUMNS": "200"}).out.splitlines()
    said = {line.split()[0]: line.rstrip() for line in lines if "ready" in line}
    for name in ("fsdp", "megatron"):
        assert said[name].endswith("ready: scores")
    for name in ("hf", "vllm"):
        assert said[name].endswith("ready: samples and scores")
