"""A job that is not ours records itself; the comparison afterwards says what `compare` says."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Cli, Outcome, capture_of, command_line, require_engine, said_by, spec_here

from rlk_align.data import data_path
from rlk_align.model.prompts import load_prompts
from rlk_align.model.tokenise import tokenise

LOOP = Path(__file__).with_name("loop.py")
ROOT = Path(__file__).parents[2]
TRAINER = "hf:batch=2,padding=right"
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def installed_plugin(folder: Path) -> Path:
    """A folder with the metadata of a package that has the entry points of `pyproject.toml`, which
    may be newer than the installed ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [[name, target]] = project["entry-points"]["vllm.general_plugins"].items()
    info = folder / "rlk_record_here-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlk-record-here\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name}_here = {target}\n")
    return folder


class Job:
    """A recorded job, whose sides are compared."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.model = folder, str(data_path("model"))
        lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = folder / "texts.jsonl"
        texts.write_text("\n".join(sorted(lines, key=len)[6 : 6 + count]) + "\n", encoding="utf-8")
        ids = list(tokenise(data_path("model"), load_prompts(texts)).values())
        self.prompts = folder / "prompts.jsonl"
        rows = [json.dumps({"id": f"p{i}", "ids": each}) for i, each in enumerate(ids)]
        self.prompts.write_text("\n".join(rows) + "\n", encoding="utf-8")
        self.ids = folder / "prompts.json"
        self.ids.write_text(json.dumps(ids), encoding="utf-8")

    def run(self, part: str, *fault: str, **environment: str) -> str:
        words = [str(LOOP), part, str(self.folder), self.model, str(self.ids), *fault]
        return said_by(None, words, ENVIRONMENT | environment, timeout=500)

    def compare(self, cli: Cli, fault: str = "") -> Outcome:
        sides = self.folder / "rollout", self.folder / f"train{fault}"
        return cli("compare", *sides, "--run-dir", self.folder / f"compared{fault}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    require_engine("vllm")
    folder = tmp_path_factory.mktemp("job")
    made = Job(folder, count=4)
    path = os.pathsep.join(
        [str(installed_plugin(folder / "plugin")), os.environ.get("PYTHONPATH", "")]
    )
    made.run("rollout", RLK_RECORD=str(folder / "rollout"), PYTHONPATH=path)
    return made


@pytest.fixture(scope="module")
def module_cli(job: Job) -> Cli:
    return command_line(job.folder)


def figures(verdict: dict[str, Any]) -> dict[str, Any]:
    """What a verdict says of the numbers: everything but names of files, times and prompts."""
    kept = ("status", "exit_code", "cause", "contract", "dtype", "tokens", "precheck", "coverage")
    said = {name: verdict[name] for name in (*kept, "edges", "divergence", "divergences")}
    said |= {name: verdict[name] for name in ("breaches", "warnings", "doubts")}
    return said | {"observer": verdict["controls"]["observer"]}


def test_a_recorded_job_gets_the_verdict_of_compare(job: Job, module_cli: Cli) -> None:
    job.run("train")
    recorded = job.compare(module_cli)
    captured = module_cli(
        *("compare", "--rollout", spec_here("vllm"), "--train", TRAINER, "--no-production"),
        *("--prompts", job.prompts, "--max-new-tokens", 24, "--run-dir", job.folder / "captured"),
    )
    assert recorded.verdict is not None, recorded.err
    assert captured.verdict is not None, captured.err
    assert captured.code == 0, captured.out
    assert figures(recorded.verdict) == figures(captured.verdict)
    for role in ("rollout", "train"):
        ours = capture_of(job.folder / "compared", role)
        theirs = capture_of(job.folder / "captured", role)
        assert [s.ids for s in ours.tokens.samples] == [s.ids for s in theirs.tokens.samples]
        assert {n: w.digest for n, w in ours.weights.items()} == {
            n: w.digest for n, w in theirs.weights.items()
        }
        for name in ("prefill", "decode") if role == "rollout" else ("prefill",):
            one, other = ours.read_pass(name), theirs.read_pass(name)
            assert one.record.sites.keys() == other.record.sites.keys()
            for site in one.record.sites:
                a, b = one.rows(site), other.rows(site)
                assert a is not None
                assert b is not None
                x, y = np.lexsort((a.position, a.sample)), np.lexsort((b.position, b.sample))
                assert np.array_equal(a.sample[x], b.sample[y]), (role, name, site)
                assert np.array_equal(a.position[x], b.position[y]), (role, name, site)
                assert np.array_equal(a.digest[x], b.digest[y]), (role, name, site)


@pytest.mark.parametrize(
    ("fault", "kind", "named", "by_side"),
    [
        # The operators are recomputed with the weights that the trainer saved.
        ("stale", "weights", "layers.1.up_proj", "from rollout decode layers.1.up_proj on"),
        ("theta", "attributes", "rope_theta", "layers.0.q_rope the training side is off"),
    ],
)
def test_a_planted_fault_is_named(
    job: Job, module_cli: Cli, fault: str, kind: str, named: str, by_side: str
) -> None:
    job.run("train", fault)
    outcome = job.compare(module_cli, fault)
    assert outcome.code == 4, outcome.out
    assert outcome.verdict is not None
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == (kind, named)
    assert mismatch["rollout"] != mismatch["train"]
    allowed = module_cli(
        *("compare", job.folder / "rollout", job.folder / f"train{fault}"),
        *("--allow-mismatch", kind, "--run-dir", job.folder / f"allowed{fault}"),
    )
    assert allowed.verdict is not None
    said = " ".join(allowed.out.split())
    assert by_side in said
    assert allowed.verdict["coverage"]["fraction"] == 1
