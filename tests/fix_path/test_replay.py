"""`rlk-align replay` on what the real vLLM drew: from a run of the tool, and from a dump."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import Cli, require_engine, write_few_prompts

from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run
from rlk_align.trace.schema import request_seed

pytestmark = pytest.mark.whole_matrix
SETTINGS = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def run(folder: Path, cli: Cli) -> Path:
    require_engine("vllm")
    spec = ",".join(f"{name}={value}" for name, value in SETTINGS.items())
    prompts = write_few_prompts(folder / "few.jsonl")
    engine = f"vllm:kernels=rlk,sampler=rlk,logprobs=processed,{spec}"
    words = ("--prompts", prompts, "--max-new-tokens", "12", "--seed", "5", "-o", folder / "drawn")
    done = cli("capture", "--engine", engine, *words, shared=False)
    assert done.code == 0, done.err
    return folder / "drawn"


def drawn_again(cli: Cli, name: str, tokens: Path, engine: str = "hf:kernels=rlk") -> Any:
    output = tokens.parent / "replay.json"
    words = ("--engine", engine, "--output", f"json={output}", "--fresh")
    done = cli("replay", name, "--tokens", tokens, *words, shared=False)
    assert done.code in (0, 1), done.out + done.err
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["exit_code"] == done.code
    return record


def dumped(run: Path, path: Path, **changed: Any) -> tuple[str, int, Path]:
    """(the id of a request with several tokens, their number, a neutral file with it)."""
    trace = Trace(Run.open(str(run)).capture_folder("capture"))
    samples = trace.tokens.samples
    number = max(range(len(samples)), key=lambda n: len(samples[n].response_ids))
    sample = samples[number]
    record = {
        "schema": "rlk-align/logprobs/1", "id": sample.prompt_id, "token_ids": sample.ids,
        "prompt_length": len(sample.prompt_ids), "sampler": "rlk", "sampling": SETTINGS,
        "rollout_logprobs": [-1.0] * len(sample.response_ids), "seeds": request_seed(5, number),
    }  # fmt: skip
    path.write_text(json.dumps(record | changed) + "\n", encoding="utf-8")
    return sample.prompt_id, len(sample.response_ids), path


def test_a_request_of_a_run_is_drawn_again_alone(cli: Cli, run: Path, tmp_path: Path) -> None:
    name, tokens, _ = dumped(run, tmp_path / "dump.jsonl")
    record = drawn_again(cli, name, run)
    assert record["status"] == "pass"
    assert record["tokens"] == record["compared_logprobs"] == tokens > 5
    assert record["otherwise"] == record["other_logprobs"] == record["missing"] == 0
    # Without the kernels the logits are others.
    other = drawn_again(cli, name, run, "hf")
    assert other["other_logprobs"] > 0


def test_a_request_of_a_dump_is_drawn_again_from_its_seed_alone(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    name, tokens, path = dumped(run, tmp_path / "dump.jsonl")
    record = drawn_again(cli, name, path)
    assert record["otherwise"] == 0
    # The dump says another log-prob of each token.
    assert record["other_logprobs"] == record["tokens"]
    _, _, wrong = dumped(run, tmp_path / "wrong.jsonl", seeds=6, rollout_logprobs=[None] * tokens)
    parted = drawn_again(cli, name, wrong)
    assert parted["parting"]["reason"] == "unknown"
    assert parted["otherwise"] > 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("nobody", "RUN", "hf"), "has no request 'nobody'"),
        (("p02", "RUN", "hf:temperature=0.5"), "the record states temperature"),
        (("p02", "none.jsonl", "hf"), "none.jsonl does not exist"),
        (("p02", "RUN", "hf", "--step", "3"), "--step is for a dump of several steps"),
        (("p02", "OTHER", "hf"), "its tokens were not drawn by the kernels' sampler"),
    ],
)
def test_what_cannot_be_drawn_again_is_named(
    cli: Cli, run: Path, folder: Path, words: tuple[str, ...], error: str
) -> None:
    name, tokens, engine, *more = words
    at: dict[str, Any] = {"RUN": run}
    if tokens == "OTHER":
        at["OTHER"] = folder / "other"
        prompts = write_few_prompts(folder / "few.jsonl")
        new = ("--max-new-tokens", "2", "-o", at["OTHER"])
        assert cli("capture", "--engine", "hf", "--prompts", prompts, *new, shared=False).code == 0
    done = cli(
        "replay", name, "--tokens", at.get(tokens, tokens), "--engine", engine, *more, shared=False
    )
    assert done.code == 2, done.out + done.err
    assert error in done.err
