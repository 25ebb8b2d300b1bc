"""Files that SGLang's own dumper wrote, in SGLang 0.5.23 and around a transformers model."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_env
import torch
from command import Cli, command_line
from hostile_pickle import Hostile
from imports import beyond, imported, rejected, trace_of

from rlk_align import record
from rlk_align.data import data_path
from rlk_align.trace.writer import one_thread

pytestmark = [sglang_env.needed, pytest.mark.whole_matrix, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
SITES, NEW_TOKENS = 72, 20


def run_job(folder: Path, *words: str, ranks: int = 1) -> None:
    """Runs a part of dumper_job.py, on several ranks if asked."""
    part, *rest = words
    command = [str(sglang_env.PYTHON)]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command += [str(HERE / "dumper_job.py"), part, str(folder), str(data_path("model")), *rest]
    root = HERE.parents[1]
    path = os.pathsep.join(map(str, (root, root / "kernels", root / "tests/support")))
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the dumper wrote of healthy and of faulty runs, by name."""
    folder = tmp_path_factory.mktemp("dumps")
    run_job(folder, "rollout")
    run_job(folder, "train")
    return folder


@pytest.fixture(scope="module")
def sides(dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them imported, by name."""
    folder = tmp_path_factory.mktemp("sides")
    cli = command_line(folder)
    for name in ("rollout", "scaled"):
        done = imported(cli, "sglang-dumper", dumps / name, folder / name, "rollout")
        assert done.code == 0, done.err
        assert f"sites    {SITES} of {SITES}" in done.out
    for name in ("train", "train-scaled", "train-crossed", "train-of-scaled"):
        known = ("--tokens", folder / ("scaled" if "of-scaled" in name else "rollout"))
        done = imported(cli, "sglang-dumper", dumps / name, folder / name, "train", *known)
        assert done.code == 0, done.err
        assert f"sites    {SITES - 8} of {SITES}" in done.out
        assert "missing  q_rope, k_rope" in done.out
    return folder


@pytest.fixture
def verdict(cli: Cli, sides: Path) -> Callable[[str, str], Any]:
    def compared(rollout: str, train: str) -> Any:
        return cli("compare", sides / rollout, sides / train, "--edges", "decode_vs_train")

    return compared


def test_healthy_sides_have_no_operator_beyond_its_budget(verdict: Any) -> None:
    done = verdict("rollout", "train")
    assert done.code == 4  # neither weights nor attributes are known, so it is no pass
    assert beyond(done) == set()
    found = done.verdict
    assert found["precheck"]["tokens"] == "equal"
    for kind in ("weights", "attributes"):
        expected = "not recorded on the rollout and the training side"
        assert found["precheck"][kind] == expected
    assert found["controls"]["observer"] == "not measured"
    edge = found["edges"]["decode_vs_train"]
    assert edge["tokens"] == 38
    assert edge["max_abs_dlogp"] < 0.2
    assert found["coverage"]["paired"] == 2866
    lacking = {each["site"] for each in found["coverage"]["unpaired"]}
    assert lacking == {f"layers.{i}.{op}" for i in range(4) for op in ("q_rope", "k_rope")}


def test_rows_are_those_of_the_files(dumps: Path, sides: Path) -> None:
    """All decode steps of a site that a fused module computes, against the files themselves."""
    said = json.loads((dumps / "rollout.json").read_text())
    trace = trace_of(sides / "rollout")
    assert sorted(list(s.ids) for s in trace.tokens.samples) == sorted(
        s["prompt"] + s["response"][:-1] for s in said
    )
    reader = trace.read_pass("decode")
    rows = reader.rows("layers.1.up_proj")
    assert rows is not None
    values = reader.values("layers.1.up_proj", rows, np.arange(len(rows.sample)))
    name = "*name=non_intrusive__model.layers.1.mlp.gate_up_proj.output__*"
    files = (dumps / "rollout").glob(name)
    written = torch.cat([torch.load(f, weights_only=True)["value"] for f in files])
    assert len(written) == len(values) == 47
    expected = sorted(map(bytes, written[:, 512:].contiguous().view(torch.uint8).numpy()))
    assert sorted(map(bytes, values.contiguous().view(torch.uint8).numpy())) == expected
    assert reader.record.positions.checked > 40
    assert reader.record.positions.wrong == reader.record.boundaries.wrong == 0


def test_log_probs_are_what_sglang_says(dumps: Path, sides: Path) -> None:
    """Computed from the logits of the files; SGLang's sampler has the same."""
    said = json.loads((dumps / "rollout.json").read_text())
    trace = trace_of(sides / "rollout")
    reader = trace.read_pass("decode")
    rows = reader.rows("logprob")
    assert rows is not None
    values = reader.values("logprob", rows, np.arange(len(rows.sample)))[:, 0].tolist()
    found = dict(zip(zip(rows.sample, rows.position, strict=True), values, strict=True))
    prompts = [list(sample.prompt_ids) for sample in trace.tokens.samples]
    for one in said:
        number, first = prompts.index(one["prompt"]), len(one["prompt"]) - 1
        got = [found[number, first + t] for t in range(NEW_TOKENS - 1)]
        assert got == pytest.approx(one["logprobs"][:-1], abs=1e-5)


@pytest.mark.parametrize(
    ("rollout", "train", "expected"),
    [
        (
            *("scaled", "train-of-scaled"),
            {("layers.1.gate_proj", "rollout"), ("layers.1.up_proj", "rollout")},
        ),
        ("rollout", "train-scaled", {("layers.1.o_proj", "train")}),
    ],
)
def test_a_planted_fault_is_named_on_its_side(
    verdict: Any, rollout: str, train: str, expected: set[tuple[str, str]]
) -> None:
    done = verdict(rollout, train)
    assert beyond(done) == expected
    side = {"rollout": "rollout", "train": "training"}[next(iter(expected))[1]]
    assert f"the {side} side is off, if it has the weights of its model" in done.out
    assert "scaled by 1.031" in done.out


def test_a_mask_that_crosses_sequences_is_named(verdict: Any) -> None:
    done = verdict("rollout", "train-crossed")
    [mismatch] = done.verdict["precheck"]["mismatches"]
    assert mismatch["name"] == "sequence_boundary"
    assert (mismatch["sample"], mismatch["position"]) == (1, 0)
    assert mismatch["train"] == "sees other tokens"


def test_rows_from_a_cache_are_missing(
    cli: Cli, dumps: Path, sides: Path, tmp_path: Path, verdict: Any
) -> None:
    out = tmp_path / "cached"
    alone = imported(cli, "sglang-dumper", dumps / "cached", out, "rollout")
    assert "none of 2 sequences in the files starts at its first token" in rejected(alone)
    known = ("--tokens", sides / "rollout")
    done = imported(cli, "sglang-dumper", dumps / "cached", out, "rollout", *known)
    assert done.code == 0, done.err
    done = verdict(str(out), "train")
    assert any("rollout decode lacks 7 rows" in doubt for doubt in done.verdict["doubts"])


def test_an_imported_side_is_compared_with_our_own_recording(
    cli: Cli, dumps: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    said = json.loads((dumps / "rollout.json").read_text())
    with one_thread():
        model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype="bfloat16").eval()
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight.mul_(1.03125)
        recorder = record.trainer(model, str(tmp_path / "train"), every=1)
        with recorder.step(0, [s["prompt"] for s in said]), torch.no_grad():
            for s in said:
                model(torch.tensor([s["prompt"] + s["response"]]), use_cache=False)
        recorder.close()
    out = tmp_path / "rollout"
    known = ("--tokens", tmp_path / "train")
    done = imported(cli, "sglang-dumper", dumps / "rollout", out, "rollout", *known)
    assert done.code == 0, done.err
    done = cli("compare", out, tmp_path / "train", "--edges", "decode_vs_train")
    verdict = done.verdict
    assert verdict is not None, done.err
    assert verdict["precheck"]["weights"] == "not recorded on the rollout side"
    # The logits after the last row give the last token's log-prob, now that the token is known.
    assert verdict["edges"]["decode_vs_train"]["tokens"] == 40
    # Both sides are recomputed with the weights that the trainer saved.
    assert beyond(done) == {("layers.2.down_proj", "rollout")}
    assert "the rollout side is off, if it has the weights of its model" in done.out


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two tensor-parallel ranks of SGLang dumped."""
    folder = tmp_path_factory.mktemp("ranks")
    run_job(folder, "rollout", "once", ranks=2)
    return folder / "rollout"


def test_ranks_are_joined(cli: Cli, two_ranks: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollout"
    done = imported(cli, "sglang-dumper", two_ranks, out, "rollout")
    assert f"sites    {SITES} of {SITES}" in done.out, done.err
    trace = trace_of(out)
    assert trace.record.options == {"tp": 2}
    assert trace.record.shards["layers.0.up_proj"] == [(0, 0, 256), (1, 256, 512)]
    reader = trace.read_pass("decode")
    assert not [name for name in reader.record.sites if "@" in name]
    assert reader.record.positions.wrong == reader.record.boundaries.wrong == 0


def test_a_rank_with_other_bits_is_named(cli: Cli, two_ranks: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(two_ranks, changed)
    [path] = changed.glob("step=0___rank=1_*model.layers.2.input_layernorm.output.0___*")
    content = torch.load(path, weights_only=True)
    content["value"][0, 3] += 1
    torch.save(content, path)
    out = tmp_path / "rollout"
    assert imported(cli, "sglang-dumper", changed, out, "rollout").code == 0
    sites = trace_of(out).read_pass("decode").record.sites
    assert sites["layers.2.attn_norm@rank1"].rows > 0


def test_a_missing_rank_is_named(cli: Cli, two_ranks: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    for path in two_ranks.glob("step=*___rank=0___*"):
        (one / path.name).hardlink_to(path)
    done = imported(cli, "sglang-dumper", one, tmp_path / "out", "rollout")
    assert "the files of tensor-parallel rank 1 are missing, of 2 ranks" in rejected(done)


def test_damaged_files_are_named(cli: Cli, dumps: Path, tmp_path: Path) -> None:
    """One file is replaced by something else; the others stay as they are."""
    pattern = "*name=non_intrusive__model.layers.1.mlp.down_proj.output__*"
    ids = "*name=input_ids__*"
    for number, (which, spoil, said) in enumerate(
        (
            (pattern, lambda path: path.write_bytes(path.read_bytes()[:900]), "was cut off"),
            (pattern, lambda path: torch.save({"value": torch.ones(2)}, path), "needs value, and"),
            (
                *(pattern, lambda path: torch.save({"value": Hostile(tmp_path / "owned")}, path)),
                "objects other than tensors",
            ),
            (ids, lambda path: path.unlink(), "has no input_ids"),
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(dumps / "train-scaled", folder)
        for path in folder.glob(which):
            spoil(path)
        done = imported(cli, "sglang-dumper", folder, tmp_path / "out", "train")
        assert said in rejected(done)
        assert not (tmp_path / "owned").exists()
        assert not list((tmp_path / "out").rglob("recording.json"))
