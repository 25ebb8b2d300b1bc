"""A checkpoint against what a live engine held, as a capture recorded it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from changed_weights import changed, q_proj, save, save_adapter, tensors, trained, unequal
from command import Cli, require_engine
from synthetic import draw, write_trace

from rlk_align.data import data_path
from rlk_align.engines.common.parameters import LiveParameter, even_shards, record_parameter
from rlk_align.trace.tables import WEIGHTS_SCHEMA
from rlk_align.weights.compare import Comparer, Earlier
from rlk_align.weights.findings import Finding
from rlk_align.weights.holder import WeightHolder
from rlk_align.weights.parameter import RecordedParameter
from rlk_align.weights.pipeline import compare_weights

BASE = tensors()


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_live_engine_holds_its_checkpoint(
    engine: str, cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    require_engine(engine)
    words = ("--engine", engine, "--prompts", few_prompts, "--max-new-tokens", 2)
    made = cli("capture", *words, "-o", "run")
    assert made.code == 0, made.err
    run, model = str(tmp_path / "run"), str(data_path("model"))
    report = compare_weights(model, run)
    assert report.exit_code == 0, unequal(report)
    assert report.compared == len(report.findings) >= 46
    assert report.kinds[1].startswith(engine)
    assert all(f.b and f.b.digest for f in report.findings)
    # What the engine holds against a float32 master, and against one whose layer has moved on.
    master = {n: v.float() for n, v in BASE.items()}
    cast = changed(master, q_proj(1), lambda w: w * (1 + 2**-12))
    [found] = unequal(compare_weights(save(tmp_path / "master", cast), run)).values()
    assert (found.name, found.status) == ("layers.1.q_proj", "cast")
    moved = save(tmp_path / "step-2", trained(BASE, 2))
    found = unequal(compare_weights(moved, run, earlier=[model]))
    assert len(found) >= 46
    assert {(f.status, f.step) for f in found.values()} == {("stale", "model")}


def source(folder: Path, parameter: LiveParameter) -> WeightHolder:
    """A recording of one parameter."""
    trace = write_trace(folder, draw())
    record = record_parameter(parameter)
    columns = {c: [getattr(record, c)] for c in WEIGHTS_SCHEMA.names}
    pq.write_table(pa.table(columns, schema=WEIGHTS_SCHEMA), folder / "weights.parquet")
    recorded = RecordedParameter(parameter.name, trace, trace.weights[parameter.name])
    return WeightHolder(str(folder), "synthetic", {parameter.name: recorded})


def random(seed: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


NOW, BEFORE = random(1), random(0)
NAME = "layers.0.gate_proj"


def compared(folder: Path, a: LiveParameter, b: LiveParameter) -> Finding:
    old = Earlier("step 1", source(folder / "old", LiveParameter(NAME, BEFORE)))
    return Comparer(source(folder / "a", a), source(folder / "b", b), [old]).finding(NAME)


def test_a_shard_of_a_live_engine_that_is_stale_on_one_rank(tmp_path: Path) -> None:
    mixed = torch.cat([NOW[:8], BEFORE[8:]])
    b = LiveParameter(NAME, mixed, even_shards(0, [8, 8]))
    found = compared(tmp_path, LiveParameter(NAME, NOW), b)
    assert (found.status, found.step, found.ranks) == ("stale", "step 1", [1])
    assert found.detail == "B rank 1: rows 8-15 differ: they are those of step 1"


def test_a_copy_that_is_stale_on_one_rank(tmp_path: Path) -> None:
    b = LiveParameter(NAME, NOW, replicas=(NOW, BEFORE))
    found = compared(tmp_path, LiveParameter(NAME, NOW), b)
    assert (found.status, found.step, found.ranks) == ("stale", "step 1", [2])
    b = LiveParameter(NAME, NOW, replicas=(NOW, random(7)))
    found = compared(tmp_path / "other", LiveParameter(NAME, NOW), b)
    assert (found.status, found.step, found.ranks) == ("other", None, [2])
    assert found.detail == "B's rank 2: another copy than rank 0"


def test_two_recordings(tmp_path: Path) -> None:
    live = LiveParameter(NAME, NOW)
    assert compared(tmp_path / "1", live, LiveParameter(NAME, NOW.clone())).status == "equal"
    assert compared(tmp_path / "2", live, LiveParameter(NAME, BEFORE)).status == "stale"
    assert compared(tmp_path / "3", live, LiveParameter(NAME, random(5))).status == "other"
    cast = compared(tmp_path / "4", live, LiveParameter(NAME, NOW.bfloat16()))
    assert (cast.status, cast.detail) == ("cast", "B is A rounded to bfloat16")
    cast = compared(tmp_path / "5", LiveParameter(NAME, NOW.bfloat16()), live)
    assert (cast.status, cast.detail) == ("cast", "A is B rounded to bfloat16")
    changed = NOW.clone()
    changed[3, 5] += 2.0**-5
    found = compared(tmp_path / "6", live, LiveParameter(NAME, changed.bfloat16()))
    assert (found.status, found.detail) == ("other", "rows 3 differ")


def test_an_adapter_that_a_live_engine_merged(cli: Cli, few_prompts: Path, tmp_path: Path) -> None:
    a = torch.randn(8, 192, generator=torch.Generator().manual_seed(3)) * 0.05
    b = torch.randn(256, 8, generator=torch.Generator().manual_seed(4)) * 0.05
    adapter = save_adapter(tmp_path / "adapter", {q_proj(1).removesuffix(".weight"): (a, b)})
    merged = changed(
        BASE, q_proj(1), lambda w: (w.double() + 3 * (b.double() @ a.double())).bfloat16()
    )
    model = data_path("model")
    served = Path(save(tmp_path / "served", merged))
    words = ("--engine", "hf", "--model", served, "--prompts", few_prompts, "--max-new-tokens", 2)
    for file in model.glob("tokenizer*"):
        (served / file.name).write_bytes(file.read_bytes())
    assert cli("capture", *words, "-o", "run").code == 0
    [found] = unequal(compare_weights(str(model), str(tmp_path / "run"), adapter=adapter)).values()
    assert (found.name, found.status) == ("layers.1.q_proj", "merged")
