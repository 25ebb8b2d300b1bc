"""The neutral file, as JSON Lines and as Parquet."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dump_files import lines

from rlk_align.errors import BadOption, DumpError
from rlk_align.logs.dumps.record import SequenceRecord
from rlk_align.logs.readers import files

ROOT = Path(__file__).resolve().parents[3]


def record(**changed: object) -> dict:
    fields = {
        "schema": "rlk-align/logprobs/1",
        "id": "a",
        "group": 7,
        "step": 2,
        "token_ids": [5, 6, 7, 8],
        "prompt_length": 2,
        "mask": [True, False],
        "rollout_logprobs": [-1.0, None],
        "train_logprobs": [None, -0.5, -1.5, -2.5],
        "position_ids": [0, 1, 2, 3],
        "pack_index": 1,
        "rollout_version": 4,
        "train_version": 5,
        "sampling": {"temperature": 0.7, "top_p": 0.9, "logprobs_mode": "raw_logprobs"},
        "dtype": {"rollout": "bfloat16", "train": "float32"},
        "entropy": [0.1, 0.2],
        "kept_mass": [0.9, 0.8],
        "cached_tokens": 1,
        "mask_rewritten": True,
        "reward": 1,
        "sampler": "rlk",
        "seeds": [-1, None],
    }
    return fields | changed


def written(kind: str, *records: dict) -> Path:
    if kind == "jsonl":
        return lines(Path("dump.jsonl"), list(records))
    pq.write_table(pa.Table.from_pylist(list(records)), "dump.parquet")
    return Path("dump.parquet")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("format", ["jsonl", "auto"])
def test_every_field(imported, kind: str, format: str) -> None:
    manifest, read = imported(format, written(kind, record()))
    assert (manifest.format, manifest.version) == ("jsonl", "rlk-align/logprobs/1")
    assert manifest.framework is None
    assert (list(read.ids), list(read.groups)) == (["a"], ["7"])
    assert read.scored.tolist() == [False, False, True, False]
    assert read.rollout_missing.tolist() == [True, True, False, True]
    assert read.train_missing.tolist() == [True, False, False, False]
    assert read.rollout[2] == -1.0
    assert read.train[1:].tolist() == [-0.5, -1.5, -2.5]
    assert read.rollout_versions.tolist() == [4] * 4
    assert read.train_versions.tolist() == [5]
    assert read.entropy[2:].tolist() == [0.1, 0.2]
    assert read.kept_mass[2:].tolist() == [0.9, 0.8]
    assert (read.samplers, read.seeds[2]) == (["rlk"], -1)
    assert read.seeds_missing.tolist() == [True, True, False, True]
    assert (read.steps[0], read.pack_indices[0], read.cached_tokens[0]) == (2, 1, 1)
    assert read.rewards.tolist() == [1.0]
    assert read.mask_rewritten.tolist() == [True]
    assert (read.sampling[0].temperature, read.sampling[0].top_k) == (0.7, None)
    assert (list(read.rollout_dtypes), list(read.train_dtypes)) == (["bfloat16"], ["float32"])


def test_what_is_least(imported) -> None:
    least = {"schema", "id", "token_ids", "prompt_length", "train_logprobs"}
    _, read = imported("jsonl", written("jsonl", {k: v for k, v in record().items() if k in least}))
    assert read.scored.tolist() == [False, False, True, True], "without a mask, the response"
    assert read.rollout_missing.all()
    assert np.isnan(read.rollout).all()


def test_values_are_taken_as_they_are(imported) -> None:
    values = [0.0, float("nan")]
    _, read = imported("jsonl", written("jsonl", record(rollout_logprobs=values)))
    assert read.rollout[2] == 0.0
    assert not read.rollout_missing[2:].any()
    assert np.isnan(read.rollout[3])


def test_a_sequence_that_comes_twice_is_told(imported) -> None:
    manifest, read = imported("jsonl", written("jsonl", record(), record(), record(step=3)))
    assert len(read) == 3
    assert any(note.startswith("1 sequences repeat the id") for note in manifest.notes)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollout_logprobs": [-1.0] * 3}, "rollout_logprobs has 3 entries"),
        ({"rollout_logprobs": None, "train_logprobs": None}, "neither"),
        ({"train_logprobs": ["-1.0", "-1.0"]}, "train_logprobs"),
        ({"train_logprobs": [True, False]}, "train_logprobs"),
        ({"mask": [2, 0]}, "mask"),
        ({"token_ids": [5, 6, 7, -8]}, "token_ids"),
        ({"prompt_length": 5}, "prompt_length is 5"),
        ({"schema": "rlk-align/logprobs/2"}, "schema"),
        ({"step": -1}, "step"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
    ],
)
def test_a_wrong_value_is_named(imported, kind: str, change: dict, said: str) -> None:
    with pytest.raises(DumpError, match=f"(line|row) 1: .*{said}"):
        imported("jsonl", written(kind, record(**change)))


@pytest.mark.parametrize("name", ["train_version", "step", "cached_tokens"])
@pytest.mark.parametrize("value", [2**70, 10**400, [1]])
def test_no_value_is_too_large_for_the_tool(imported, name: str, value: object) -> None:
    with pytest.raises(DumpError, match="line 1"):
        imported("jsonl", written("jsonl", record(**{name: value})))


@pytest.mark.parametrize("name", ["dump.parquet", "dump.jsonl", "dump.pkl"])
@pytest.mark.parametrize("format", ["auto", "jsonl"])
def test_what_is_no_dump_is_refused(imported, name: str, format: str) -> None:
    for data in (b"", b"PAR1", b"\x80\x04]q\x00.", b"\x00" * 100):
        Path(name).write_bytes(data)
        with pytest.raises(DumpError, match="dump"):
            imported(format, name)


def test_a_pickle_is_told_what_to_do(imported) -> None:
    Path("batch.pkl").write_bytes(b"\x80\x04]q\x00.")
    with pytest.raises(DumpError, match="pickle") as raised:
        imported("auto", "batch.pkl")
    assert "docs/import.md" in raised.value.fix


def test_what_is_not_there_is_named(imported) -> None:
    Path("folder").mkdir()
    for name in ("nothing", "folder"):
        for format in ("auto", "nemo-rl", "slime"):
            with pytest.raises(DumpError, match=name):
                imported(format, name)
    with pytest.raises(BadOption, match="nemo") as raised:
        imported("nemo", "folder")
    assert "nemo-rl" in raised.value.fix


def test_the_published_schema_is_current() -> None:
    published = json.loads((ROOT / "docs" / "logprobs.schema.json").read_text())
    assert published == SequenceRecord.model_json_schema(by_alias=True)


@pytest.mark.parametrize("format", ["jsonl", "auto"])
def test_a_compressed_file_is_named(imported, format: str) -> None:
    path = Path("dump.jsonl.gz")
    path.write_bytes(gzip.compress(json.dumps(record()).encode()))
    with pytest.raises(DumpError, match="compressed with gzip"):
        imported(format, path)


def test_a_line_that_is_too_long_is_not_read(imported, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("jsonl", record(), record(id="x" * 5_000))
    monkeypatch.setattr(files, "LONGEST", 2_000)
    with pytest.raises(DumpError, match="line 2: longer than"):
        imported("jsonl", path)
