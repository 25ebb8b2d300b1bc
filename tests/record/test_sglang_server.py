"""An SGLang server of two ranks records itself while it serves other traffic; a step ends before
the weights are updated, and what goes wrong with a recording does not end the server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from changed_weights import save, tensors, trained
from command import Cli, command_line, require_engine, said_by, spec_here
from recorded_job import Job, assert_served
from served import SGLangServer, plugin_folder, wait_for

from rlk_align.record.merge.history import read_digests
from rlk_align.record.shared.layout import RECORDING, RecordingRecord, incomplete_steps, steps_of
from rlk_align.trace.records import load_record

pytestmark = [pytest.mark.whole_matrix, pytest.mark.timeout(1800)]
TRAINER = Path(__file__).with_name("trainer_loop.py")
WINDOW = 6
"""Requests of a step."""


class Served(Job):
    """A loop that samples from a server, and the server's recordings of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, WINDOW)
        self.given: list[list[int]] = json.loads(self.ids.read_text())
        self.steps: dict[str, list[tuple[list[int], list[int]]]] = {}
        self.asked: list[tuple[bool, bool]] = []
        self.trained = save(folder / "trained", trained(tensors(), 1))

    def sample(self, server: SGLangServer, step: int, count: int = WINDOW) -> None:
        """Samples a response to some of the prompts, among other requests."""
        requests: list[dict[str, Any]] = [
            {
                "ids": ids,
                "name": f"train-{step}-{i}",
                "max_new_tokens": 24,
                # Some responses end sooner than others.
                **({} if i % 3 else {"stop_token_ids": [200, 222]}),
                # Some clients ask for log-probs, and others do not.
                **({"logprobs": 0} if i % 2 else {}),
            }
            for i, ids in enumerate(self.given[:count])
        ]
        others = [
            {"ids": ids[::-1], "name": f"other-{step}-{i}", "max_new_tokens": 40}
            for i, ids in enumerate(self.given[:3])
        ]
        every = requests + others
        answers = server.together(every)
        pairs = zip(requests, answers, strict=False)
        self.steps[str(step)] = [(list(r["ids"]), a["output_ids"]) for r, a in pairs]
        told = [bool(a["meta_info"].get("output_token_logprobs")) for a in answers]
        self.asked += zip(["logprobs" in r for r in every], told, strict=True)

    def train(self, name: str, model: str, *steps: int) -> Path:
        """Records the trainer of some of the steps."""
        asked = self.folder / f"{name}.json"
        asked.write_text(json.dumps({str(n): self.steps[str(n)] for n in steps}))
        said_by(None, [str(TRAINER), str(self.folder / name), model, str(asked)], timeout=580)
        return self.folder / name

    def step(self, number: int) -> Path:
        return self.folder / f"rollout/step-{number:08d}/rank-0"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Step 0 is whole; step 1 is ended by new weights; step 2 has them, and is lost by a full disk,
    as is step 3 by one that fills up later; step 4 is whole again."""
    require_engine("sglang")
    folder = tmp_path_factory.mktemp("served")
    made = Served(folder)
    plugin = plugin_folder(folder / "plugin")
    words = ["--tp-size", "2", "--disable-radix-cache"]
    environment = {
        "RLK_RECORD": str(folder / "rollout"),
        "RLK_RECORD_WINDOW": str(WINDOW),
        "RLK_RECORD_REQUESTS": "train-",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }
    server = SGLangServer(made.model, plugin, folder / "server.log", words, **environment)
    try:
        server.wait()
        second = SGLangServer(made.model, plugin, folder / "second.log", words, **environment)
        made.sample(server, 0)
        wait_for(made.step(0))
        made.sample(server, 1, count=4)
        assert not made.step(1).exists()
        server.call("/update_weights_from_disk", model_path=made.trained)
        assert made.step(1).exists()
        for step, size in ((2, 20_000), (3, 600_000)):
            server.limit_files(size)
            made.sample(server, step)
            wait_for(made.step(step).with_name("rank-0.partial") / "reason.txt")
        server.limit_files(-1)
        made.sample(server, 4)
        wait_for(made.step(4))
        assert second.ended() != 0
        made.second = second.said()
        yield made
    finally:
        server.close()


@pytest.fixture(scope="module")
def module_cli(job: Served) -> Cli:
    return command_line(job.folder)


@pytest.fixture(scope="module")
def train(job: Served) -> Path:
    return job.train("train", job.model, 0, 1)


def record_of(step: Path) -> RecordingRecord:
    return load_record(RecordingRecord, step / RECORDING)


def test_a_served_job_gets_the_verdict_of_compare(
    job: Served, train: Path, module_cli: Cli
) -> None:
    step = "step-00000000"
    assert_served(
        module_cli,
        job.folder / "rollout" / step,
        train / step,
        spec_here("sglang:tp=2"),
        job.folder,
    )


def test_some_responses_end_sooner_than_others(job: Served) -> None:
    lengths = {len(response) for _, response in job.steps["0"]}
    assert len(lengths) > 1
    assert max(lengths) <= 24


def test_clients_get_what_they_asked_for(job: Served) -> None:
    assert {asked for asked, _ in job.asked} == {True, False}
    assert all(asked == told for asked, told in job.asked)


def test_only_chosen_requests_are_recorded(job: Served) -> None:
    record = record_of(job.step(0))
    assert record.seen == WINDOW
    assert sorted(record.chosen) == list(range(WINDOW))
    assert {each.request for each in record.requests} == {f"train-0-{i}" for i in range(WINDOW)}
    for each in record.requests:
        assert (each.chunks, each.cached, each.preemptions, each.recomputed) == (1, 0, 0, 0)


def test_a_step_ends_before_the_weights_change(job: Served, train: Path, module_cli: Cli) -> None:
    record = record_of(job.step(1))
    assert (record.seen, len(record.chosen)) == (4, 4)
    old, new = (read_digests(job.step(n)) for n in (1, 4))
    assert old.keys() == new.keys()
    assert all(old[name].whole != new[name].whole for name in old)
    later = job.train("later", job.trained, 4)
    for number, side in ((1, train), (4, later)):
        step = f"step-{number:08d}"
        outcome = module_cli(
            *("compare", job.folder / "rollout" / step, side / step),
            *("--run-dir", job.folder / f"compared-{number}"),
        )
        assert outcome.code == 0, outcome.out
        assert outcome.verdict is not None
        assert outcome.verdict["coverage"]["fraction"] == 1


def test_what_was_lost_is_named(job: Served) -> None:
    assert list(steps_of(job.folder / "rollout")) == [0, 1, 4]
    lost = incomplete_steps(job.folder / "rollout")
    assert "weights.parquet" in lost[2]
    assert "decode.partial" in lost[3]


def test_a_second_server_in_the_folder_is_refused(job: Served) -> None:
    assert "another process records into this folder" in job.second
