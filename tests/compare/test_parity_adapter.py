"""The precheck of LoRA adapters: each planted fault is named by projection, side and kind."""

from pathlib import Path

import pytest
import torch
from lora import write_adapter

from rlk_align.compare.parity_adapter import check_adapters
from rlk_align.data import data_path
from rlk_align.engines.common.lora import LiveLora, record_adapter
from rlk_align.results import Mismatch
from rlk_align.trace.schema import LoraRecord

RANK, SCALE = 4, 1.5
SITES = [f"layers.{i}.{op}" for i in range(2) for op in ("q_proj", "k_proj", "v_proj")]


class Side:
    """What the precheck reads of a trace."""

    def __init__(self, *adapters: LoraRecord | None, dtype: str = "bfloat16") -> None:
        known = list(adapters) if adapters != (None,) else []
        self.record = type("Record", (), {"adapters": known, "dtype": dtype})


def live(sites: list[str] = SITES) -> list[LiveLora]:
    generator = torch.Generator().manual_seed(0)
    made = [
        LiveLora(
            site,
            torch.randn(RANK, 16, generator=generator),
            torch.randn(24, RANK, generator=generator) + 0.2,
            SCALE,
        )
        for site in SITES
    ]
    return [each for each in made if each.site in sites]


def as_vllm(adapter: list[LiveLora], scale: float = SCALE) -> list[LiveLora]:
    """Rounded, with the scale folded into B."""
    return [
        LiveLora(each.site, each.a.bfloat16(), each.b.bfloat16() * scale, 1.0) for each in adapter
    ]


def changed(site: str, **factors: torch.Tensor) -> list[LiveLora]:
    return [
        LiveLora(e.site, factors.get("a", e.a), factors.get("b", e.b), e.scale)
        if e.site == site
        else e
        for e in live()
    ]


@pytest.fixture(autouse=True)
def stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's folder, of which the record has the scale."""
    for folder, scale in (("DIR", SCALE), ("OTHER", 7.0)):
        write_adapter(tmp_path / folder, data_path("model"), RANK, RANK * scale, ("q_proj",))
    monkeypatch.chdir(tmp_path)


def record(adapter: list[LiveLora], dtype: str = "bfloat16", path: str = "DIR") -> LoraRecord:
    return record_adapter(path, adapter, dtype)


def found(
    rollout: list[LiveLora] | None, train: list[LiveLora] | None, dtype: str = "bfloat16"
) -> list[Mismatch]:
    sides = (
        Side(None if rollout is None else record(rollout)),
        Side(None if train is None else record(train, dtype), dtype=dtype),
    )
    return list(check_adapters(*sides))  # type: ignore[arg-type]


def test_equal_adapters_have_no_mismatch() -> None:
    assert found(None, None) == []
    assert found(live(), live()) == []
    # vLLM folds the scale into a rounded B.
    assert found(as_vllm(live()), live()) == []
    # A trainer in float32 has the rollout's values rounded.
    assert found(as_vllm(live()), live(), "float32") == []


def test_an_adapter_on_one_side_is_one_sentence() -> None:
    (without,) = found(None, live())
    assert without.detail == (
        "the rollout has no adapter; the trainer has one of rank 4 in 6 projections: every one of "
        "them will differ"
    )
    assert without.stops
    assert without.kind == "weights"
    (withheld,) = found(live(), [])
    assert withheld.detail.startswith("the trainer was given one that no projection computes with;")
    (disabled,) = found([], [])
    assert "it was not delivered, or it is disabled" in disabled.detail


def test_an_adapter_on_half_of_the_layers_is_named() -> None:
    half = [site for site in SITES if site.startswith("layers.0.")]
    (lacking,) = found(live(half), live())
    assert lacking.detail == (
        "the rollout has no adapter in 3 projections that have one on the other side: "
        "layers.1.q_proj, layers.1.k_proj, layers.1.v_proj"
    )
    # PEFT gives projections that a file lacks a B of zeros.
    zeros = [
        e if e.site in half else LiveLora(e.site, e.a, torch.zeros_like(e.b), e.scale)
        for e in live()
    ]
    (lacking,) = found(live(), zeros)
    assert lacking.detail.startswith("the trainer's A or B is all zeros in 3 projections, layers.1")


