"""A run that fails by an operator's budget alone does not pass by a changed record."""

import json
from pathlib import Path
from typing import Any

from inprocess import command
from synthetic import compared_run
from tiny import BATCH, Engine, checkpoint, live_weights

from rlk_align.model.shape import read_shape
from rlk_align.trace.run import Run

CONTRACTS = Path(__file__).parents[2] / "contracts"
LIMIT = """
id = "budgets"
version = "1.0.0"
description = "Budgets alone."
dtypes = ["bfloat16"]
min_coverage = 1.0
min_tokens = 1

[[limits]]
id = "any"
metric = "max_abs_dlogp"
fail = 1e9
why = "All pass."
source = "derived: none"

[[budgets]]"""


def made(folder: Path) -> tuple[Path, Path]:
    """A run and its contract."""
    contract = folder / "budgets.toml"
    budgets = (CONTRACTS / "bf16.toml").read_text().split("[[budgets]]", 1)[1]
    contract.write_text(LIMIT + budgets)
    model = checkpoint(folder / "model", "qwen3")
    engine = Engine(model)
    run = compared_run(
        folder / "run",
        engine.values({"layers.0.q_proj": lambda exact, _: exact * 1.02}),
        rollout=engine.values(),
        contract=contract,
        batch=BATCH,
        sites=engine.sites,
        weights=live_weights(model),
        record={"model": str(model), "shape": read_shape(model)},
    )
    assert command("gate", run.folder, "--contract", contract)[0] == 1
    return run.folder, contract


def forged(run: Path) -> None:
    """Records every operator as within its budget."""
    path = run / "comparison.json"
    record: dict[str, Any] = json.loads(path.read_text())
    for unit in record["referee"]:
        if unit["errors"]:
            unit["errors"] |= {"rms": 0.0, "gain": 0.0, "row_gain": 0.0, "feature_rms": 0.0}
            unit["errors"] |= {"feature_gain": 0.0, "row_rms": 0.0, "peak": 0.0}
            unit["errors"] |= {"feature_shift": 0.0, "head_gain": 0.0}
    path.write_text(json.dumps(record))


def test_a_changed_record_is_seen(tmp_path: Path) -> None:
    run, contract = made(tmp_path)
    forged(run)
    assert command("gate", run, "--contract", contract)[0] in (2, 3)
    (run / "checksums.json").unlink()
    Run(run).finish()
    assert command("gate", run, "--contract", contract)[0] == 0, "a forger can do this"
    assert command("gate", run, "--recompute", "--contract", contract)[0] == 1
