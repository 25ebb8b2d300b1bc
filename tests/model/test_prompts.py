"""Prompts and token batches, read and written: errors name the line of a malformed input."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_align.errors import CorruptTrace, PromptError
from rlk_align.model.prompts import (
    Prompt,
    Sample,
    TokenBatch,
    check_lengths,
    load_prompts,
    save_prompts,
)
from rlk_align.model.sites import RowIndex

BATCH = TokenBatch((Sample("a", (1, 2, 3), (4, 5)), Sample("b", (7,), ()), Sample("c", (8,), (9,))))


def written(tmp_path: Path, text: str | bytes, name: str = "p.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_json_lines_are_parsed(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "Hi", "id": "first"}',
        "",
        '{"ids": [3, 0, 5]}',
        '{"prompt": "a\\nb", "id": 7, "source": "ignored"}',
    ]
    assert load_prompts(written(tmp_path, "\n".join(lines))) == [
        Prompt("first", "Hi"),
        Prompt("line3", None, (3, 0, 5)),
        Prompt("7", "a\nb"),
    ]


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, "one\n\n  two \r\n{not json\n", "p.txt")
    prompts = load_prompts(path)
    assert [(p.id, p.text) for p in prompts] == [
        ("line1", "one"),
        ("line3", "  two "),
        ("line4", "{not json"),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "JSON"),
        ("[1, 2]", "object"),
        ('"text"', "object"),
        ("{}", "prompt"),
        ('{"prompt": ""}', "missing or empty"),
        ('{"prompt": 3}', "it must be text"),
        ('{"prompt": null}', "prompt"),
        ('{"messages": []}', "messages"),
        ('{"messages": "Hi"}', "messages"),
        ('{"messages": ["Hi"]}', "'role' and a 'content'"),
        ('{"messages": [{"role": "user"}]}', "'role' and a 'content'"),
        ('{"messages": [{"role": 1, "content": "Hi"}]}', "'role' and a 'content'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "not text"),
        ('{"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}', "both given"),
        ('{"ids": []}', "ids"),
        ('{"ids": [true]}', "ids"),
        ('{"ids": [1, false]}', "ids"),
        ('{"ids": [1, -1]}', "ids"),
        ('{"ids": [1.0]}', "ids"),
        ('{"ids": ["1"]}', "ids"),
        ('{"ids": "12"}', "ids"),
        ('{"ids": {"0": 1}}', "ids"),
        ('{"ids": [' + "9" * 5000 + "]}", ""),
        ("[" * 100_000, ""),
    ],
    ids=lambda text: text[:20],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = written(tmp_path, '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(PromptError) as error:
        load_prompts(path)
    assert f"{path}:3" in error.value.message
    assert says in error.value.message


def test_equal_ids_are_named_with_their_line(tmp_path: Path) -> None:
    lines = ['{"id": "x", "prompt": "1"}', '{"prompt": "2"}', '{"id": "x", "prompt": "3"}']
    path = written(tmp_path, "\n".join(lines))
    with pytest.raises(PromptError) as error:
        load_prompts(path)
    assert "'x'" in error.value.message
    assert f"{path}:3" in error.value.message


def test_an_id_of_its_own_may_not_meet_a_line_number(tmp_path: Path) -> None:
    path = written(tmp_path, '{"id": "line2", "prompt": "1"}\n{"prompt": "2"}\n')
    with pytest.raises(PromptError):
        load_prompts(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(PromptError, match=str(path)):
            load_prompts(path)


@pytest.mark.parametrize("text", ["", "\n \n\t\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PromptError, match="no prompts"):
        load_prompts(written(tmp_path, text))


def test_what_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(PromptError, match="UTF-8"):
        load_prompts(path)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_byte_order_mark_and_other_line_ends_change_no_prompt(tmp_path: Path, name: str) -> None:
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    plain = load_prompts(written(tmp_path, text, name))
    saved = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    assert load_prompts(written(tmp_path, saved, name)) == plain
    assert len(plain) == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_utf16_is_named(tmp_path: Path, name: str, encoding: str) -> None:
    path = written(tmp_path, '{"prompt": "hello"}\n'.encode(encoding), name)
    with pytest.raises(PromptError, match=r"UTF-16.*save it as UTF-8"):
        load_prompts(path)


CHAT = '{"messages": [{"role": "user", "content": "Hi"}], "id": "c"}'


def test_messages_of_a_chat_are_kept_for_the_template(tmp_path: Path) -> None:
    [prompt] = load_prompts(written(tmp_path, CHAT))
    assert prompt == Prompt("c", None, messages=({"role": "user", "content": "Hi"},))
    answered = Prompt("d", "<s>Hi", rendered=True)
    save_prompts([prompt, answered], tmp_path / "saved.jsonl")
    assert load_prompts(tmp_path / "saved.jsonl") == [prompt, answered]


def test_text_that_utf8_cannot_hold_is_refused_where_it_is_read(tmp_path: Path) -> None:
    # JSON can express half of a surrogate pair, which no tokenizer and no UTF-8 file accepts.
    path = written(tmp_path, '{"prompt": "fine"}\n{"prompt": "\\ud800"}\n')
    with pytest.raises(PromptError) as error:
        load_prompts(path)
    assert f"{path}:2" in error.value.message


@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
            st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_saved_prompts_load_as_they_were(tmp_path_factory: pytest.TempPathFactory, items) -> None:
    prompts = [
        Prompt(f"p{i}", item) if isinstance(item, str) else Prompt(f"p{i}", None, item)
        for i, item in enumerate(items)
    ]
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    save_prompts(prompts, path)
    assert load_prompts(path) == prompts


ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
samples = st.builds(Sample, st.text(max_size=4), ids.filter(len), ids)


@given(st.lists(samples, min_size=1, max_size=5).map(lambda s: TokenBatch(tuple(s))))
def test_a_token_batch_is_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, batch: TokenBatch
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens.parquet"
    batch.save(path)
    assert TokenBatch.load(path) == batch
    table = pq.read_table(path).to_pylist()
    assert [r["token"] for r in table] == [t for s in batch.samples for t in s.ids]
    assert sum(r["sampled"] for r in table) == batch.sampled_tokens


def test_a_mask_is_saved_with_the_tokens(tmp_path: Path) -> None:
    masked = Sample("x", (1, 2), (3, 4, 5), (True, False, True))
    batch = TokenBatch((masked, Sample("y", (1,), (2,))))
    assert (batch.sampled_tokens, batch.counted_tokens) == (4, 3)
    batch.save(tmp_path / "tokens.parquet")
    loaded = TokenBatch.load(tmp_path / "tokens.parquet")
    assert loaded.samples[0] == masked
    assert loaded.counted_tokens == 3
    assert RowIndex(batch).counted.tolist() == [False, True, False, True, False, True, False]
    other = TokenBatch((Sample("x", (1, 2), (3, 4, 5), (True, True, True)), batch.samples[1]))
    assert other._digest() != batch._digest()
    assert batch.with_responses([[7], [8, 9]]).counted_tokens == 3
    with pytest.raises(CorruptTrace):
        TokenBatch.load(
            rewritten(tmp_path, lambda t: t.set_column(5, "counted", [[True] * len(t)]), batch)
        )


def test_a_sample_knows_where_log_probs_are_wanted() -> None:
    sample = Sample("x", (10, 11, 12), (13, 14))
    assert sample.ids == (10, 11, 12, 13, 14)
    # The log-prob at position 2 is that of token 13, the one at position 3 that of token 14.
    assert [sample.ids[p + 1] for p in sample.sampled_positions] == [13, 14]
    assert list(Sample("y", (1, 2)).sampled_positions) == []


def test_responses_are_put_after_the_same_prompts() -> None:
    batch = BATCH.with_responses([[1], [2, 3], []])
    assert [s.prompt_ids for s in batch.samples] == [s.prompt_ids for s in BATCH.samples]
    assert [s.response_ids for s in batch.samples] == [(1,), (2, 3), ()]
    assert batch.sampled_tokens == 3


def test_a_truncated_table_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "tokens.parquet"
    BATCH.save(path)
    data = path.read_bytes()
    for size in (0, 3, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptTrace, match=r"tokens\.parquet"):
            TokenBatch.load(path)
    path.unlink()
    with pytest.raises(CorruptTrace):
        TokenBatch.load(path)


def test_no_flipped_bit_gives_other_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.parquet"
    BATCH.save(path)
    data = bytearray(path.read_bytes())
    refused = 0
    for at in range(0, len(data), 3):
        data[at] ^= 0x10
        path.write_bytes(data)
        try:
            assert TokenBatch.load(path) == BATCH, f"byte {at}"
        except CorruptTrace:
            refused += 1
        data[at] ^= 0x10
    assert refused > 20


def rewritten(tmp_path: Path, change, batch: TokenBatch | None = None) -> Path:
    path = tmp_path / "tokens.parquet"
    (batch or BATCH).save(path)
    pq.write_table(change(pq.read_table(path)), path)
    return path


@pytest.mark.parametrize("row", [0, 1, 3, 5])
def test_a_missing_position_is_corrupt(tmp_path: Path, row: int) -> None:
    def drop(table: pa.Table) -> pa.Table:
        return pa.concat_tables([table[:row], table[row + 1 :]])

    with pytest.raises(CorruptTrace):
        TokenBatch.load(rewritten(tmp_path, drop))


def test_an_empty_table_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptTrace):
        TokenBatch.load(rewritten(tmp_path, lambda table: table[:0]))


@pytest.mark.parametrize("column", ["sample", "prompt_id", "position", "token", "sampled"])
def test_a_missing_column_is_corrupt(tmp_path: Path, column: str) -> None:
    with pytest.raises(CorruptTrace):
        TokenBatch.load(rewritten(tmp_path, lambda table: table.drop_columns([column])))


def test_lengths_are_checked_to_the_token() -> None:
    check_lengths(BATCH, context=7, vocab=10, max_new_tokens=2)
    with pytest.raises(PromptError, match="'a' is too long: 5 tokens and 3 new"):
        check_lengths(BATCH, context=7, vocab=10, max_new_tokens=3)
    with pytest.raises(PromptError, match=r"'c'.* 9.* 9 entries"):
        check_lengths(BATCH, context=7, vocab=9, max_new_tokens=0)
    with pytest.raises(PromptError, match="'e' has no tokens"):
        check_lengths(TokenBatch((Sample("e", ()),)), 7, 9, 0)


def test_saved_records_are_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    save_prompts([Prompt("a", "ü\n"), Prompt("b", None, (1, 2))], path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"id": "a", "prompt": "ü\n"}, {"id": "b", "ids": [1, 2]}]
