"""Weights that an adapter was merged into, or merged and unmerged, are recognised by their rows."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lora import write_adapter
from safetensors.torch import load_file
from synthetic import draw, write_trace

from rlk_align.compare.parity import check_parity
from rlk_align.data import data_path
from rlk_align.engines.common.lora import LiveLora, record_adapter
from rlk_align.engines.common.parameters import LiveParameter, record_parameter
from rlk_align.model.adapter import TENSORS, fitting_adapter
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape
from rlk_align.results import Mismatch
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import LoraRecord
from rlk_align.trace.tables import WEIGHTS_SCHEMA

MODEL = data_path("model")
SHAPE = read_shape(MODEL)
VALUES = draw()
CHECKPOINT = load_file(MODEL / "model.safetensors")
STORED = {
    f"layers.{i}.q_proj": CHECKPOINT[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1)
}
SITES = tuple(STORED)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", MODEL, alpha=6.0, targets=("q_proj",), std=0.05)


def factors(adapter: Path, site: str) -> tuple[torch.Tensor, torch.Tensor]:
    read = load_file(adapter / TENSORS)
    a, b = fitting_adapter(str(adapter), read_config(MODEL), SHAPE).tensors(site)
    return read[a], read[b]


def delta(adapter: Path, site: str, scale: float = 1.5) -> torch.Tensor:
    a, b = factors(adapter, site)
    return (b @ a) * scale


def record(adapter: Path, merged: str = "") -> LoraRecord:
    live = [LiveLora(site, *factors(adapter, site), 1.5) for site in SITES]
    found = record_adapter(str(adapter), live, "bfloat16")
    return found.model_copy(update={"merged": merged})


def trace(folder: Path, weights: dict[str, torch.Tensor], of: LoraRecord | None) -> Trace:
    here = {"model": str(MODEL), "shape": SHAPE, "adapters": [of] if of is not None else []}
    found = write_trace(folder, VALUES, weights={}, record=here)
    records = [record_parameter(LiveParameter(n, w)) for n, w in (STORED | weights).items()]
    columns = {c: [getattr(r, c) for r in records] for c in WEIGHTS_SCHEMA.names}
    pq.write_table(pa.table(columns, schema=WEIGHTS_SCHEMA), folder / "weights.parquet")
    return found


def merged(adapter: Path, scale: float = 1.5) -> dict[str, torch.Tensor]:
    return {s: (w.float() + delta(adapter, s, scale)).bfloat16() for s, w in STORED.items()}


def found(a: Trace, b: Trace) -> list[Mismatch]:
    return [m for m in check_parity(a, b) if m.kind == "weights"]


def test_a_merge_on_purpose_does_not_stop(tmp_path: Path, adapter: Path) -> None:
    beside = trace(tmp_path / "a", {}, record(adapter))
    for other in (record(adapter, "PEFT"), None):
        into = trace(tmp_path / f"b{other is None}", merged(adapter), other)
        (told,) = found(beside, into)
        assert not told.stops
        assert (told.rollout, told.train) == ("as stored", "merged")
        whose = "the other side's" if other is None else "its"
        assert told.detail.startswith(
            f"the trainer computes with {whose} adapter merged into 2 projections: "
        )
        assert "added up in float32, rounded once to bfloat16" in told.detail


def test_a_merge_of_another_scale_is_not_explained(tmp_path: Path, adapter: Path) -> None:
    beside = trace(tmp_path / "a", {}, record(adapter))
    into = trace(tmp_path / "b", merged(adapter, 3.0), record(adapter, "PEFT"))
    assert [m.name for m in found(beside, into) if m.stops] == list(SITES)


def test_a_merge_into_half_of_the_projections_is_named(tmp_path: Path, adapter: Path) -> None:
    beside = trace(tmp_path / "a", {}, record(adapter))
    half = {SITES[0]: merged(adapter)[SITES[0]]}
    (told,) = found(beside, trace(tmp_path / "b", half, record(adapter, "PEFT")))
    assert told.stops
    assert told.detail.endswith("it is not merged into 1 others, layers.1.q_proj first")


def test_an_adapter_that_counts_twice_is_named(tmp_path: Path, adapter: Path) -> None:
    beside = trace(tmp_path / "a", {}, record(adapter))
    (told,) = found(beside, trace(tmp_path / "b", merged(adapter), record(adapter)))
    assert told.stops
    assert "is merged into 2 projections and applied beside them as well: it counts" in told.detail


def test_a_base_that_was_merged_and_unmerged_is_named(tmp_path: Path, adapter: Path) -> None:
    left = {s: w - delta(adapter, s).bfloat16() for s, w in merged(adapter).items()}
    beside = trace(tmp_path / "a", {}, record(adapter))
    (told,) = found(trace(tmp_path / "b", left, record(adapter)), beside)
    assert told.stops
    assert told.rollout == "merged and unmerged"
    assert told.detail.startswith(
        "the rollout's base weights were changed by merging and unmerging its adapter in 2"
    )


def test_a_merge_needs_an_adapter_on_the_other_side(tmp_path: Path, adapter: Path) -> None:
    into = trace(tmp_path / "a", merged(adapter), record(adapter, "PEFT"))
    (told,) = found(trace(tmp_path / "b", {}, None), into)
    assert told.stops
    assert told.detail.endswith("; the other side has no adapter, and other weights than these")
    # A merged checkpoint has it in its weights.
    assert found(trace(tmp_path / "c", merged(adapter), None), into) == []
    # One that was merged on both sides is equal, and another one is not.
    assert found(trace(tmp_path / "d", merged(adapter), record(adapter, "PEFT")), into) == []
    other = trace(tmp_path / "e", merged(adapter, 3.0), None)
    assert any(m.stops for m in found(other, into))
