"""A side whose weights are quantised: an image of the other side's weights, or why it is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from block_fp8 import BLOCK, write_fp8
from rlk_kernels.block_fp8 import dequantise, quantise
from safetensors.torch import load_file, save_file
from synthetic import draw, write_trace

from rlk_align.compare.parity import check_parity
from rlk_align.data import data_path
from rlk_align.engines.common.parameters import LiveParameter, record_parameter
from rlk_align.engines.common.quantised import projections, record_quantised
from rlk_align.model.shape import read_shape
from rlk_align.results import Mismatch
from rlk_align.trace.reader import Trace
from rlk_align.trace.tables import WEIGHTS_SCHEMA
from rlk_align.weights.quantiser import Stored, evenly_divided

MODEL = data_path("model")
VALUES = draw()
Weights = dict[str, torch.Tensor]
WHERE = "28 projections (layers.0.q_proj, layers.0.k_proj, layers.0.v_proj, layers.0.o_proj and 24"


def live(model: Path, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The projections of a checkpoint, as an engine that dequantises holds them."""
    shape, found = read_shape(model), {}
    for parameter, tensor in projections(model, shape):
        found[parameter] = tensor.load().to(dtype)
    return found


def trace(folder: Path, model: Path, weights: Weights | None = None) -> Trace:
    shape = read_shape(model)
    weights = live(model) if weights is None else weights
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    here: dict[str, Any] = {"model": str(model), "shape": shape, "dtype": dtype}
    here["quantised"] = record_quantised(model, shape, dtype)
    found = write_trace(folder, VALUES, weights={}, record=here)
    records = [record_parameter(LiveParameter(n, w)) for n, w in weights.items()]
    columns = {c: [getattr(r, c) for r in records] for c in WEIGHTS_SCHEMA.names}
    pq.write_table(pa.table(columns, schema=WEIGHTS_SCHEMA), folder / "weights.parquet")
    return found


def told(rollout: Trace, train: Trace) -> list[Mismatch]:
    return [m for m in check_parity(rollout, train) if m.kind == "weights"]


@pytest.fixture
def trained(tmp_path: Path) -> Trace:
    return trace(tmp_path / "train", MODEL)


def rollout(tmp_path: Path, quantiser: Callable[..., Any] | None = None, **settings: Any) -> Trace:
    how = {} if quantiser is None else {"quantiser": quantiser}
    return trace(tmp_path / "rollout", write_fp8(tmp_path / "fp8", MODEL, **how, **settings))


def test_an_image_of_the_other_sides_weights_does_not_stop(tmp_path: Path, trained: Trace) -> None:
    for name, sides in (("rollout", (rollout(tmp_path), trained)), ("train", (trained, None))):
        a, b = sides[0], sides[1] or trace(tmp_path / "again", tmp_path / "fp8")
        (only,) = told(a, b)
        assert not only.stops
        assert getattr(only, name) == "quantised"
        who = {"rollout": "rollout", "train": "trainer"}[name]
        assert only.detail.startswith(
            f"the {who}'s weights are fp8 e4m3 in blocks of 64 x 64, float32 scales: the "
            f"quantiser's image of the other side's weights, bit by bit, in {WHERE}"
        )


def test_one_fp8_checkpoint_on_both_sides_is_equal(tmp_path: Path) -> None:
    a = rollout(tmp_path)
    assert not told(a, trace(tmp_path / "b", tmp_path / "fp8"))


