"""A trace on disk: it is read as it was written, by other tools as well, and damage is detected."""

import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from synthetic import (
    BATCH,
    NAMES,
    SHAPE,
    all_cells,
    draw,
    keep_all,
    keep_logprobs,
    wanted_cells,
    write_pass,
    write_trace,
)

from rlk_align.engines.process.plan import KeepRule
from rlk_align.errors import CorruptTrace, EngineFailed, TraceNotWritten
from rlk_align.model.sites import model_sites
from rlk_align.trace import writer as writing
from rlk_align.trace.checksums import FileRecord, check_files
from rlk_align.trace.digest import digest_rows
from rlk_align.trace.reader import PassReader, Trace
from rlk_align.trace.records import load_record
from rlk_align.trace.schema import TraceRecord
from rlk_align.trace.tables import ROWS_SCHEMA
from rlk_align.trace.writer import PassWriter

VALUES = draw()
ORDER = {cell: n for n, cell in enumerate(all_cells())}


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pass(tmp_path / "prefill", VALUES)
    return tmp_path / "prefill"


@pytest.mark.parametrize("flush", [1, 700, 1 << 27])
@pytest.mark.parametrize("decode", [False, True])
def test_what_is_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: int, decode: bool
) -> None:
    monkeypatch.setattr(writing, "FLUSH_BYTES", flush)
    values = {name: value.clone() for name, value in VALUES.items()}
    values["embed"][2, 1], values["embed"][3, 0] = math.nan, -0.0
    values["logits"][3, :2] = math.inf
    write_pass(tmp_path / "p", values, decode=decode, unexposed={"layers.9.x": "no reason"})
    reader = PassReader(tmp_path / "p")
    shards = len(list((tmp_path / "p").glob("values-*")))
    assert shards == 1 if flush > 1000 else shards > 3
    assert reader.record.unexposed == {"layers.9.x": "no reason"}
    for site in model_sites(SHAPE):
        cells = wanted_cells(site, decode)
        want = values[site.name][[ORDER[c] for c in cells]]
        rows = reader.rows(site.name)
        assert list(zip(rows.sample.tolist(), rows.position.tolist(), strict=True)) == cells
        got = reader.values(site.name, rows, np.arange(len(cells)))
        assert got.dtype == want.dtype
        assert bits(got) == bits(want)
        assert np.array_equal(rows.digest, digest_rows(want).numpy())
        wide = want.double().numpy()
        assert rows.nonfinite.tolist() == (~np.isfinite(wide)).sum(axis=1).tolist()
        norm = np.sqrt((np.where(np.isfinite(wide), wide, 0) ** 2).sum(axis=1))
        np.testing.assert_allclose(rows.norm, norm, rtol=1e-13)
        record = reader.record.sites[site.name]
        assert (record.rows, record.features) == (len(cells), site.features)
    assert reader.rows("layers.0.nothing") is None


def test_values_are_read_in_the_order_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "FLUSH_BYTES", 40)
    with PassWriter(tmp_path / "p", keep_all) as writer:
        for p in range(9):
            rows = VALUES["embed"][p : p + 1]
            writer("embed", rows, np.array([0]), np.array([p]))
        writer.finish({})
    reader = PassReader(tmp_path / "p")
    rows = reader.rows("embed")
    assert len(set(rows.shard.tolist())) == 3
    for at in ([8, 0, 3, 3], [5], [2, 1], list(range(9))):
        assert bits(reader.values("embed", rows, np.array(at))) == bits(VALUES["embed"][at])


def test_no_values_are_read_where_none_are_asked_for(folder: Path) -> None:
    reader = PassReader(folder)
    got = reader.values("embed", reader.rows("embed"), np.zeros(0, dtype=np.int64))
    assert got.shape == (0, SHAPE.hidden)


def test_rows_are_copied_when_they_are_added(tmp_path: Path) -> None:
    buffer = torch.ones(2, 4)
    sample, position = np.array([0, 0]), np.array([0, 1])
    with PassWriter(tmp_path / "p", keep_all) as writer:
        writer("embed", buffer, sample, position)
        buffer.fill_(7)
        writer.finish({})
    reader = PassReader(tmp_path / "p")
    assert reader.values("embed", reader.rows("embed"), np.arange(2)).tolist() == [[1.0] * 4] * 2


