"""The recorder around a live transformers model: batches of every form, and what it refuses."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlk_align import record
from rlk_align.data import data_path
from rlk_align.errors import BadOption, ToolError
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.record.shared.choose import Lowest, lowest_prompts, prefix_hash
from rlk_align.record.shared.layout import RecordingRecord, step_folder, steps_of
from rlk_align.record.train.recorder import Recorder
from rlk_align.trace.reader import Trace
from rlk_align.trace.records import load_record
from rlk_align.trace.writer import one_thread

PROMPTS = [[5, 40, 300, 7], [11, 12, 13], [21, 500, 8, 9, 10, 77], [60, 61]]
RESPONSES = [[30, 31, 32], [45, 46, 47, 48, 49], [90], [17, 18, 19, 20]]
SEQUENCES = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    with one_thread():  # the tensors are small, and tests share the processors
        yield AutoModelForCausalLM.from_pretrained(data_path("model"), dtype="bfloat16").eval()


def plain(model: Any, order: list[int]) -> None:
    for i in order:
        model(input_ids=torch.tensor([SEQUENCES[i]]), use_cache=False)


def padded_left(model: Any, order: list[int]) -> None:
    """Two micro-batches, without position ids."""
    for members in (order[:3], order[3:]):
        longest = max(len(SEQUENCES[i]) for i in members)
        lacking = [longest - len(SEQUENCES[i]) for i in members]
        ids = [[0] * n + SEQUENCES[i] for n, i in zip(lacking, members, strict=True)]
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in lacking])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(torch.tensor(ids), attention_mask=mask, position_ids=positions, use_cache=False)


def packed(model: Any, order: list[int], first: int = 0) -> None:
    """All sequences in one row, whose positions begin at `first` in each."""
    ids = [token for i in order for token in SEQUENCES[i]]
    positions = [p + first for i in order for p in range(len(SEQUENCES[i]))]
    inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
    model(**inputs, use_cache=False)


def shifted(model: Any, order: list[int]) -> None:
    packed(model, order, first=3)


def checkpointed(model: Any, order: list[int]) -> None:
    """A step of training, whose backward repeats the forward of each layer."""
    model.train()
    model.gradient_checkpointing_enable()
    try:
        for i in order:
            ids = torch.tensor([SEQUENCES[i]])
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        model.gradient_checkpointing_disable()
        model.zero_grad()
        model.eval()


def last_logits(model: Any, order: list[int]) -> None:
    for i in order:
        kept = len(RESPONSES[i]) + 1
        model(torch.tensor([SEQUENCES[i]]), logits_to_keep=kept, use_cache=False)


Batches = Callable[[Any, list[int]], None]


@pytest.fixture
def recorder(model: Any, tmp_path: Path) -> Iterator[Recorder]:
    made = record.trainer(model, str(tmp_path / "train"), every=5, sequences=4, weights=False)
    yield made
    made.close()


def recorded(recorder: Recorder, model: Any, batches: Batches, step: int = 0) -> Trace:
    with recorder.step(step, PROMPTS):
        batches(model, [2, 0, 3, 1])
    return Trace(step_folder(recorder._folder.path, step) / "rank-0")


def logprobs(trace: Trace, name: str = "prefill") -> dict[tuple[str, int], float]:
    """(name of the sequence, position) -> log-prob."""
    reader = trace.read_pass(name)
    rows = reader.rows("logprob")
    assert rows is not None
    values = reader.values("logprob", rows, np.arange(len(rows.sample))).flatten().tolist()
    names = [trace.tokens.samples[i].prompt_id for i in rows.sample]
    return {(n, int(p)): v for n, p, v in zip(names, rows.position, values, strict=True)}


def assert_complete(trace: Trace) -> None:
    """Every row of every site is there, once, at its own position."""
    assert sorted(list(s.ids) for s in trace.tokens.samples) == sorted(SEQUENCES)
    index, reader = RowIndex(trace.tokens), trace.read_pass("prefill")
    for site in model_sites(trace.record.shape):
        rows = reader.rows(site.name)
        assert rows is not None, site.name
        expected = index.expected(site, decode=False).sum()
        assert len({*zip(rows.sample, rows.position, strict=True)}) == expected, site.name
    assert reader.record.positions.checked > 0
    assert not reader.record.boundaries.wrong


def test_rows_are_found_however_sequences_are_batched(recorder: Recorder, model: Any) -> None:
    one = recorded(recorder, model, plain)
    assert_complete(one)
    expected = logprobs(one)
    assert len(expected) == sum(map(len, RESPONSES))
    assert logprobs(one, "prefill.untapped") == expected == logprobs(one, "prefill.repeat")
    for step, batches in enumerate((padded_left, packed, checkpointed, last_logits), 1):
        trace = recorded(recorder, model, batches, 5 * step)
        assert_complete(trace)
        assert not trace.read_pass("prefill").record.positions.wrong, batches
        found = logprobs(trace)
        assert found.keys() == expected.keys()
        assert max(abs(found[key] - expected[key]) for key in found) < 0.1, batches
    # The check of positions sees another position.
    trace = recorded(recorder, model, shifted, 50)
    positions = trace.read_pass("prefill").record.positions
    assert positions.wrong
    assert positions.harmless
    assert positions.one_shift == 3


def test_both_sides_choose_the_same_sequences(model: Any, tmp_path: Path) -> None:
    keys = sorted((prefix_hash(p), prefix_hash(s)) for p, s in zip(PROMPTS, SEQUENCES, strict=True))
    for count in (1, 2, 3):
        chosen: set[tuple[int, ...]] = set()
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            recorder = record.trainer(
                model, str(tmp_path / f"{count}{order[0]}"), sequences=count, weights=False
            )
            with recorder.step(0, PROMPTS):
                plain(model, order)
            recorder.close()
            shard = step_folder(recorder._folder.path, 0) / "rank-0"
            kept = load_record(RecordingRecord, shard / "recording.json")
            batch = Trace(shard).tokens.samples
            names = sorted(
                (prefix_hash(batch[i].prompt_ids), prefix_hash(batch[i].ids)) for i in kept.chosen
            )
            assert names == keys[:count]
            assert kept.seen == 4
            chosen |= {batch[i].prompt_ids for i in kept.chosen}
        # A rollout engine knows the prompts alone.
        assert {tuple(PROMPTS[i]) for i in lowest_prompts(PROMPTS, count)} == chosen
    # All responses to the last of the lowest prompts may be among the lowest.
    assert sorted(lowest_prompts([PROMPTS[0]] * 3, 1)) == [0, 1, 2]
    lowest = Lowest(1)
    assert lowest.offer(("b", "b"))
    assert not lowest.offer(("b", "b"))
    assert not lowest.offer(("c", "a"))
    assert lowest.offer(("a", "z"))


def test_a_step_between_is_not_recorded(recorder: Recorder, model: Any) -> None:
    with recorder.step(3, PROMPTS):
        plain(model, [0])
    assert not steps_of(recorder._folder.path)
    assert not model._forward_hooks


def test_what_is_refused(recorder: Recorder, model: Any, tmp_path: Path) -> None:
    recorded(recorder, model, plain)
    with pytest.raises(BadOption, match="step 0 is recorded already"):
        recorded(recorder, model, plain)
    with pytest.raises(ToolError, match="another process records"):
        record.trainer(model, str(tmp_path / "train"))
    for settings, said in (
        ({"engine": "sglang"}, "'sglang' is not recorded"),
        ({"engine": "megatron"}, "the model is one of 'hf'"),
        ({"every": 0}, "every=0"),
        ({"sequences": 0}, "sequences=0"),
    ):
        with pytest.raises(BadOption, match=said):
            record.trainer(model, str(tmp_path / "other"), **settings)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="a compiled model is not recorded"):
        record.trainer(torch.compile(model), str(tmp_path / "other"))
    with pytest.raises(BadOption, match="not a causal LM"):
        record.trainer(torch.nn.Linear(1, 1), str(tmp_path / "other"))
    # A step that failed leaves nothing, and may be recorded again.
    refused: tuple[tuple[str, Batches], ...] = (
        ("no forward of the step", lambda model, order: None),
        ("autocast", under_autocast),
        ("without input_ids", lambda model, order: model(inputs_embeds=torch.zeros(1, 2, 128))),
    )
    for said, batches in refused:
        with pytest.raises(BadOption, match=said):
            recorded(recorder, model, batches, 5)
        assert list(steps_of(recorder._folder.path)) == [0]
        assert not model._forward_hooks
    recorded(recorder, model, plain, 5)
    assert list(steps_of(recorder._folder.path)) == [0, 5]


def under_autocast(model: Any, order: list[int]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain(model, order)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import test_trainer as t
from transformers import AutoModelForCausalLM
from rlk_align import record
model = AutoModelForCausalLM.from_pretrained(t.data_path("model"), dtype="bfloat16").eval()
recorder = record.trainer(model, sys.argv[1], every=1, weights=False)
with recorder.step(0, t.PROMPTS):
    t.plain(model, [0, 1, 2, 3])
with recorder.step(1, t.PROMPTS):
    t.plain(model, [0, 1])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_loses_the_step_that_was_not_complete(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent)],
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(steps_of(folder)) == [0]
    assert_complete(Trace(step_folder(folder, 0) / "rank-0"))
    # The next job replaces what is incomplete.
    recorder = record.trainer(model, str(folder), every=1, sequences=4, weights=False)
    assert_complete(recorded(recorder, model, plain, 1))
    recorder.close()
    assert list(steps_of(folder)) == [0, 1]
