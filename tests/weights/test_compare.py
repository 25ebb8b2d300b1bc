"""Each change of a parameter, planted in a checkpoint and reported."""

from pathlib import Path

import pytest
import torch
from changed_weights import Tensors, changed, q_proj, save, tensors, trained, unequal

from rlk_align.errors import CorruptCheckpoint
from rlk_align.weights.earlier import step_of
from rlk_align.weights.pipeline import compare_weights

BASE = tensors()


@pytest.fixture
def runs(tmp_path: Path) -> dict[int, Tensors]:
    """Three steps of a training run, saved like a trainer saves them."""
    steps = {step: trained(BASE, step) for step in (100, 200, 300)}
    for step, values in steps.items():
        save(tmp_path / f"checkpoint-{step}", values)
    return steps


def test_a_checkpoint_is_equal_to_itself(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    report = compare_weights(a, save(tmp_path / "b", BASE))
    assert (report.status, report.exit_code) == ("pass", 0)
    assert report.counts["equal"] == len(report.findings) == len(BASE)


@pytest.mark.parametrize("size", [0, 5, 1000, -4])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    a, b = save(tmp_path / "a", BASE), save(tmp_path / "b", BASE)
    path = tmp_path / "b/model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptCheckpoint, match=rf"^{path} is truncated, or is not a safetensors"):
        compare_weights(a, b)


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    b = save(tmp_path / "b", BASE | {q_proj(0): BASE[q_proj(0)].to(torch.complex64)})
    with pytest.raises(CorruptCheckpoint, match=rf"{q_proj(0)} is stored as C64, which is not"):
        compare_weights(a, b)


@pytest.mark.parametrize("step", [100, 200])
def test_a_stale_layer_is_named_with_its_step(
    tmp_path: Path, runs: dict[int, Tensors], step: int
) -> None:
    layer = {n: v for n, v in runs[step].items() if n.startswith("model.layers.2.")}
    b = save(tmp_path / "synced", runs[300] | layer)
    report = compare_weights(str(tmp_path / "checkpoint-300"), b)
    assert report.earlier == ["step 200", "step 100"]
    assert report.exit_code == 1
    found = unequal(report)
    assert len(found) == len(layer)
    assert {n.rpartition(".")[0] for n in found} == {"layers.2"}
    assert {(f.status, f.step) for f in found.values()} == {("stale", f"step {step}")}


def test_a_stale_layer_without_earlier_checkpoints_is_other(tmp_path: Path) -> None:
    a = save(tmp_path / "new", BASE)
    b = save(tmp_path / "old", BASE | {q_proj(2): trained(BASE, 1)[q_proj(2)]})
    [found] = unequal(compare_weights(a, b)).values()
    assert (found.name, found.status, found.step) == ("layers.2.q_proj", "other", None)
    assert found.detail.startswith("rows 0-")
    assert found.differing
    assert found.max_abs_difference
    assert found.a
    assert found.b
    assert found.a.digest != found.b.digest


def test_earlier_checkpoints_may_be_given_and_stored_otherwise(tmp_path: Path) -> None:
    old = trained({n: v.float() for n, v in BASE.items()}, 7)
    a, earlier = save(tmp_path / "new", BASE), save(tmp_path / "master-7", old)
    b = save(tmp_path / "synced", BASE | {q_proj(0): old[q_proj(0)].bfloat16()})
    [found] = unequal(compare_weights(a, b, earlier=[earlier])).values()
    assert (found.name, found.status, found.step) == ("layers.0.q_proj", "stale", "step 7")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_names_its_dtype(tmp_path: Path, dtype: str) -> None:
    master = trained({n: v.float() for n, v in BASE.items()}, 1)
    low = {n: v.to(getattr(torch, dtype)) for n, v in master.items()}
    a, b = save(tmp_path / "a", master), save(tmp_path / "b", low)
    report = compare_weights(a, b)
    assert report.exit_code == 0
    assert report.counts["cast"] == len(BASE)
    assert {f.detail for f in report.findings} == {f"B is A rounded to {dtype}"}
    back = compare_weights(b, a)
    assert back.exit_code == 0
    assert {f.detail for f in back.findings} == {f"A is B rounded to {dtype}"}
    wide = save(tmp_path / "c", {n: v.float() for n, v in low.items()})
    assert compare_weights(b, wide).counts["equal"] == len(BASE)
    stored = compare_weights(a, wide).findings[0].detail
    assert stored == f"B is A rounded to {dtype}, stored as float32"


def test_floats_of_eight_bits_are_compared(tmp_path: Path) -> None:
    low = {n: v.to(torch.float8_e4m3fn) for n, v in BASE.items()}
    a = save(tmp_path / "a", low)
    assert compare_weights(a, save(tmp_path / "b", low)).counts["equal"] == len(BASE)
    rounded = compare_weights(save(tmp_path / "c", BASE), a)
    assert {f.detail for f in rounded.findings} == {"B is A rounded to float8_e4m3fn"}
    other = low[q_proj(1)].clone()
    other.view(torch.uint8)[3, 5] ^= 1
    [found] = unequal(compare_weights(a, save(tmp_path / "d", low | {q_proj(1): other}))).values()
    assert (found.name, found.status, found.differing) == ("layers.1.q_proj", "other", 1)


def test_one_entry_rounded_otherwise_is_no_cast(tmp_path: Path) -> None:
    master = trained({n: v.float() for n, v in BASE.items()}, 1)
    low = {n: v.bfloat16() for n, v in master.items()}
    low[q_proj(1)].view(torch.int16)[3, 5] += 1
    a, b = save(tmp_path / "a", master), save(tmp_path / "b", low)
    [found] = [f for f in compare_weights(a, b).findings if f.status != "cast"]
    assert (found.name, found.status, found.differing) == ("layers.1.q_proj", "other", 1)
    assert found.detail == "rows 3 differ"


def test_a_swapped_pair_of_layers(tmp_path: Path) -> None:
    def name(n: str) -> str:
        for x, y in ((1, 2), (2, 1)):
            if n.startswith(f"model.layers.{x}."):
                return n.replace(f".{x}.", f".{y}.", 1)
        return n

    a = save(tmp_path / "a", BASE)
    b = save(tmp_path / "b", {name(n): v for n, v in BASE.items()})
    found = unequal(compare_weights(a, b))
    assert found
    assert {n.split(".")[1] for n in found} == {"1", "2"}
    assert found["layers.1.k_proj"].detail == "B holds what A has as layers.2.k_proj"
    assert found["layers.2.down_proj"].detail == "B holds what A has as layers.1.down_proj"


def test_heads_in_another_order(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    swapped = changed(BASE, q_proj(0), lambda w: torch.cat([w[32:64], w[:32], w[64:]]))
    [found] = unequal(compare_weights(a, save(tmp_path / "b", swapped))).values()
    assert found.detail.startswith("heads in another order: B's 0 hold A's 1")


def test_a_missing_tensor(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    b = save(tmp_path / "b", {n: v for n, v in BASE.items() if n != q_proj(3)})
    for first, second, lacking in ((a, b, "B"), (b, a, "A")):
        report = compare_weights(first, second)
        [found] = unequal(report).values()
        assert (found.name, found.status) == ("layers.3.q_proj", "missing")
        assert found.detail == f"{lacking} lacks it"
        assert report.exit_code == 1


def test_another_shape(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    b = save(tmp_path / "b", changed(BASE, q_proj(3), lambda w: w[:-1]))
    [found] = unequal(compare_weights(a, b)).values()
    assert (found.status, found.detail) == ("other", "A's shape is [256, 192], B's is [255, 192]")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_fails_on_both_sides_alike(tmp_path: Path, value: float) -> None:
    def planted(w: torch.Tensor) -> torch.Tensor:
        w[1, 2] = value
        return w

    wrong = changed(BASE, q_proj(3), planted)
    a, b = save(tmp_path / "a", wrong), save(tmp_path / "b", wrong)
    report = compare_weights(a, b)
    [found] = unequal(report).values()
    assert found.status == "other"
    assert found.detail == "1 of 49,152 entries are NaN or infinite"
    assert report.exit_code == 1


def test_the_sign_of_zero_is_no_difference(tmp_path: Path) -> None:
    zeros = changed(BASE, q_proj(3), torch.zeros_like)
    a = save(tmp_path / "a", zeros)
    b = save(tmp_path / "b", changed(zeros, q_proj(3), lambda w: -w))
    assert not unequal(compare_weights(a, b))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    stored = BASE | {HEAD: BASE[EMBEDDING].clone()}
    report = compare_weights(a, save(tmp_path / "b", stored))
    assert report.exit_code == 0
    assert report.counts["equal"] == len(BASE) + 1
    other = BASE | {HEAD: BASE[EMBEDDING] * 2}
    [found] = unequal(compare_weights(a, save(tmp_path / "c", other))).values()
    assert (found.name, found.status) == ("lm_head", "other")


def test_fused_tensors_are_taken_apart(tmp_path: Path) -> None:
    fused = dict(BASE)
    for i in range(4):
        here = f"model.layers.{i}"
        for module, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            fused[f"{here}.{module}.weight"] = torch.cat(
                [fused.pop(f"{here}.{p}.weight") for p in parts]
            )
    a = save(tmp_path / "a", BASE)
    report = compare_weights(a, save(tmp_path / "b", fused, config=False))
    assert report.counts["equal"] == len(report.findings) == len(BASE)
    wrong = changed(fused, "model.layers.2.mlp.gate_up_proj.weight", lambda w: w.roll(512, 0))
    found = unequal(compare_weights(a, save(tmp_path / "c", wrong, config=False)))
    assert found["layers.2.gate_proj"].detail == "B holds what A has as layers.2.up_proj"
    assert found.keys() == {"layers.2.gate_proj", "layers.2.up_proj"}


def test_nothing_in_common_is_inconclusive(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    b = save(tmp_path / "b", {"unknown.weight": torch.ones(2)}, config=False)
    report = compare_weights(a, b)
    assert (report.status, report.exit_code, report.compared) == ("inconclusive", 4, 0)


def test_an_unknown_family_is_compared_by_its_own_names(tmp_path: Path) -> None:
    values = {"net.router.weight": torch.ones(2, 3), "net.scale": torch.ones(())}
    a = save(tmp_path / "a", values, config=False)
    assert compare_weights(a, save(tmp_path / "b", values, config=False)).counts["equal"] == 2
    values["net.scale"] = torch.zeros(())
    [found] = unequal(compare_weights(a, save(tmp_path / "c", values, config=False))).values()
    assert (found.name, found.status) == ("net.scale", "other")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/runs/checkpoint-300", "step 300"),
        ("/runs/global_step_300/actor", "step 300"),
        ("/runs/global_step300/actor/huggingface", "step 300"),
        ("/runs/iter_0000300", "step 300"),
        ("/runs/step7", "step 7"),
        ("/runs/300", "step 300"),
        ("/runs/trained_2", "step 2"),
        # Numbers that are no steps.
        ("/home/user42/models/model", "model"),
        ("/data/2024/model", "model"),
        ("/scratch/run-3/model", "model"),
        ("/models/qwen3", "qwen3"),
    ],
)
def test_a_number_is_a_step_where_its_name_says_so(path: str, name: str) -> None:
    assert step_of(path) == name
