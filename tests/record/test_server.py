"""A vLLM server of two ranks records itself while it serves other traffic, and survives what goes
wrong with the recording."""

import json
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Cli, command_line, require_engine, said_by, spec_here
from recorded_job import assert_served
from served import Server, plugin_folder, wait_for

from rlk_align.data import data_path
from rlk_align.model.prompts import load_prompts
from rlk_align.model.tokenise import tokenise
from rlk_align.record.shared.layout import RECORDING, RecordingRecord, incomplete_steps, steps_of
from rlk_align.trace.records import load_record

pytestmark = pytest.mark.timeout(1800)
TRAINER = Path(__file__).with_name("trainer_loop.py")
WINDOW = 6
CLOCK = "jumping_clock:plugin"
"""A plugin that makes the wall clock of every process of the server jump."""


class Job:
    """A loop that samples from a server, and the server's recordings of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rollout = folder, folder / "rollout"
        self.model = str(data_path("model"))
        lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = folder / "texts.jsonl"
        chosen = sorted(lines, key=len)[6 : 6 + WINDOW]
        texts.write_text("\n".join(chosen) + "\n", encoding="utf-8")
        self.prompts = list(tokenise(data_path("model"), load_prompts(texts)).values())
        self.steps: dict[str, list[tuple[list[int], list[int]]]] = {}
        self.asked: list[dict[str, Any]] = []

    def sample(self, server: Server, step: int, **last: Any) -> list[dict[str, Any]]:
        """Samples a response to each prompt among other requests. `last`: settings of the last
        request of the step."""
        requests = [
            {
                "ids": ids,
                "name": f"train-{step}-{i}",
                "max_tokens": 24,
                # Some clients ask for log-probs, and others do not.
                **({"logprobs": 0} if i % 2 else {}),
                **(last if i == WINDOW - 1 else {}),
            }
            for i, ids in enumerate(self.prompts)
        ]
        others = [
            {"ids": ids[::-1], "name": f"other-{step}-{i}", "max_tokens": 40}
            for i, ids in enumerate(self.prompts[:3])
        ]
        answers = server.together(requests + others)
        pairs = [(list(r["ids"]), a["token_ids"]) for r, a in zip(requests, answers, strict=False)]
        self.steps[str(step)] = pairs[: -1 if last else None]
        self.asked = [
            {"asked": "logprobs" in r, "told": bool(a.get("logprobs"))}
            for r, a in zip(requests + others, answers, strict=True)
        ]
        return answers

    def record(self, step: int) -> RecordingRecord:
        return load_record(RecordingRecord, steps_of(self.rollout)[step] / "rank-0" / RECORDING)

    def train(self, name: str, broken: str = "") -> Path:
        steps = self.folder / "steps.json"
        steps.write_text(json.dumps(self.steps), encoding="utf-8")
        folder = self.folder / name
        words = [str(TRAINER), str(folder), self.model, str(steps), *filter(None, [broken])]
        said_by(None, words, {"OMP_NUM_THREADS": "1"}, timeout=580)
        return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Step 0 is healthy; in step 1 a request cannot be recorded; step 2 is lost by a full disk, and
    step 3 by one that fills up later; step 4 is killed."""
    require_engine("vllm")
    folder = tmp_path_factory.mktemp("served")
    made = Job(folder)
    plugin = plugin_folder(folder / "plugin", CLOCK)
    words = ["--enforce-eager", "--tensor-parallel-size", "2", "--no-enable-prefix-caching"]
    environment = {
        "RLK_RECORD": str(made.rollout),
        "RLK_RECORD_WINDOW": str(WINDOW),
        "RLK_RECORD_REQUESTS": "train-",
    }
    server = Server(made.model, plugin, folder / "server.log", words, **environment)
    try:
        server.wait()
        second = Server(made.model, plugin, folder / "second.log", words, **environment)
        made.sample(server, 0)
        wait_for(made.rollout / "step-00000000/rank-0")
        made.sample(server, 1, stop=["zzzz"])
        wait_for(made.rollout / "step-00000001/rank-0")
        for step, size in ((2, 20_000), (3, 600_000)):
            server.limit_files(size)
            made.sample(server, step)
            wait_for(made.rollout / f"step-{step:08d}/rank-0.partial/reason.txt")
        server.limit_files(-1)
        assert second.ended() != 0
        made.second = second.said()
        thread = threading.Thread(target=_sample_until_it_dies, args=(made, server))
        thread.start()
        wait_for(made.rollout / "step-00000004/rank-0.partial/decode.partial")
        server.kill_core()
        thread.join(100)
        yield made
    finally:
        server.close()