def test_strided_rows_are_written_as_they_look(tmp_path: Path) -> None:
    wide = torch.arange(24.0).reshape(3, 8)
    parts = {"a": wide[:, 2:5], "b": wide.T[:3], "c": wide[:, 7:8]}
    with PassWriter(tmp_path / "p", keep_all) as writer:
        for name, rows in parts.items():
            writer(name, rows, np.zeros(3, dtype=int), np.arange(3))
        writer.finish({})
    reader = PassReader(tmp_path / "p")
    for name, rows in parts.items():
        assert torch.equal(reader.values(name, reader.rows(name), np.arange(3)), rows)


def test_plain_pyarrow_and_safetensors_read_it(folder: Path) -> None:
    table = pq.read_table(folder / "rows.parquet")
    assert table.schema.equals(ROWS_SCHEMA)
    rows = [r for r in table.to_pylist() if r["site"] == "layers.1.attn"]
    assert [(r["sample"], r["position"]) for r in rows] == all_cells()
    tensors = load_file(folder / f"values-{rows[0]['shard']:05d}.safetensors")
    want = VALUES["layers.1.attn"]
    for r in rows:
        cell = ORDER[r["sample"], r["position"]]
        assert bits(tensors["layers.1.attn"][r["index"]]) == bits(want[cell])
        assert r["absmax"] == want[cell].double().abs().max().item()
        assert r["norm"] == pytest.approx(want[cell].double().norm().item(), rel=1e-13)


def test_duckdb_reads_it(folder: Path) -> None:
    found = duckdb.sql(
        f"select site, count(*), sum(nonfinite), max(absmax) from '{folder}/rows.parquet' "
        "where sample = 1 group by site order by site"
    ).fetchall()
    assert [name for name, *_ in found] == sorted(NAMES)
    counts = {name: count for name, count, *_ in found}
    assert counts["embed"] == len(BATCH.samples[1].ids)
    assert counts["logprob"] == len(BATCH.samples[1].response_ids)
    largest = {name: value for name, *_, value in found}
    start = len(BATCH.samples[0].ids)
    rows = VALUES["embed"][start : start + counts["embed"]]
    assert largest["embed"] == rows.double().abs().max().item()


def test_a_control_pass_holds_digests_and_log_probs(tmp_path: Path) -> None:
    write_pass(tmp_path / "p", VALUES, keep=keep_logprobs, statistics=False)
    reader = PassReader(tmp_path / "p")
    embed, logprob = reader.rows("embed"), reader.rows("logprob")
    assert np.array_equal(embed.digest, digest_rows(VALUES["embed"]).numpy())
    assert set(embed.shard.tolist()) == {-1}
    assert (set(embed.norm.tolist()), set(embed.nonfinite.tolist())) == ({0.0}, {0})
    got = reader.values("logprob", logprob, np.arange(len(logprob.sample)))
    assert len(got) == BATCH.sampled_tokens
    table = pq.read_table(tmp_path / "p" / "rows.parquet")
    assert table["norm"].null_count == table["absmax"].null_count == len(table)
    assert table["nonfinite"].null_count == len(table)


def test_values_that_were_not_kept_are_no_damage_to_guess_at(tmp_path: Path) -> None:
    write_pass(tmp_path / "p", VALUES, keep=keep_logprobs)
    reader = PassReader(tmp_path / "p")
    with pytest.raises(CorruptTrace):
        reader.values("embed", reader.rows("embed"), np.array([0]))


