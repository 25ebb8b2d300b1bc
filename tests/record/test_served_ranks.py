"""A server of two ranks with other traffic, and trainers of four: their recordings are compared,
and a layer that one rank of the server has not got is named with its rank."""

import json
from pathlib import Path

import pytest
from command import Cli, command_line, require_engine
from recorded_job import Job
from served import Server, plugin_folder, wait_for

pytestmark = [pytest.mark.whole_matrix, pytest.mark.timeout(1800)]
COUNT = 6
WORDS = ("--enforce-eager", "--tensor-parallel-size", "2", "--no-enable-prefix-caching")


def served(folder: Path, *faults: str) -> Job:
    """A job whose rollout is recorded while the server also answers others."""
    require_engine("vllm")
    job = Job(folder, COUNT)
    server = Server(
        *(job.model, plugin_folder(folder / "plugin", *faults), folder / "server.log", WORDS),
        RLK_RECORD=str(folder / "rollout"),
        RLK_RECORD_WINDOW=str(COUNT),
        RLK_RECORD_REQUESTS="train-",
    )
    try:
        server.wait()
        prompts = json.loads(job.ids.read_text())
        ours = [{"ids": p, "name": f"train-{i}", "max_tokens": 24} for i, p in enumerate(prompts)]
        others = [{"ids": p[::-1], "name": f"other-{i}"} for i, p in enumerate(prompts[:3])]
        answers = server.together(ours + others)
        wait_for(folder / "rollout/step-00000000/rank-0")
    finally:
        server.close()
    pairs = [[p, a["token_ids"]] for p, a in zip(prompts, answers, strict=False)]
    (folder / "ids.json").write_text(json.dumps(pairs))
    return job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return served(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize(
    ("loop", "words"), [("megatron_loop.py", ("2", "2", "1")), ("fsdp_loop.py", ())]
)
def test_ranks_on_both_sides(job: Job, loop: str, words: tuple[str, ...]) -> None:
    code, said = job.torchrun(4, loop, loop, *words)
    assert code == 0, said
    outcome = job.compare(command_line(job.folder), loop, steps="0 3")
    assert outcome.verdict is not None, outcome.err
    assert outcome.code == 0, outcome.out
    assert outcome.verdict["precheck"]["mismatches"] == []
    assert outcome.verdict["coverage"]["fraction"] == 1
    assert outcome.verdict["controls"]["observer"] == "bitwise"


def test_a_stale_layer_of_one_rank_of_the_server_is_named(cli: Cli, tmp_path: Path) -> None:
    job = served(tmp_path, "stale_rank:plugin")
    job.run("train")
    outcome = job.compare(cli)
    assert outcome.verdict is not None, outcome.err
    assert outcome.code == 4, outcome.out
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == ("weights", "layers.1.up_proj")
    assert "rollout rank 1: rows 256-511 differ" in mismatch["detail"]
