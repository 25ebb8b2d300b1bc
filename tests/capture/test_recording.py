"""A side of a comparison: an engine, or `replay:path=RUN`."""

from pathlib import Path

import pytest
from synthetic import CONTRACT, compared_run

import rlk_align
from rlk_align.api.options import side
from rlk_align.api.pair import Pair, prepare
from rlk_align.capture.capture import capture
from rlk_align.capture.recording import Recording, parse_side
from rlk_align.engines.registry import ENGINES
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, CorruptTrace, UnknownEngine
from rlk_align.model.edges import EDGES
from rlk_align.progress import silent
from rlk_align.trace.run import Run


def test_a_side_is_an_engine_or_a_recording() -> None:
    assert parse_side("hf:attn=eager") == EngineSpec("hf", {"attn": "eager"})
    found = parse_side("replay:path=runs/a=b:c")
    assert found == Recording("runs/a=b:c")
    assert str(found) == "replay:path=runs/a=b:c"
    assert parse_side(str(found)) == found


def test_a_recording_is_no_engine() -> None:
    assert "replay" not in ENGINES
    with pytest.raises(UnknownEngine, match="'replay' is unknown"):
        EngineSpec.parse("replay:path=x")


def test_a_recording_keeps_the_kernels_that_it_was_captured_with() -> None:
    assert side("replay:path=x", "rlk") == Recording("x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("replay", ("path=RUN", "replay:path=RUN")),
        ("replay:", ("path=RUN", "replay:path=RUN")),
        ("replay:path=", ("'path' needs a value", "")),
        ("replay:path", ("'path' needs a value", "")),
        ("replay:path=a,path=b", ("'path' is given twice", "")),
        ("replay:paht=x", ("'replay' has no option 'paht'", "known: path")),
        ("replay:path=a,b", ("'replay' has no option 'b'", "known: path")),
        ("replay:path=x,kernels=rlk", ("'replay' has no option 'kernels'", "known: path")),
        ("replay:path=x,dtype=fp32", ("'replay' has no option 'dtype'", "known: path")),
    ],
)
def test_a_bad_recording_is_named(text: str, says: tuple[str, str]) -> None:
    with pytest.raises(BadOption) as error:
        parse_side(text)
    assert says[0] in error.value.message
    assert says[1] in error.value.fix


def test_an_unknown_side_names_engines_and_recordings() -> None:
    with pytest.raises(
        UnknownEngine, match="choose from deepspeed, fsdp, hf, megatron, sglang, vllm"
    ) as error:
        parse_side("nope")
    assert "replay:path=RUN" in error.value.fix


@pytest.mark.parametrize("damaged", ["decode", "prefill"])
def test_every_file_of_a_recording_is_checked_also_of_passes_that_are_not_compared(
    tmp_path: Path, damaged: str
) -> None:
    """`gate` and `compare` agree on whether a recording is corrupt."""
    run = compared_run(tmp_path / "run", judged=EDGES)
    flags = Pair(edges="prefill_vs_train", contract=CONTRACT, run_dir=tmp_path / "new")
    prepare(flags, [str(run.folder)] * 2, pytest.fail)
    [table] = (run.capture_folder("rollout") / damaged).glob("rows*.parquet")
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    for check in (
        lambda: prepare(flags, [str(run.folder)] * 2, pytest.fail),
        lambda: rlk_align.gate(run.folder, contract=CONTRACT),
    ):
        with pytest.raises(CorruptTrace, match=f"{damaged}/{table.name} was changed"):
            check()


def test_a_recording_gives_the_trace_of_its_role(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run")
    for role in ("rollout", "train"):
        into = Run(tmp_path / "other")
        trace = capture(Recording(str(run.folder)), role, into, None, False, silent)
        assert trace.folder == run.capture_folder(role)
    with pytest.raises(BadOption, match="is not a run"):
        capture(Recording("nowhere"), "train", run, None, False, silent)