def test_a_scale_that_is_applied_twice_is_named() -> None:
    (twice,) = found(as_vllm(live(), SCALE * SCALE), live())
    assert "scale · B of the rollout is 1.5 times that of the other side in 6" in twice.detail
    assert twice.detail.endswith("the scale was applied twice on one of them, or not at all")
    (never,) = found(as_vllm(live(), 1.0), live())
    assert "scale · B of the trainer is 1.5 times" in never.detail
    assert never.detail.endswith("the scale was applied twice on one of them, or not at all")
    (unlike,) = found(as_vllm(live(), 7.0), live())
    assert unlike.detail.endswith("adapter_config.json says 1.5 on both sides")
    sides = Side(record(as_vllm(live(), 7.0), path="OTHER")), Side(record(live()))
    (other,) = check_adapters(*sides)  # type: ignore[arg-type]
    assert other.detail.endswith("adapter_config.json says 7 in the rollout and 1.5 in the trainer")


def test_exchanged_projections_are_named() -> None:
    k, v = (e for e in live() if e.site in ("layers.0.k_proj", "layers.0.v_proj"))
    exchanged = {k.site: v, v.site: k}
    swapped = [
        LiveLora(e.site, exchanged.get(e.site, e).a, exchanged.get(e.site, e).b, e.scale)
        for e in live()
    ]
    first, second = found(as_vllm(swapped), live())
    assert first.name == "layers.0.k_proj.lora"
    assert second.name == "layers.0.v_proj.lora"
    assert first.detail == (
        "the trainer's adapter of layers.0.k_proj is the rollout's of layers.0.v_proj, and the "
        "other way round: exchanged, or stacked in another order"
    )


def test_a_stale_projection_is_named() -> None:
    site = "layers.1.v_proj"
    b = next(e.b for e in live() if e.site == site)
    (stale,) = found(as_vllm(changed(site, b=b + 0.01 * torch.randn(b.shape))), live())
    assert stale.name == f"{site}.lora"
    assert stale.detail.startswith("B has other values; A is equal: an adapter of another step")
    (both,) = found(changed(site, a=b.T[:, :16].clone(), b=b * 0.5 + 1), live())
    assert both.detail.startswith("A and B have other values: an adapter of another step")


def test_a_stale_adapter_is_one_sentence() -> None:
    moved = [LiveLora(e.site, e.a, e.b + 0.01 * e.b.sign().roll(1), e.scale) for e in live()]
    (stale,) = found(as_vllm(moved), live())
    assert stale.name == "adapter"
    assert stale.rollout == "B of 6 projections"
    assert stale.detail == (
        "B has other values in 6 projections, layers.0.q_proj, layers.0.k_proj, layers.0.v_proj, "
        "layers.1.q_proj, layers.1.k_proj, layers.1.v_proj; A is equal: an adapter of another "
        "step, or one that was not delivered"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("held", [False, True])
def test_a_factor_that_was_cast_is_named(dtype: torch.dtype, held: bool) -> None:
    def cast(a: torch.Tensor) -> torch.Tensor:
        return a.to(dtype) if held else a.to(dtype).to(a.dtype)

    # Entries that round differently by way of another dtype.
    plain = [LiveLora(e.site, e.a + 2.0**-10, e.b, e.scale) for e in live()]
    casts = [LiveLora(e.site, cast(e.a), e.b, e.scale) for e in plain]
    (named,) = found(as_vllm(plain), casts)
    name = str(dtype).removeprefix("torch.")
    assert named.detail.endswith(f"; B is equal: the trainer's A was cast to {name}")
    (named,) = found(casts, as_vllm(plain))
    assert named.detail.endswith(f"; B is equal: the rollout's A was cast to {name}")


def test_an_adapter_of_zeros_proves_nothing() -> None:
    zeros = [LiveLora(e.site, e.a, torch.zeros_like(e.b), e.scale) for e in live()]
    (note,) = found(as_vllm(zeros), zeros)
    assert not note.stops
    assert note.detail.startswith("A or B is all zeros in every projection")


def test_adapters_in_turn_are_compared_each() -> None:
    one, other = record(live()), record(changed(SITES[0], b=live()[0].b + 1))
    assert not list(check_adapters(Side(one, other, None), Side(one, other, None)))
    first, second = check_adapters(Side(one, other), Side(other, one))
    assert first.detail.startswith("adapter 1 of 2: B has other values; A is equal")
    assert second.detail.startswith("adapter 2 of 2: ")
    (lacks,) = check_adapters(Side(one, None), Side(one, one))
    assert lacks.detail.startswith("adapter 2 of 2: the rollout has no adapter; the trainer has")
    (count,) = check_adapters(Side(one, other), Side(one))
    assert (count.rollout, count.train) == ("2 in turn", "one for all")
    assert count.stops
