"""`rlk-align compare --tokens` with a real engine on real ids, and its refusals."""

import json
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from command import Cli
from engine_dumps import hf_logprobs, texts, write_dump

SCORES = ("--sites", "logprob,logits")


def test_a_clean_dump_passes_and_a_temperature_is_the_decodes(cli: Cli, tmp_path: Path) -> None:
    batch = texts(24)
    assert batch.sampled_tokens > 500
    scored = hf_logprobs(batch, "eager")
    write_dump(batch, hf_logprobs(batch, "sdpa"), scored, tmp_path / "clean.jsonl")
    done = cli("compare", "--tokens", "clean.jsonl", "--train", "hf:attn=eager", *SCORES)
    assert done.code == 0, done.out + done.err
    record = done.verdict
    assert record is not None
    assert list(record["edges"]) == ["decode_vs_train", "train_vs_dump"]
    assert all(e["c"]["value"] < 0.05 for e in record["edges"].values())
    assert record["rescored"]["tokens"] == batch.sampled_tokens
    assert record["rescored"]["missing"] == 0
    assert record["engines"]["train"]["name"] == "hf"

    def at_07(row: dict) -> dict:
        return row | {"sampling": {"temperature": 0.7}}

    # The trainer divides by T, and the rollout's log-probs are raw.
    divided = hf_logprobs(batch, "eager", 0.7)
    dumped = write_dump(batch, scored, divided, tmp_path / "raw.jsonl", at_07)
    assert cli("import", "jsonl", dumped, "-o", "imported").code == 0
    flags = ("--tokens", "imported", "--rollout", "hf:attn=eager", *SCORES, "--run-dir", "again")
    done = cli("compare", *flags, "--output", "markdown=page.md", "--output", "html=page.html")
    assert done.code == 1, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["carrier"] == "decode_vs_prefill"
    for name in ("page.md", "page.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert "decode_vs_prefill" in page, name
        assert "the rollout's decode; alone it looks like temperature" in unescape(page), name
        assert "temperature, confidence high" in page, name
        assert f"{done.verdict['edges']['prefill_vs_dump']['mean_abs_dlogp']:.2g}" in page, name
    assert done.verdict["rescored"]["temperature"] == 0.7
    assert done.verdict["edges"]["prefill_vs_dump"]["mean_abs_dlogp"] < 0.01
    assert "divided by it, in float64" in done.out


def _cut(row: dict) -> dict:
    return row | {"token_ids": [10**6, *row["token_ids"][1:]]}


def _long(row: dict) -> dict:
    more = 5000
    values = {name: [*row[name], *[-1.0] * more] for name in ("rollout_logprobs", "train_logprobs")}
    return row | values | {"token_ids": [*row["token_ids"], *[5] * more]}


def _one_sided(row: dict) -> dict:
    return row | {"train_logprobs": None}


def dump(path: Path, change: Callable[[dict], dict] = lambda row: row) -> Path:
    """A dump with invented numbers, of which nothing is scored."""
    row = {
        "schema": "rlk-align/logprobs/1",
        "id": "a",
        "token_ids": [5, 6, 7, 8],
        "prompt_length": 2,
        "rollout_logprobs": [-1.0, -2.0],
        "train_logprobs": [-1.1, -2.0],
    }
    path.write_text(json.dumps(change(row)) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_cut, "has token id 1000000; the vocabulary"),
        (_long, "is too long"),
        (_one_sided, "no mismatch to split"),
        (lambda row: row | {"mask": [0, 0]}, "no scored token"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    cli: Cli, tmp_path: Path, change: Callable[[dict], dict], said: str
) -> None:
    dump(tmp_path / "dump.jsonl", change)
    done = cli("compare", "--tokens", "dump.jsonl", "--train", "hf")
    assert done.code == 2
    assert said in done.err.replace("\n", " ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "add --train SPEC"),
        (("--train", "replay:path=x"), "name an engine"),
        (("--train", "hf", "--edges", "decode_vs_train"), "--edges"),
        (("--train", "hf", "--rollout", "hf:temperature=0.5", "--probe"), "--probe"),
        (("--train", "hf:temperature=0.4", "--rollout", "hf:temperature=0.5"), "different"),
        (("--train", "hf", "--contract", "bf16"), "unknown contract for runs"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    cli: Cli, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    dump(tmp_path / "dump.jsonl")
    done = cli("compare", "--tokens", "dump.jsonl", *flags)
    assert done.code == 2, done.out
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b'{"schema": "rlk-ali'])
def test_files_that_are_no_dump_are_refused(cli: Cli, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dump.jsonl").write_bytes(content)
    done = cli("compare", "--tokens", "dump.jsonl", "--train", "hf")
    assert done.code == 2, done.out
    assert "Traceback" not in done.err


def test_a_run_is_not_written_over_its_dump(cli: Cli, tmp_path: Path) -> None:
    assert cli("import", "jsonl", dump(tmp_path / "dump.jsonl"), "-o", "run").code == 0
    done = cli("compare", "--tokens", "run", "--train", "hf", "--run-dir", "run")
    assert done.code == 2
    assert "name another --run-dir" in done.err
