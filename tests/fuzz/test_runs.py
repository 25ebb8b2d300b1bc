"""A run's folder is changed at random: no run passes that did not pass before, and no command ends
with a traceback.

FUZZ_EXAMPLES=20000 pytest tests/fuzz    for more than the tests do by themselves
"""

import functools
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from folder_mutations import EXAMPLES, MUTATIONS, ended_well, files
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import command
from synthetic import CONTRACT, compared_run, corrupt, draw

EDGES = ("decode_vs_prefill", "prefill_vs_train", "decode_vs_train")
LOGS = ("worker.log", "events.jsonl", "job.json", "rank0.log")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the exit code of their gate: a run whose sides are equal, and one with a fault."""
    folder = tmp_path_factory.mktemp("runs")
    made = {0: draw(), 1: corrupt(draw(), "layers.1.act", [(1, 4)])}
    for code, train in made.items():
        run = compared_run(folder / str(code), train, EDGES).folder
        for capture in (run / "captures").iterdir():
            for name in LOGS:
                (capture / name).write_text("{}")
        assert command("gate", run, "--contract", CONTRACT)[0] == code
    return {code: folder / str(code) for code in made}


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file but the logs, by path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in files(folder) if p.name not in LOGS}


whole = functools.cache(contents)
"""The contents of a run that stays as it is."""


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 3), healthy=st.sampled_from([0, 0, 1]))
def test_a_changed_run_is_never_a_pass_that_was_none(
    runs: dict[int, Path], seed: int, steps: int, healthy: int
) -> None:
    rng, source = random.Random(seed), runs[healthy]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        shutil.copytree(source, folder)
        done = [rng.choice(MUTATIONS)(folder, rng) for _ in range(steps) if files(folder)]
        before, after = whole(source), contents(folder)
        changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
        # A run's checksums.json may say the same in another layout; what nothing names is not read.
        read = {n for n in changed if n in before and n != "checksums.json"}
        code, said = command("gate", folder, "--contract", CONTRACT)
        ended_well(code, said, done)
        assert code in (2, 3) or (code == healthy and not read), (code, changed, done)
        if rng.random() < 0.04:
            code, said = command("gate", folder, "--recompute", "--contract", CONTRACT)
            ended_well(code, said, done)
            concluded = {"comparison.json", "comparison.parquet", "verdict.json"}
            assert code in (2, 3) or (code == healthy and read <= concluded), (code, done)
            pair = (folder, source, "--run-dir", f"{folder}.compared")
            code, said = command("compare", *pair, "--contract", CONTRACT)
            ended_well(code, said, done)
            ours = [n for n in read if n.startswith(("run.json", "captures/rollout/"))]
            assert code in (2, 3, 4) or (code == healthy and not ours), (code, done)
