"""A job that is not ours and records itself: its rollout side, and what compares its sides."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from command import INTERPRETERS, Cli, Outcome, capture_of, ended, said_by
from served import plugin_folder

from rlk_align.data import data_path
from rlk_align.model.prompts import load_prompts
from rlk_align.model.tokenise import tokenise
from rlk_align.trace.reader import Trace

LOOPS = Path(__file__).parents[1] / "record"
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


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
        rollout = str(self.folder / "rollout")
        self.run("rollout", RLK_RECORD=rollout, PYTHONPATH=self._path(), **environment)

    def record_sglang(self, *faults: str, **environment: str) -> str:
        """Records an Engine of SGLang. `faults`: further plug-ins, as `module:function`."""
        return said_by(
            None,
            [str(LOOPS / "sglang_loop.py"), str(self.folder), self.model, str(self.ids)],
            {
                "RLK_RECORD": str(self.folder / "rollout"),
                "PYTHONPATH": self._path(*faults),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            timeout=500,
            python=INTERPRETERS["sglang"],
        )

    def _path(self, *faults: str) -> str:
        """The PYTHONPATH of a rollout with the recorder's plug-in and others of SGLang."""
        plugin = plugin_folder(self.folder / "plugin", *faults, group="sglang.srt.plugins")
        here = (plugin, LOOPS, Path(__file__).parent)
        return os.pathsep.join([*map(str, here), os.environ.get("PYTHONPATH", "")])


def figures(verdict: dict[str, Any]) -> dict[str, Any]:
    """What a verdict says of the numbers: everything but names of files, times and prompts."""
    kept = ("status", "exit_code", "cause", "contract", "dtype", "tokens", "precheck", "coverage")
    said = {name: verdict[name] for name in (*kept, "edges", "divergence", "divergences")}
    said |= {name: verdict[name] for name in ("breaches", "warnings", "doubts")}
    return said | {"observer": verdict["controls"]["observer"]}


def assert_same_rows(ours: Path, theirs: Path) -> None:
    """Both runs have the same tokens, weights and bits of every row, on both sides."""
    for role, passes in (("rollout", ("prefill", "decode")), ("train", ("prefill",))):
        assert_same_capture(capture_of(ours, role), capture_of(theirs, role), passes)


def assert_same_capture(ours: Trace, theirs: Trace, passes: Iterable[str]) -> None:
    """Both have the same tokens, weights and bits of every row of these passes."""
    assert [s.ids for s in ours.tokens.samples] == [s.ids for s in theirs.tokens.samples]
    assert {n: w.digest for n, w in ours.weights.items()} == {
        n: w.digest for n, w in theirs.weights.items()
    }
    for name in passes:
        one, other = ours.read_pass(name), theirs.read_pass(name)
        assert one.record.sites.keys() == other.record.sites.keys()
        for site in one.record.sites:
            a, b = one.rows(site), other.rows(site)
            assert a is not None
            assert b is not None
            x, y = np.lexsort((a.position, a.sample)), np.lexsort((b.position, b.sample))
            assert np.array_equal(a.sample[x], b.sample[y]), (name, site)
            assert np.array_equal(a.position[x], b.position[y]), (name, site)
            assert np.array_equal(a.digest[x], b.digest[y]), (name, site)


def assert_served(cli: Cli, rollout: Path, train: Path, engine: str, folder: Path) -> None:
    """The recorded steps pass, and the rollout's has the weights, and the bits of every row of the
    prefill, of a capture of the same tokens by an engine with ranks. Writes into `folder`."""
    recorded = cli("compare", rollout, train, "--run-dir", folder / "compared")
    assert recorded.verdict is not None, recorded.err
    assert recorded.code == 0, recorded.out
    assert recorded.verdict["coverage"]["fraction"] == 1
    assert recorded.verdict["controls"]["observer"] == "bitwise"
    captured = cli(
        *("capture", "--engine", engine, "--tokens", folder / "compared"),
        *("-o", folder / "captured"),
    )
    assert captured.code == 0, captured.err
    ours = capture_of(folder / "compared", "rollout")
    theirs = capture_of(folder / "captured", "capture")
    assert_same_capture(ours, theirs, ["prefill"])
    assert ours.record.shards == theirs.record.shards
    assert ours.record.shards
