"""A job that is not ours and records itself: its rollout side, and what compares its sides."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from command import Cli, Outcome, capture_of, ended, said_by

from rlk_align.data import data_path
from rlk_align.model.prompts import load_prompts
from rlk_align.model.tokenise import tokenise

LOOPS = Path(__file__).parents[1] / "record"
ROOT = Path(__file__).parents[2]
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

    def __init__(self, folder: Path, count: int, model: Path | None = None) -> None:
        """`model`: by default the embedded one, whose tokenizer all fixtures have."""
        self.folder, self.model = folder, str(model or data_path("model"))
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
        words = [str(LOOPS / "loop.py"), part, str(self.folder), self.model, str(self.ids), *fault]
        return said_by(None, words, ENVIRONMENT | environment, timeout=500)

    def torchrun(
        self, ranks: int, loop: str, name: str, *words: str, **more: str
    ) -> tuple[int, str]:
        """The exit code and the words of a loop that torchrun starts in so many ranks. `name`: the
        folder of its recording; `more`: of the environment."""
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        given = [str(self.folder), self.model, str(self.ids), name, *words]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more
        command = [*launch, str(LOOPS / loop), *given]
        code, out, err = ended(None, command, environment, timeout=500)
        return code, out + err

    def compare(
        self, cli: Cli, name: str = "train", *options: str, steps: str = "", into: str = ""
    ) -> Outcome:
        """`name`: the folder of the trainer's recording; `steps`: those of the rollout side and of
        the trainer, e.g. `0 3`; `into`: the name of the run."""
        sides = [self.folder / "rollout", self.folder / name]
        for i, step in enumerate(steps.split()):
            sides[i] /= f"step-{int(step):08d}"
        run = self.folder / (into or f"compared-{name}")
        return cli("compare", *sides, "--run-dir", run, *options)

    def record_rollout(self, **environment: str) -> None:
        folder = str(installed_plugin(self.folder / "plugin"))
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        rollout = str(self.folder / "rollout")
        self.run("rollout", RLK_RECORD=rollout, PYTHONPATH=path, **environment)


def figures(verdict: dict[str, Any]) -> dict[str, Any]:
    """What a verdict says of the numbers: everything but names of files, times and prompts."""
    kept = ("status", "exit_code", "cause", "contract", "dtype", "tokens", "precheck", "coverage")
    said = {name: verdict[name] for name in (*kept, "edges", "divergence", "divergences")}
    said |= {name: verdict[name] for name in ("breaches", "warnings", "doubts")}
    return said | {"observer": verdict["controls"]["observer"]}


def assert_same_rows(ours: Path, theirs: Path) -> None:
    """Both runs have the same tokens, weights and bits of every row, on both sides."""
    for role in ("rollout", "train"):
        mine, captured = capture_of(ours, role), capture_of(theirs, role)
        assert [s.ids for s in mine.tokens.samples] == [s.ids for s in captured.tokens.samples]
        assert {n: w.digest for n, w in mine.weights.items()} == {
            n: w.digest for n, w in captured.weights.items()
        }
        for name in ("prefill", "decode") if role == "rollout" else ("prefill",):
            one, other = mine.read_pass(name), captured.read_pass(name)
            assert one.record.sites.keys() == other.record.sites.keys()
            for site in one.record.sites:
                a, b = one.rows(site), other.rows(site)
                assert a is not None
                assert b is not None
                x, y = np.lexsort((a.position, a.sample)), np.lexsort((b.position, b.sample))
                assert np.array_equal(a.sample[x], b.sample[y]), (role, name, site)
                assert np.array_equal(a.position[x], b.position[y]), (role, name, site)
                assert np.array_equal(a.digest[x], b.digest[y]), (role, name, site)
