"""`rlk-align import`, as users call it."""

import json
from pathlib import Path

import pytest
from command import Cli
from dump_files import lines

from rlk_align.logs.readers import registry
from rlk_align.logs.readers.base import Reader

RECORD = {
    "schema": "rlk-align/logprobs/1",
    "id": "a",
    "step": 2,
    "token_ids": [5, 6, 7],
    "prompt_length": 1,
    "rollout_logprobs": [-1.0, None],
    "train_logprobs": [-1.0, -2.0],
}


@pytest.mark.parametrize("format", ["auto", "jsonl"])
def test_it_tells_what_was_read_and_what_was_not(cli: Cli, tmp_path: Path, format: str) -> None:
    dump = lines(tmp_path / "dump.jsonl", [RECORD, RECORD | {"id": "b", "step": 5}])
    with dump.open("a") as file:
        file.write('{"schema": "rlk-al')
    done = cli("import", format, str(dump), "-o", str(tmp_path / "run"))
    assert done.code == 0, done.err
    assert "jsonl: 2 sequences, 6 tokens" in done.out
    assert "steps    2..5, 2 of them" in done.out
    assert "scored   4, both sides on 2" in done.out
    assert "missing  2 scored tokens have no rollout log-prob" in done.out
    assert "line 3, the last, is cut off" in done.out
    manifest = json.loads((tmp_path / "run" / "dump.json").read_text())
    assert manifest["sources"] == [{"path": str(dump), "size": dump.stat().st_size}]
    again = cli("gate", str(tmp_path / "run"))
    assert again.code == 4
    assert "nothing to compare" in again.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["jsonl", "nothing.jsonl"], "nothing.jsonl does not exist"),
        (["auto", "a\x1b[31m"], "a\\x1b[31m does not exist"),
        (["xml", "."], "format 'xml' is unknown"),
        (["jsonl"], "PATH"),
    ],
)
def test_a_mistake_has_code_2(cli: Cli, tmp_path: Path, words: list[str], said: str) -> None:
    done = cli("import", *words, "-o", str(tmp_path / "run"))
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("file", "format"),
    [
        ("run/step=0___rank=0___dump_index=1___name=input_ids.pt", "sglang-dumper"),
        ("step0/rank/dump.json", "msprobe"),
        ("capture-manifest.json", "rl-kernel"),
    ],
)
def test_auto_knows_the_recordings_of_other_tools(
    cli: Cli, tmp_path: Path, file: str, format: str
) -> None:
    path = tmp_path / "tool" / file
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    for given in (tmp_path / "tool", path):
        done = cli("import", "auto", given, "-o", tmp_path / "side")
        assert done.code == 2
        assert f"{format} files do not say which side they are of" in " ".join(done.err.split())
    other = tmp_path / "tool/elsewhere/capture-manifest.json"
    if format != "rl-kernel":
        other.parent.mkdir()
        other.write_text("{}")
        done = cli("import", "auto", tmp_path / "tool", "-o", tmp_path / "side")
        assert done.code == 2
        assert "files of several formats" in done.err
        assert format in done.err


def test_what_a_file_says_is_printed_and_not_obeyed(cli: Cli, tmp_path: Path) -> None:
    record = RECORD | {"sampling": {"\x1b[2J[red]": 1}}
    dump = lines(tmp_path / "[bold]dump.jsonl", [record])
    done = cli("import", "jsonl", str(dump), "-o", str(tmp_path / "run"))
    assert done.code == 2
    assert "\x1b" not in done.err
    assert "[bold]dump.jsonl" in done.err


def test_a_package_adds_a_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = Reader(
        name="ours",
        framework=None,
        patterns=("*.ours",),
        recognises=lambda path: path.suffix == ".ours",
        read=lambda files, findings, progress: iter(()),
    )

    class Entry:
        name = "ours"

        @staticmethod
        def load() -> Reader:
            return ours

    class Entries(dict):
        names = frozenset({"ours"})

    monkeypatch.setattr(
        registry.importlib.metadata, "entry_points", lambda group: Entries(ours=Entry)
    )
    (tmp_path / "a.ours").write_text("x")
    assert registry.reader("ours") is ours
    assert registry.detect([tmp_path]) is ours
    assert "ours" in registry.names()