def by_reciprocal(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same image, computed in other steps."""
    _, scales = quantise(w, BLOCK)
    largest = (w.float().abs()).unfold(0, 64, 64).unfold(1, 64, 64).amax((2, 3))
    factor = 448.0 / largest
    wide = factor.repeat_interleave(64, 0).repeat_interleave(64, 1)
    return (w.float() * wide).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def test_an_image_may_be_computed_in_other_steps(tmp_path: Path, trained: Trace) -> None:
    (only,) = told(rollout(tmp_path, by_reciprocal), trained)
    assert not only.stops
    assert "computed as w · (448 / max)" in only.detail


def powers(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise(w, BLOCK, powers_of_two=True)


def fnuz(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = quantise(w, BLOCK)[1] * (448 / 240)
    wide = scales.repeat_interleave(64, 0).repeat_interleave(64, 1)
    return (w.float() / wide).to(torch.float8_e4m3fn), scales


def by_tensor(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = quantise(w, BLOCK)[1]
    scales = scales.amax().expand_as(scales).contiguous()
    return (w.float() / scales[0, 0]).to(torch.float8_e4m3fn), scales


def reversed_scales(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantise(w, BLOCK)
    return values, scales.flatten().flip(0).view_as(scales).contiguous()


def stale(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return quantise(w.float() + 1e-3 * torch.randn(w.shape, generator=generator), BLOCK)


@pytest.mark.parametrize(
    ("quantiser", "settings", "words"),
    [
        (powers, {}, "rounded up to powers of two, which config.json does not state by scale_fmt"),
        (None, {"scale_fmt": "ue8m0"}, "scales are in float32, and config.json states powers of"),
        (fnuz, {}, "scaled to ±240, the range of e4m3fnuz (AMD), and not to ±448"),
        (by_tensor, {}, "all blocks of a matrix have one scale, that of its largest entry"),
        (reversed_scales, {}, "the scales are those of other blocks: transposed, or stacked in an"),
        (stale, {}, "the image of other weights than the other side's"),
    ],
)
def test_what_another_quantiser_did_is_said(
    tmp_path: Path,
    trained: Trace,
    quantiser: Callable[..., Any] | None,
    settings: dict[str, Any],
    words: str,
) -> None:
    (only,) = told(rollout(tmp_path, quantiser, **settings), trained)
    assert only.stops
    assert words in only.detail
    assert WHERE in only.detail
    assert (only.rollout, only.train) == ("quantised", "as stored")


def test_powers_of_two_that_config_json_states_are_healthy(tmp_path: Path, trained: Trace) -> None:
    (only,) = told(rollout(tmp_path, powers, scale_fmt="ue8m0"), trained)
    assert not only.stops
    assert "in blocks of 64 x 64, powers of two: the quantiser's image" in only.detail


def masters_of(w: torch.Tensor) -> torch.Tensor:
    """float32 weights that round to these in bfloat16."""
    generator = torch.Generator().manual_seed(2)
    _, exponent = torch.frexp(w.float())
    moved = torch.rand(w.shape, generator=generator) - 0.5
    wide = w.float() + torch.ldexp(moved * 2**-8.1, exponent)
    return torch.where(wide.bfloat16() == w, wide, w.float())


def test_masters_are_told_from_their_export(tmp_path: Path, trained: Trace) -> None:
    (only,) = told(rollout(tmp_path, lambda w: quantise(masters_of(w), BLOCK)), trained)
    assert only.stops
    assert "the quantiser read the float32 masters, and the other side their export" in only.detail


def checkpoint(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the model whose projections are changed."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    tensors = load_file(MODEL / "model.safetensors")
    changed = {n: change(w) if n.endswith("_proj.weight") else w for n, w in tensors.items()}
    save_file(changed, folder / "model.safetensors")
    return folder


def test_known_masters_and_their_export(tmp_path: Path) -> None:
    wide = checkpoint(tmp_path / "wide", masters_of)
    exported = trace(tmp_path / "exported", wide)
    trained = trace(tmp_path / "trained", wide, live(wide, torch.float32))
    of_masters = trace(tmp_path / "a", write_fp8(tmp_path / "of masters", wide))
    (only,) = told(of_masters, exported)
    assert only.stops
    assert "the quantiser read the float32 masters" in only.detail
    (healthy,) = told(of_masters, trained)
    assert not healthy.stops
    of_export = write_fp8(tmp_path / "b", wide, lambda w: quantise(w.bfloat16(), BLOCK))
    (only,) = told(trace(tmp_path / "of export", of_export), trained)
    assert only.stops
    assert "the quantiser read the bfloat16 export, and the other side computes" in only.detail


def test_modules_left_out_by_a_substring_are_named(tmp_path: Path, trained: Trace) -> None:
    left_out = rollout(
        tmp_path, left_out=("mlp.gate",), modules_to_not_convert=["lm_head", "mlp.gate"]
    )
    named, image = told(left_out, trained)
    assert named.stops
    assert named.rollout == "not quantised"
    assert named.detail.startswith(
        "the rollout's checkpoint has 4 projections (layers.0.gate_proj, layers.1.gate_proj, "
        "layers.2.gate_proj, layers.3.gate_proj) in another format than fp8; the entry 'mlp.gate' "
        "of config.json's list"
    )
    assert "the quantiser matched it as a substring" in named.detail
    assert not image.stops
    assert "in 24 projections" in image.detail


def test_modules_that_the_list_names_whole_are_healthy(tmp_path: Path, trained: Trace) -> None:
    listed = [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    (only,) = told(
        rollout(tmp_path, left_out=("down_proj",), modules_to_not_convert=listed), trained
    )
    assert not only.stops


def test_a_list_and_a_checkpoint_that_contradict_each_other(tmp_path: Path, trained: Trace) -> None:
    both = rollout(tmp_path, left_out=("k_proj",), modules_to_not_convert=["q_proj"])
    unlisted, listed, _ = told(both, trained)
    assert "config.json does not list them, so that engines expect fp8" in unlisted.detail
    assert "in fp8, and config.json lists them as not quantised" in listed.detail
    assert "layers.0.q_proj" in listed.detail
    assert unlisted.stops
    assert listed.stops


def test_live_weights_that_are_not_the_checkpoints_are_named(
    tmp_path: Path, trained: Trace
) -> None:
    model = write_fp8(tmp_path / "fp8", MODEL)
    weights = live(model)
    tensors = load_file(model / "model.safetensors")
    values, scales = (
        tensors[f"model.layers.2.mlp.up_proj.weight{end}"] for end in ("", "_scale_inv")
    )
    weights["layers.1.up_proj"] = weights["layers.1.up_proj"] * 2
    weights["layers.2.up_proj"] = dequantise(values, scales.bfloat16(), block=BLOCK)
    weights["layers.3.up_proj"] = tensors["model.layers.3.mlp.up_proj.weight"].bfloat16()
    assert not torch.equal(weights["layers.2.up_proj"], live(model)["layers.2.up_proj"])
    changed = trace(tmp_path / "rollout", model, weights)
    for other in (trained, trace(tmp_path / "train on fp8", model)):
        said = [m.detail for m in told(changed, other) if m.stops]
        start = "the rollout's live weights are not those of its own checkpoint in"
        assert said == [
            f"{start} 1 projection (layers.1.up_proj): they were changed after they were loaded, "
            "or the checkpoint was",
            f"{start} 1 projection (layers.2.up_proj): its engine rounds the scales to bfloat16",
            f"{start} 1 projection (layers.3.up_proj): its engine reads the values without their "
            "scales",
        ]


def test_blocks_that_an_engine_divided_evenly_are_named(tmp_path: Path, trained: Trace) -> None:
    """192 rows are blocks of 128 and 64, and not two of 96."""
    block = (128, 128)
    model = write_fp8(
        tmp_path / "fp8", MODEL, lambda w: quantise(w, block), weight_block_size=list(block)
    )
    weights = live(model)
    for name in ("layers.0.o_proj", "layers.0.down_proj"):
        tensor = f"model.{name.replace('.o', '.self_attn.o').replace('.down', '.mlp.down')}.weight"
        tensors = load_file(model / "model.safetensors")
        even = evenly_divided(Stored(tensors[tensor], tensors[f"{tensor}_scale_inv"], block))
        assert even is not None
        whole = dequantise(tensors[tensor], tensors[f"{tensor}_scale_inv"], block=block)
        assert torch.equal(weights[name], whole)
        weights[name] = even.bfloat16()
        assert not torch.equal(weights[name], whole)
    image, divided = told(trace(tmp_path / "rollout", model, weights), trained)
    assert not image.stops
    assert divided.stops
    assert (
        "2 projections (layers.0.o_proj, layers.0.down_proj): its engine divides" in divided.detail
    )


def test_without_the_other_checkpoint_the_weights_are_named(tmp_path: Path, trained: Trace) -> None:
    a = rollout(tmp_path)
    gone = trained.record.model_copy(update={"model": str(tmp_path / "gone")})
    trained.record = gone
    assert len(told(a, trained)) == 28
