"""The rows of a comparison: what gate and report read instead of the captures."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from synthetic import BATCH, all_cells, compared_run, corrupt, draw, keep_logprobs, write_trace

from rlk_align.compare import edge_rows
from rlk_align.compare.edge_rows import EdgeRows, rows_table
from rlk_align.compare.measure import measure
from rlk_align.comparison_table import HEAD, load_rows, save_rows, sites_of
from rlk_align.errors import CorruptTrace
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.sites import RowIndex

VALUES = draw()
CELL = (1, 4)
SITE = "layers.0.o_proj"


def rows_of(folder: Path, train: Any = VALUES, **options: Any) -> pa.Table:
    a = write_trace(folder / "a", VALUES)
    b = write_trace(folder / "b", train, **options)
    return measure(a, b, ("prefill_vs_train",), (), lambda *_: None)[1]


def at(table: pa.Table, column: str, cell: tuple[int, int] = CELL):
    keys = list(zip(table["sample"].to_pylist(), table["position"].to_pylist(), strict=True))
    return table[column].to_pylist()[keys.index(cell)]


def test_a_row_for_every_token_with_its_log_probs(tmp_path: Path) -> None:
    values = {n: v.clone() for n, v in VALUES.items()}
    values["logprob"][all_cells().index(CELL)] += 0.25
    table = rows_of(tmp_path, values)
    assert table.schema.names[: len(HEAD)] == list(HEAD)
    assert table["token"].to_pylist() == [i for s in BATCH.samples for i in s.ids]
    want = [p >= len(s.prompt_ids) for s in BATCH.samples for p in range(len(s.ids))]
    assert table["response"].to_pylist() == want
    known = [x is not None for x in table["first_logprob"].to_pylist()]
    assert sum(known) == BATCH.sampled_tokens
    assert known == [x is not None for x in table["second_logprob"].to_pylist()]
    shift = at(table, "second_logprob") - at(table, "first_logprob")
    assert abs(shift) == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("kept", ["", "{", "[]", None])
def test_without_a_tokenizer_that_can_be_read_the_texts_are_null(
    tmp_path: Path, kept: str | None
) -> None:
    """After minutes of capturing, a broken tokenizer.json is no reason to end."""
    if kept is not None:
        (tmp_path / "tokenizer.json").write_text(kept)
    table = rows_table([], index := RowIndex(BATCH), tmp_path)
    assert table.num_rows == 0
    edge = EdgeRows.of("prefill_vs_train", index, 1)
    table = rows_table([edge], index, tmp_path)
    assert table["text"].null_count == table.num_rows == len(index)


def test_each_id_keeps_the_spaces_before_it(tmp_path: Path) -> None:
    """Decoders of SentencePiece strip those of the first id."""
    pieces = ["<unk>", "a", "▁a", "▁▁b", "▁", "c▁d", "é"]
    model = tokenizers.models.WordLevel({p: n for n, p in enumerate(pieces)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    batch = TokenBatch((Sample("0", tuple(range(len(pieces)))),))
    table = rows_table(
        [EdgeRows.of("prefill_vs_train", RowIndex(batch), 1)], RowIndex(batch), tmp_path
    )
    assert table["text"].to_pylist() == ["<unk>", "a", " a", "  b", " ", "c d", "é"]


def test_ids_that_are_parts_of_a_character_stay_so(tmp_path: Path) -> None:
    """The bytes A9 C3 twice have an é in their middle."""
    byte = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert {"©", "Ã"} <= set(byte)
    model = tokenizers.models.WordLevel({"Ã": 0, "©Ã": 1, "Ġa": 2}, unk_token="Ã")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    batch = TokenBatch((Sample("0", (0, 1, 2)),))
    table = rows_table(
        [EdgeRows.of("prefill_vs_train", RowIndex(batch), 1)], RowIndex(batch), tmp_path
    )
    assert table["text"].to_pylist() == ["\ufffd", "\ufffd\ufffd", " a"]


def test_errors_are_of_their_row_and_site(tmp_path: Path) -> None:
    table = rows_of(tmp_path, corrupt(VALUES, SITE, [CELL], change=lambda row: row * 1.5))
    assert at(table, SITE) == pytest.approx(1 / 3, rel=1e-2)
    errors = np.array(table[SITE].to_pylist())
    assert (errors != 0).sum() == 1
    assert set(table["embed"].to_pylist()) == {0.0}
    assert sites_of(table)[0] == "embed"
    assert sites_of(table)[-1] == "logprob"


def test_what_is_not_finite_is_nan_and_what_was_not_kept_is_null(tmp_path: Path) -> None:
    bad = corrupt(VALUES, SITE, [CELL], change=lambda row: row * float("nan"))
    assert math.isnan(at(rows_of(tmp_path / "nan", bad), SITE))
    other = corrupt(VALUES, SITE, [CELL], change=lambda row: row * 2)
    unkept = rows_of(tmp_path / "unkept", other, keep=keep_logprobs)
    assert at(unkept, SITE) is None
    assert at(unkept, SITE, (0, 0)) == 0.0


def test_a_large_run_keeps_the_errors_of_a_seeded_choice_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = len(sites_of(rows_of(tmp_path / "whole")))
    monkeypatch.setattr(edge_rows, "MAX_ERRORS", 5 * sites)
    table, again = rows_of(tmp_path / "part"), rows_of(tmp_path / "again")
    assert table.equals(again)
    assert table.num_rows == sum(len(s.ids) for s in BATCH.samples)
    assert len(table["embed"].drop_null()) == 5
    assert len(table["first_logprob"].drop_null()) == BATCH.sampled_tokens


def test_a_run_keeps_its_rows_and_notices_when_they_change(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run")
    assert run.rows(["edge", "embed"]).num_rows == sum(len(s.ids) for s in BATCH.samples)
    path = tmp_path / "run" / "comparison.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(CorruptTrace):
        run.reopened().rows()
    with pytest.raises(CorruptTrace, match="cannot be read"):
        load_rows(path)
    save_rows(pa.table({"a": [1]}), path)
    with pytest.raises(CorruptTrace, match="does not have the columns"):
        load_rows(path)