def _sample_until_it_dies(job: Job, server: Server) -> None:
    for i, ids in enumerate(job.prompts):
        try:
            server.post(ids, f"train-4-{i}", max_tokens=900, ignore_eos=True)
        except (OSError, urllib.error.URLError):
            return


@pytest.fixture(scope="module")
def module_cli(job: Job) -> Cli:
    return command_line(job.folder)


@pytest.fixture(scope="module")
def train(job: Job) -> Path:
    """The trainer's recording, in which an operator is broken from step 1 on."""
    return job.train("train", broken="1")


def test_a_served_job_gets_the_verdict_of_compare(job: Job, train: Path, module_cli: Cli) -> None:
    step = "step-00000000"
    assert_served(module_cli, job.rollout / step, train / step, spec_here("vllm:tp=2"), job.folder)


def test_clients_get_what_they_asked_for(job: Job) -> None:
    assert any(each["asked"] for each in job.asked)
    assert not all(each["asked"] for each in job.asked)
    assert all(each["asked"] == each["told"] for each in job.asked)


def test_every_recorded_request_says_how_it_was_computed(job: Job) -> None:
    record = job.record(0)
    assert record.seen == WINDOW
    assert len(record.requests) == WINDOW
    assert sorted(record.chosen) == list(range(WINDOW))
    assert all("train-0-" in each.request for each in record.requests)
    for each in record.requests:
        assert (each.chunks, each.cached, each.preemptions, each.recomputed) == (1, 0, 0, 0)


def test_what_cannot_be_recorded_is_counted(job: Job) -> None:
    record = job.record(1)
    assert record.seen == WINDOW
    assert len(record.requests) == WINDOW - 1
    [(reason, count)] = record.unrecorded.items()
    assert "stop strings" in reason
    assert count == 1


def test_what_was_lost_is_named(job: Job) -> None:
    assert list(steps_of(job.rollout)) == [0, 1]
    lost = incomplete_steps(job.rollout)
    assert list(lost) == [2, 3, 4]
    assert "weights.parquet" in lost[2]
    assert "decode.partial" in lost[3]
    assert "ended" in lost[4]


def test_a_second_server_in_the_folder_is_refused(job: Job) -> None:
    assert "another process records into this folder" in job.second


def test_the_table_of_steps_says_when_an_operator_drifted(
    job: Job, train: Path, module_cli: Cli
) -> None:
    outcome = module_cli(
        *("compare", job.rollout, train, "--steps", "0,1,2"),
        *("--run-dir", job.folder / "steps"),
    )
    said = outcome.verdict
    assert said is not None, outcome.err
    assert outcome.code == 4, outcome.out
    assert said["schema"] == "rlk-align/steps/1"
    first, second, third = said["steps"]
    assert (first["step"], first["status"], first["over_budget"]) == (0, "pass", {})
    assert second["status"] == "fail"
    assert second["over_budget"]["layers.1.up_proj"] == "train"
    assert "weights.parquet" in third["reason"]
    assert said["operators"]["layers.1.up_proj"] == {"1": "train"}
    assert list(said["incomplete"]["rollout"]) == ["2", "3", "4"]
    assert "layers.1.up_proj" in outcome.out
    alone = module_cli(
        *("compare", job.rollout, train, "--steps", "0", "--run-dir", job.folder / "alone")
    )
    assert alone.code == 0, alone.out