@pytest.mark.parametrize("flush", [300, 1 << 27])
def test_values_are_kept_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: int
) -> None:
    monkeypatch.setattr(writing, "FLUSH_BYTES", flush)

    def odd(site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        return (position % 2 == 1) & (site != "logits")

    write_pass(tmp_path / "p", VALUES, keep=odd)
    reader = PassReader(tmp_path / "p")
    assert set(reader.rows("logits").shard.tolist()) == {-1}
    rows = reader.rows("layers.0.act")
    kept = np.flatnonzero(rows.shard >= 0)
    assert kept.tolist() == [n for n, (_, p) in enumerate(all_cells()) if p % 2 == 1]
    got = reader.values("layers.0.act", rows, kept)
    assert bits(got) == bits(VALUES["layers.0.act"][torch.from_numpy(kept)])


def test_an_interrupted_pass_leaves_only_its_partial_folder(tmp_path: Path) -> None:
    def interrupted() -> None:
        with PassWriter(tmp_path / "prefill", keep_all) as writer:
            writer("embed", torch.ones(1, 2), np.array([0]), np.array([0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["prefill.partial"]
    assert not (tmp_path / "prefill.partial" / "pass.json").exists()
    write_pass(tmp_path / "prefill", VALUES)
    assert [p.name for p in tmp_path.iterdir()] == ["prefill"]
    PassReader(tmp_path / "prefill")


def test_a_finished_pass_stays_until_the_next_one_is_complete(folder: Path) -> None:
    before = (folder / "rows.parquet").read_bytes()
    with pytest.raises(RuntimeError), PassWriter(folder, keep_all):
        raise RuntimeError("the engine failed")
    assert (folder / "rows.parquet").read_bytes() == before
    write_pass(folder, draw(1))
    rows = PassReader(folder).rows("embed")
    assert np.array_equal(rows.digest, digest_rows(draw(1)["embed"]).numpy())


def test_a_pass_may_hold_nothing(tmp_path: Path) -> None:
    write_pass(tmp_path / "p", VALUES, sites=[])
    reader = PassReader(tmp_path / "p")
    assert reader.rows("embed") is None
    assert reader.record.sites == {}


@pytest.mark.parametrize("name", ["rows.parquet", "values-00000.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "longer"])
def test_a_file_of_another_size_is_corrupt(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else data + b"\0")
    with pytest.raises(CorruptTrace, match=name) as error:
        PassReader(folder)
    assert "--fresh" in error.value.fix


def read_everything(folder: Path) -> dict[str, tuple]:
    reader = PassReader(folder)
    check_files(folder, reader.record.files)
    found = {}
    for name in NAMES:
        rows = reader.rows(name)
        assert rows is not None
        values = reader.values(name, rows, np.arange(len(rows.sample)))
        found[name] = (*(getattr(rows, f).tobytes() for f in FIELDS), bits(values))
    return found


FIELDS = ("sample", "position", "digest", "norm", "nonfinite", "shard", "index")


def flip_bits(folder: Path, name: str, flips: Iterable[tuple[int, int]]) -> int:
    """Flips bits of a file, one `(byte, mask)` at a time; returns how many were detected. A bit
    that changes no value, as in the padding of a header, need not be detected."""
    path = folder / name
    want = read_everything(folder)
    data = bytearray(path.read_bytes())
    refused = 0
    for at, mask in flips:
        data[at] ^= mask
        path.write_bytes(data)
        try:
            assert read_everything(folder) == want, f"byte {at}"
        except CorruptTrace:
            refused += 1
        data[at] ^= mask
    return refused


@pytest.mark.parametrize("bit", [0, 6])
def test_no_flipped_bit_of_the_values_goes_unseen(folder: Path, bit: int) -> None:
    name = "values-00000.safetensors"
    size = (folder / name).stat().st_size
    refused = flip_bits(folder, name, ((at, 1 << bit) for at in range(bit, size, 211)))
    assert refused > size // 211 // 2


FLIPPED_ROWS = """
import sys
from pathlib import Path
sys.path[:0] = [f"{sys.argv[2]}/support", f"{sys.argv[2]}/trace"]
from test_trace import flip_rows
print("refused", flip_rows(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])))
"""


def flip_rows(folder: Path, start: int, step: int) -> int:
    """Flips a bit in every `step`-th byte of rows.parquet; returns how many were detected."""
    size = (folder / "rows.parquet").stat().st_size
    places = range(size - start, 0, -step)
    return flip_bits(folder, "rows.parquet", ((at, 1 << at % 8) for at in places))


def test_no_flipped_bit_of_the_rows_goes_unseen(folder: Path) -> None:
    # In a separate process, because a damaged footer can make the Parquet library abort.
    tests = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", FLIPPED_ROWS, str(folder), tests, "250", "1042"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[1]) > 20


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_a_damaged_name_of_a_site_is_corrupt(folder: Path, flip: int) -> None:
    """The names in the footer, which has no checksum, are damaged one by one."""
    data = (folder / "rows.parquet").read_bytes()
    places = [found.start() for found in re.finditer(rb"layers\.1\.o_proj", data)]
    assert flip_bits(folder, "rows.parquet", ((at, flip) for at in places)) > 1


def test_a_truncated_table_of_the_recorded_size_is_corrupt(folder: Path) -> None:
    # pass.json may be damaged together with the table, or the file padded by a file system.
    path = folder / "rows.parquet"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    with pytest.raises(CorruptTrace, match=r"rows\.parquet"):
        PassReader(folder).rows("embed")


def edited(folder: Path, change) -> PassReader:
    record = json.loads((folder / "pass.json").read_text())
    change(record)
    (folder / "pass.json").write_text(json.dumps(record))
    return PassReader(folder)


def test_a_pass_without_its_record_is_corrupt(folder: Path) -> None:
    (folder / "pass.json").write_text("{}")
    with pytest.raises(CorruptTrace, match=r"pass\.json"):
        PassReader(folder)
    (folder / "pass.json").write_bytes(b"\xff")
    with pytest.raises(CorruptTrace, match=r"pass\.json"):
        PassReader(folder)
    (folder / "pass.json").unlink()
    with pytest.raises(CorruptTrace, match="missing"):
        PassReader(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["sites"].pop("embed"),
        lambda r: r["sites"]["embed"].update(dtype="bfloat17"),
        lambda r: r["sites"]["embed"].update(dtype="nn"),
        lambda r: r["sites"]["embed"].update(dtype="float32"),
        lambda r: r["sites"]["embed"].update(features=9),
        lambda r: r["sites"]["embed"].update(features=-1),
    ],
    ids=["no site", "no dtype", "a module", "other dtype", "other width", "negative width"],
)
def test_a_record_that_belies_its_tables_is_corrupt(folder: Path, change) -> None:
    def read() -> None:
        reader = edited(folder, change)
        reader.values("embed", reader.rows("embed"), np.array([0, 1]))

    with pytest.raises(CorruptTrace):
        read()


def test_a_table_with_other_columns_is_corrupt(folder: Path) -> None:
    path = folder / "rows.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["norm"]), path)
    file = FileRecord.of_files(path.parent, [path.name])[path.name].model_dump()
    with pytest.raises(CorruptTrace, match="columns"):
        edited(folder, lambda r: r["files"]["rows.parquet"].update(file)).rows("embed")


def test_a_table_that_mixes_sites_is_corrupt(folder: Path) -> None:
    path = folder / "rows.parquet"
    pq.write_table(pq.read_table(path), path)
    file = FileRecord.of_files(path.parent, [path.name])[path.name].model_dump()
    with pytest.raises(CorruptTrace, match="mixes sites"):
        edited(folder, lambda r: r["files"]["rows.parquet"].update(file)).rows("embed")


def test_a_trace_is_its_record_tokens_weights_and_passes(tmp_path: Path) -> None:
    weights = {"embed": torch.ones(16, 8), "norm": torch.zeros(3, dtype=torch.bfloat16)}
    write_trace(tmp_path / "t", VALUES, weights=weights, passes=("decode", "prefill"))
    trace = Trace(tmp_path / "t")
    assert trace.tokens == BATCH
    assert trace.record.shape == SHAPE
    assert [(w.name, w.shape, w.dtype) for w in trace.weights.values()] == [
        ("embed", (16, 8), "float32"),
        ("norm", (3,), "bfloat16"),
    ]
    assert trace.has_pass("decode")
    assert trace.has_pass("prefill.repeat")
    assert not trace.has_pass("prefill.production")
    assert trace.read_pass("decode").rows("embed") is not None
    with pytest.raises(CorruptTrace, match="production"):
        trace.read_pass("prefill.production")


def test_a_damaged_trace_is_corrupt(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", VALUES)
    path = tmp_path / "t" / "trace.json"
    text = path.read_text()
    for bad in ("", text[:-5], "[]", text.replace('"engine"', '"engin"')):
        path.write_text(bad)
        with pytest.raises(CorruptTrace, match=r"trace\.json"):
            Trace(tmp_path / "t")
    path.unlink()
    with pytest.raises(CorruptTrace, match="missing"):
        Trace(tmp_path / "t")


def test_damaged_weights_are_corrupt(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", VALUES)
    path = tmp_path / "t" / "weights.parquet"
    data = path.read_bytes()
    table = pq.read_table(path)
    for bad in (b"", data[:50], data[:-3]):
        path.write_bytes(bad)
        with pytest.raises(CorruptTrace, match=r"weights\.parquet"):
            _ = Trace(tmp_path / "t").weights
    for column in table.column_names:
        pq.write_table(table.drop_columns([column]), path)
        with pytest.raises(CorruptTrace, match=r"weights\.parquet"):
            _ = Trace(tmp_path / "t").weights


def test_a_file_that_no_checksum_names_is_not_read(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", VALUES).folder
    path = folder / "checksums.json"
    record = json.loads(path.read_text())
    without = {n: f for n, f in record["files"].items() if n != "prefill/pass.json"}
    path.write_text(json.dumps(record | {"files": without}))
    trace = Trace(folder)
    assert not trace.has_pass("prefill")
    with pytest.raises(CorruptTrace, match="no finished pass prefill"):
        trace.read_pass("prefill")
    del without["weights.parquet"]
    path.write_text(json.dumps(record | {"files": without}))
    with pytest.raises(CorruptTrace, match=r"does not list weights\.parquet"):
        Trace(folder)


def test_an_unknown_field_of_a_record_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", VALUES)
    path = tmp_path / "t" / "trace.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"later": 1}))
    with pytest.raises(CorruptTrace, match="later"):
        load_record(TraceRecord, path)


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
from rlk_align.errors import TraceNotWritten
from rlk_align.trace import writer as writing
from rlk_align.trace.writer import PassWriter

torch.set_num_threads(1)
writing.FLUSH_BYTES = 1 << 16

def write(folder, kept):
    keep = lambda site, sample, position: np.full(len(sample), kept)
    with PassWriter(folder, keep) as writer:
        for p in range(100):
            writer("embed", torch.randn(512, 16), *np.full((2, 512), p))
        writer.finish({})

for limit, kept in ((1 << 30, True), (20_000, True), (20_000, False), (300, True), (0, True)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, 1 << 30))
    folder = Path(sys.argv[1]) / f"{limit}-{kept}"
    try:
        write(folder, kept)
    except TraceNotWritten as error:
        print(folder.name, "TraceNotWritten", error.message, error.fix)
    else:
        print(folder.name, "written")
"""


def test_a_full_disk_is_said_to_be_full(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    first, *others = done.stdout.splitlines()
    assert first == f"{1 << 30}-True written"
    PassReader(tmp_path / f"{1 << 30}-True")
    assert len(others) == 4
    for line in others:
        name, kind, rest = line.split(" ", 2)
        assert kind == "TraceNotWritten", line
        assert str(tmp_path / name) in rest
        assert "--trace-budget" in rest
        assert not (tmp_path / name).exists()


def test_a_folder_that_cannot_be_made_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceNotWritten, match="file"):
        PassWriter(tmp_path / "file" / "prefill", keep_all)


PART = """
import pickle, sys
import numpy as np
import torch

open_part = pickle.loads(bytes.fromhex(sys.argv[1]))
with open_part() as writer:
    writer("embed", torch.full((2, 4), 7.0), np.array([1, 1]), np.array([0, 1]))
    writer.close()
"""


def test_another_process_writes_a_part_of_the_pass(tmp_path: Path) -> None:
    folder = tmp_path / "prefill"
    with PassWriter(folder, KEEP_EMBED) as writer:
        writer("embed", torch.full((2, 4), 3.0), np.array([0, 0]), np.array([0, 1]))
        recipe = pickle.dumps(writer.part(1)).hex()
        subprocess.run([sys.executable, "-c", PART, recipe], check=True, timeout=120)
        writer.finish({})
    assert not list(folder.glob("part-*"))
    reader = PassReader(folder)
    assert reader.record.sites["embed"].rows == 4
    rows = reader.rows("embed")
    assert rows is not None
    values = reader.values("embed", rows, np.arange(4))[:, 0].tolist()
    found = sorted(zip(rows.sample.tolist(), rows.position.tolist(), values, strict=True))
    assert found == [(0, 0, 3.0), (0, 1, 3.0), (1, 0, 7.0), (1, 1, 7.0)]


KEEP_EMBED = KeepRule(frozenset({"embed"}))


def test_parts_that_disagree_on_a_site_are_refused(tmp_path: Path) -> None:
    where = (np.array([0]), np.array([0]))
    with PassWriter(tmp_path / "prefill", keep_all) as first:
        first("embed", torch.ones(1, 4), *where)
        with first.part(1)() as second:
            second("embed", torch.ones(1, 4, dtype=torch.bfloat16), *where)
            second.close()
        with pytest.raises(EngineFailed, match=r"embed: float32\[4\] and bfloat16\[4\]"):
            first.finish({})
    assert not (tmp_path / "prefill").exists()


def test_a_changed_part_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "prefill"
    where = (np.array([0]), np.array([0]))
    with PassWriter(folder, keep_all) as first:
        first("embed", torch.ones(1, 4), *where)
        with first.part(1)() as second:
            second("embed", torch.ones(1, 4), np.array([1]), np.array([0]))
            second.close()
        first.finish({})
    data = bytearray((folder / "rows.1.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "rows.1.parquet").write_bytes(data)
    with pytest.raises(CorruptTrace, match=r"rows\.1\.parquet"):
        PassReader(folder).rows("embed")
