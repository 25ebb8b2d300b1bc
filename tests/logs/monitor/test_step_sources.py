"""The sources of steps: when a step is complete, and which sources are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from padded import padded

from rlk_align.errors import DumpError
from rlk_align.logs.monitor.run_monitor import RunMonitor
from rlk_align.logs.monitor.step_sources import open_source

LENGTH = 10


def steps(path: Path, ended: bool = False, source=None) -> list[int]:
    source = source or open_source(path)
    return [r.step for r in source.poll(RunMonitor(), ended)]


def line(step: int, sample: int = 0, /, **changes: object) -> str:
    g, t, _ = padded(step * 10 + sample, count=1, length=LENGTH + 1)
    record: dict[str, object] = {
        "schema": "rlk-align/logprobs/1", "id": sample, "step": step, "prompt_length": 1,
        "token_ids": [7] * (LENGTH + 1), "rollout_logprobs": g[0, 1:].tolist(),
        "train_logprobs": t[0, 1:].tolist(),
    }  # fmt: skip
    return json.dumps(record | changes) + "\n"


def nemo(folder: Path, step: int) -> Path:
    g, t, mask = padded(step, count=3, length=LENGTH + 4)
    path = folder / f"train_data_step{step}.jsonl"
    with path.open("w") as file:
        for n in range(len(g)):
            record = {
                "token_ids": [[7] * g.shape[1]], "generation_logprobs": [g[n].tolist()],
                "prev_logprobs": [t[n].tolist()],
                "token_loss_mask": [mask[n].astype(float).tolist()],
                "sample_loss_mask": [1.0], "input_lengths": [g.shape[1]], "rewards": [0.5],
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    return path


def test_a_nemo_rl_step_is_complete_once_the_next_is_there(tmp_path: Path) -> None:
    source = open_source(tmp_path)
    assert steps(tmp_path, source=source) == []
    nemo(tmp_path, 1)
    assert steps(tmp_path, source=source) == []
    nemo(tmp_path, 2)
    assert steps(tmp_path, source=source) == [1]
    assert steps(tmp_path, source=source) == []
    nemo(tmp_path, 10), nemo(tmp_path, 9)
    assert steps(tmp_path, source=source) == [2, 9]
    assert steps(tmp_path, ended=True, source=source) == [10]


def test_a_prime_rl_step_is_complete_once_it_is_stable(tmp_path: Path) -> None:
    for step in (3, 4):
        folder = tmp_path / "token_exports" / f"step_{step}"
        folder.mkdir(parents=True)
        g, t, mask = padded(step, count=1, length=LENGTH)
        record = {
            "schema_version": 1, "step": step, "token_ids": [7] * LENGTH,
            "position_ids": [*range(LENGTH)], "loss_mask": mask[0].tolist(),
            "inference_logprobs": g[0].tolist(), "trainer_logprobs": t[0].tolist(),
            "entropy": [1.0] * LENGTH, "env_name": "e", "micro_step": 0, "micro_sequence_idx": 0,
            "rl_weights": [1.0] * LENGTH, "ce_weights": None, "ref_kl_weights": None,
        }  # fmt: skip
        (folder / "rank_0.jsonl").write_text(json.dumps(record) + "\n")
    source = open_source(tmp_path)
    assert steps(tmp_path, source=source) == []
    (tmp_path / "token_exports" / "step_3" / "STABLE").touch()
    assert steps(tmp_path, source=source) == [3]
    assert steps(tmp_path, ended=True, source=source) == []


def test_a_line_is_complete_once_it_ends_and_a_step_once_another_begins(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(line(0, 0) + line(0, 1))
    source, monitor = open_source(path), RunMonitor()
    assert [*source.poll(monitor, False)] == []
    whole = line(1)
    with path.open("a") as file:
        file.write(whole[:40])
    assert [*source.poll(monitor, False)] == []
    with path.open("a") as file:
        file.write(whole[40:] + line(2)[:30])
    [record] = source.poll(monitor, False)
    assert (record.step, record.sequences, record.tokens) == (0, 2, 2 * LENGTH)
    # The last line remains incomplete.
    assert [r.step for r in source.poll(monitor, True)] == [1]


def test_an_imported_run_has_its_steps_in_order(tmp_path: Path) -> None:
    from rlk_align.logs.readers.importing import import_dump

    path = tmp_path / "run.jsonl"
    path.write_text("".join(line(s, n) for n in range(2) for s in (10, 2, 1)))
    import_dump("jsonl", [path], tmp_path / "run", ["x"])
    records = [*open_source(tmp_path / "run").poll(RunMonitor(), True)]
    assert [(r.step, r.sequences) for r in records] == [(1, 2), (2, 2), (10, 2)]


def test_a_log_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {"step": 1, "train/gen_kl_error": 1e-3, "train/token_mult_prob_error": 1.01},
        {"step": 1, "train/reward": 0.25, "note": "x"},
        {"step": 2, "validation/accuracy": 0.5},
        {"step": 3, "data": {"rollout_corr/k3_kl": 0.5, "rollout_corr/kl": -1e-3}},
        {"step": 4, "train/sampling_importance_ratio": 1.01},
        {"step": 5, "train": {"gen_kl_error": float("nan")}},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    monitor = RunMonitor()
    found = {r.step: r for r in open_source(path).poll(monitor, True)}
    assert sorted(found) == [1, 3, 4, 5]
    assert found[1].k3 is not None
    assert found[1].k3.value == 1e-3
    assert found[1].reward == 0.25
    assert found[1].findings == []
    failed = {s: {f.name for f in r.findings if f.level == "fail"} for s, r in found.items()}
    assert failed == {1: set(), 3: {"k3"}, 4: {"ratio-mean"}, 5: {"k3"}}
    assert monitor.exit_code == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "not json\n", "not JSON"),
        ("a.jsonl", '{"loss": 1}\n', "no step"),
        ("a.jsonl", '{"step": 1, "loss": 1}\n', "no metric"),
        ("a.jsonl", "[1]\n", "no step"),
        ("a.jsonl", line(2) + line(1), "follows step 2"),
        ("a.jsonl", line(2, step=None), "step None"),
        ("a.jsonl", line(2) + line(2, rollout_logprobs=["x"]), "line 2"),
        ("a.jsonl", line(1, train_logprobs=[0.5]), "train_logprobs"),
        ("a.pkl", "\x80\x04", "JSON Lines"),
    ],
)
def test_what_is_not_read(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DumpError, match=said):
        steps(path, ended=True)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="does not exist"):
        open_source(tmp_path / "no")
    with pytest.raises(DumpError, match="no step"):
        steps(tmp_path, ended=True)
    path = tmp_path / "a.jsonl"
    path.write_text(line(0) + line(1))
    source, monitor = open_source(path), RunMonitor()
    list(source.poll(monitor, False))
    path.write_text(line(0))
    with pytest.raises(DumpError, match="shorter"):
        list(source.poll(monitor, False))


def test_an_empty_file_is_no_pass(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    with pytest.raises(DumpError):
        steps(path, ended=True)


def test_the_numbers_of_a_step_are_those_of_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(line(4))
    [record] = open_source(path).poll(RunMonitor(), True)
    g, t, _ = padded(40, count=1, length=LENGTH + 1)
    d = (t - g)[0, 1:]
    assert record.k1 == pytest.approx(-d.mean())
    assert record.ratio_error is not None
    assert record.ratio_error.value == pytest.approx(np.exp(d).mean() - 1)
    assert record.frameworks["openrlhf"]["vllm_kl"] == pytest.approx(-d.mean())


def test_a_neutral_file_for_each_step_is_complete_once_the_next_is_there(tmp_path: Path) -> None:
    source = open_source(tmp_path)
    assert steps(tmp_path, source=source) == []
    for step in (8, 9, 10):
        (tmp_path / f"step_{step}.jsonl").write_text(line(step) + line(step, 1))
    assert steps(tmp_path, source=source) == [8, 9]
    assert steps(tmp_path, ended=True, source=source) == [10]
