"""Imported runs: they are found, distinguished from other runs, and refused if incomplete."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from synthetic import compared_run

from rlk_align.errors import BadOption, CorruptTrace, DumpError
from rlk_align.logs.dumps.imported_run import MANIFEST, TABLE, ImportedRun
from rlk_align.logs.dumps.manifest import Findings, SourceFile
from rlk_align.logs.dumps.table import SCHEMA
from rlk_align.trace.checksums import CHECKSUMS
from rlk_align.trace.run import Run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


ROW = {
    "id": "a", "step": 3, "prompt_length": 1, "token_ids": [5, 6, 7],
    "rollout_logprobs": [None, -1.0, -2.0], "train_logprobs": [None, -1.5, None],
}  # fmt: skip
COMMAND = ["rlk-align", "import", "jsonl", "a.jsonl", "-o", "run"]


def written(*rows: dict, folder: str = "run") -> ImportedRun:
    run = ImportedRun(Path(folder))
    findings = Findings(sources=[SourceFile(path="a.jsonl", size=7)])
    findings.note("a note")
    findings.skip("a reason")
    batches = (pa.RecordBatch.from_pylist([row], schema=SCHEMA) for row in rows)
    run.write(batches, findings, command=COMMAND, format="jsonl")
    return run


def test_it_is_found_and_counted() -> None:
    written(ROW, {**ROW, "step": 2})
    for name in ("run", "@last"):
        run = ImportedRun.open(name)
        assert [s.ids for s in run.sequences()] == [["a"], ["a"]]
    manifest = run.manifest
    assert (manifest.sequences, manifest.tokens, manifest.scored) == (2, 6, 4)
    assert (manifest.compared, manifest.rollout_missing, manifest.train_missing) == (2, 0, 2)
    assert manifest.steps == (2, 3)
    assert manifest.fields == (
        *("id", "step", "prompt_length", "token_ids", "rollout_logprobs", "train_logprobs"),
    )
    assert (manifest.notes, manifest.skipped) == (("a note",), ("a reason",))
    assert run.record.command == COMMAND


def test_each_kind_of_run_refuses_the_other(tmp_path: Path) -> None:
    compared_run(tmp_path / "compared")
    with pytest.raises(BadOption, match="run of engines"):
        ImportedRun.open("compared")
    written(ROW)
    with pytest.raises(BadOption, match="imported") as raised:
        Run.open("run")
    assert "rlk-align explain run" in raised.value.fix


def test_it_does_not_overwrite_a_comparison(tmp_path: Path) -> None:
    compared_run(tmp_path / "run")
    with pytest.raises(BadOption, match="another run"):
        written(ROW)
    Run.open("run").check()


def test_a_second_import_replaces_the_first() -> None:
    written(ROW, ROW)
    written(ROW)
    assert ImportedRun.open("run").manifest.sequences == 1


def test_no_sequence_is_no_run() -> None:
    with pytest.raises(DumpError, match="no sequence") as raised:
        written()
    assert raised.value.fix == "a reason"
    with pytest.raises(CorruptTrace, match="is incomplete"):
        ImportedRun.open("run")


@pytest.mark.parametrize("name", ["nothing", "file", "@last"])
def test_what_is_no_run_is_refused(name: str) -> None:
    Path("file").write_text("")
    with pytest.raises(BadOption, match="no"):
        ImportedRun.open(name)


@pytest.mark.parametrize("name", ["run.json", MANIFEST, TABLE, CHECKSUMS])
@pytest.mark.parametrize("fault", ["gone", "changed", "cut"])
def test_a_damaged_run_is_refused(name: str, fault: str) -> None:
    path = written(ROW).folder / name
    data = path.read_bytes()
    if fault == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if fault == "cut" else b"x" + data)
    with pytest.raises((CorruptTrace, BadOption)) as raised:
        list(ImportedRun.open("run").sequences())
    if name != "run.json":
        assert "rlk-align import jsonl a.jsonl" in raised.value.fix


def test_a_manifest_of_another_schema_is_refused() -> None:
    run = written(ROW)
    path = run.folder / MANIFEST
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"schema_id": "rlk-align/dump/9"}))
    with pytest.raises(CorruptTrace, match="damaged"):
        _ = ImportedRun(run.folder).manifest
