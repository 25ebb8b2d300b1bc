"""Dumps of real vLLM and FSDP runs, scored again by both: each planted fault is on its edge."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command import Cli, capture_of, require_engine
from engine_dumps import hf_logprobs, recorded_logprobs, scaled, texts, write_dump

from rlk_align.data import data_path

pytestmark = pytest.mark.whole_matrix
KEPT = ("--sites", "logprob,logits")


@pytest.fixture
def engines(cli: Cli, tmp_path: Path) -> Cli:
    """`cli`, where run `v` was sampled by vLLM and run `f` is FSDP's of the same ids."""
    require_engine("vllm")
    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:24]) + "\n")
    sampled = ("--prompts", "prompts.jsonl", "--max-new-tokens", 40, *KEPT)
    assert cli("capture", "--engine", "vllm", *sampled, "-o", "v").code == 0
    assert cli("capture", "--engine", "fsdp", "--tokens", "v", *KEPT, "-o", "f").code == 0
    return cli


def test_each_fault_is_on_its_edge(engines: Cli, tmp_path: Path) -> None:
    rollout, train = (capture_of(tmp_path / name, "capture") for name in "vf")
    g, t = recorded_logprobs(rollout, "decode"), recorded_logprobs(train, "prefill")
    dumps = {
        "clean": (g, t),
        "decode": (scaled(rollout, 0.7), t),
        "trainer": (g, scaled(train, 1.5)),
    }
    for name, sides in dumps.items():
        write_dump(rollout.tokens, *sides, tmp_path / f"{name}.jsonl")

    def rescored(dump: str, train: str = "fsdp"):
        flags = ("--tokens", f"{dump}.jsonl", "--rollout", "vllm", "--train", train, *KEPT)
        return engines("compare", *flags)

    clean = rescored("clean")
    assert clean.code == 0, clean.out + clean.err
    edges = clean.verdict["edges"]
    assert list(edges) == ["decode_vs_prefill", "prefill_vs_train", "train_vs_dump"]
    assert all(e["c"]["value"] < 0.05 for e in edges.values())
    for dump, edge in (("decode", "decode_vs_prefill"), ("trainer", "train_vs_dump")):
        done = rescored(dump)
        assert done.code == 1, done.out + done.err
        assert done.verdict["carrier"] == edge
        assert done.verdict["edges"][edge]["share"]["low"] > 0.8
    fault = rescored("clean", "hf:fault=attn-scale-missing")
    assert fault.verdict["odd"] == "train", fault.out
    assert fault.verdict["carrier"] == "prefill_vs_train"
    assert "the engine is off, not the run" in fault.out


def test_the_run_that_is_kept_counts_the_tokens_of_the_dumps_mask(cli: Cli, tmp_path: Path) -> None:
    require_engine("vllm")
    batch = texts(6)
    values = hf_logprobs(batch, "eager")
    scored = 0

    def masked(row: dict) -> dict:
        """Every third response token is a tool's."""
        nonlocal scored
        mask = [k % 3 != 1 for k in range(len(row["rollout_logprobs"]))]
        scored += sum(mask)
        return row | {"mask": mask}

    write_dump(batch, values, values, tmp_path / "tools.jsonl", masked)
    sides = ("--rollout", "vllm", "--train", "fsdp")
    done = cli("compare", "--tokens", "tools.jsonl", *sides, "--run-dir", "scores")
    assert done.verdict is not None, done.err
    assert 0 < scored == done.verdict["rescored"]["tokens"] < batch.sampled_tokens
    kept = cli("gate", "scores").verdict
    assert kept is not None
    assert kept["tokens"] == scored
    edge, split = kept["edges"]["prefill_vs_train"], done.verdict["edges"]["prefill_vs_train"]
    assert edge["tokens"] == scored
    for name in ("mean_abs_dlogp", "max_abs_dlogp", "k3", "ratio_mean"):
        assert edge[name] == pytest.approx(split[name], rel=1e-9), name
    rows = pq.read_table(tmp_path / "scores" / "comparison.parquet")
    assert rows["first_logprob"].drop_null().length() == scored
