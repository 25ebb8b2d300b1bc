"""Files of a dump: encodings, folders of several formats, failed imports."""

import codecs
import json
from pathlib import Path

import pytest
from dump_files import lines

from rlk_align.errors import CorruptTrace, DumpError
from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.monitor.run_monitor import RunMonitor
from rlk_align.logs.monitor.step_sources import open_source

NEMO_RL = {
    "input_lengths": [3],
    "token_ids": [[5, 6, 7]],
    "token_loss_mask": [[0, 1, 1]],
    "sample_loss_mask": [1.0],
    "generation_logprobs": [[0.0, -1.0, -2.0]],
    "prev_logprobs": [[0.0, -1.0, -2.0]],
}


def record(**changed: object) -> dict:
    """A line of the neutral file."""
    fields = {
        "schema": "rlk-align/logprobs/1",
        "id": "a",
        "token_ids": [5, 6, 7],
        "prompt_length": 1,
        "rollout_logprobs": [-1.0, -2.0],
        "train_logprobs": [-1.0, -2.0],
    }
    return fields | changed


@pytest.mark.parametrize("format", ["jsonl", "auto"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(imported, format: str) -> None:
    path = lines(Path("dump.jsonl"), [record(), record(id="b")])
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    _, read = imported(format, "dump.jsonl")
    assert list(read.ids) == ["a", "b"]


def test_a_byte_order_mark_elsewhere_is_an_error(imported) -> None:
    path = lines(Path("dump.jsonl"), [record()])
    path.write_bytes(path.read_bytes() + codecs.BOM_UTF8 + path.read_bytes())
    with pytest.raises(DumpError, match="line 2"):
        imported("jsonl", "dump.jsonl")


def test_a_followed_file_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    path = lines(tmp_path / "dump.jsonl", [record(step=1)])
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    source = open_source(path)
    assert [r.step for r in source.poll(RunMonitor(), ended=True)] == [1]


@pytest.mark.parametrize(
    ("encoding", "said"), [("latin-1", "encoding is not UTF-8.*Latin-1"), ("utf-16", "UTF-16")]
)
@pytest.mark.parametrize("end", ["\n", ""])
def test_another_encoding_is_named(
    imported, tmp_path: Path, encoding: str, said: str, end: str
) -> None:
    text = json.dumps(record(id="é", step=1), ensure_ascii=False) + end
    Path("dump.jsonl").write_bytes(text.encode(encoding))
    with pytest.raises(DumpError, match=said):
        imported("jsonl", "dump.jsonl")
    if encoding == "utf-16":
        with pytest.raises(DumpError, match=said):
            imported("auto", "dump.jsonl")
    with pytest.raises(DumpError, match=said):
        list(open_source(tmp_path / "dump.jsonl").poll(RunMonitor(), ended=True))


def test_after_a_failed_import_its_reason_is_told(imported) -> None:
    lines(Path("dump.jsonl"), [record(), record(token_ids=None)])
    with pytest.raises(DumpError, match="line 2"):
        imported("jsonl", "dump.jsonl")
    with pytest.raises(CorruptTrace) as raised:
        ImportedRun.open("run")
    assert raised.value.fix.startswith("the import failed: dump.jsonl, line 2: token_ids")
    lines(Path("dump.jsonl"), [record()])
    imported("jsonl", "dump.jsonl")


def test_files_without_a_format_beside_a_dump_are_skipped_and_told(imported) -> None:
    lines(Path("logs/step_1.jsonl"), [record()])
    lines(Path("logs/a_metrics.jsonl"), [{"loss": 1.0}])
    manifest, read = imported("auto", "logs")
    assert (manifest.format, len(read)) == ("jsonl", 1)
    assert manifest.skipped == ("logs/a_metrics.jsonl: no known format",)


def test_a_folder_of_several_formats_says_which_file_has_which(imported) -> None:
    lines(Path("logs/train_data_step1.jsonl"), [NEMO_RL])
    lines(Path("logs/step_1.jsonl"), [record()])
    with pytest.raises(DumpError, match="several formats") as raised:
        imported("auto", "logs")
    assert "nemo-rl: logs/train_data_step1.jsonl" in raised.value.message
    assert "jsonl: logs/step_1.jsonl" in raised.value.message


def test_a_folder_without_a_format_says_what_was_looked_at(imported) -> None:
    lines(Path("logs/a_metrics.jsonl"), [{"loss": 1.0}])
    with pytest.raises(DumpError, match=r"no known format \(looked at logs/a_metrics.jsonl\)"):
        imported("auto", "logs")
