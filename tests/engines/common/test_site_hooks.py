"""Reading and overwriting a live model's sites by a table of places, without an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import SHAPE
from torch import nn

from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.intervention import Intervention, RecordedPass
from rlk_align.engines.common.layout import Layout, even, fused, kv_heads
from rlk_align.engines.common.places import FIRST, SECOND, WITH_BIAS, Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.megatron.layout import grouped_qkv
from rlk_align.engines.process.ranks import Ranks
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import ModelShape

BATCH = TokenBatch((Sample("a", (1, 2), (3,)), Sample("b", (4,), (5, 6))))
CPU = torch.device("cpu")


class Fixed:
    """Replaces an Editor: the new value of a feature is 100 * row + the feature's number."""

    observed = True

    def __init__(self, late: tuple[str, ...] = (), skip: int = -1) -> None:
        self.late, self._skip = frozenset(late), skip

    def wants(self, site: str) -> bool:
        return True

    def __call__(
        self, site: str, live: torch.Tensor, sample: np.ndarray, position: np.ndarray, start: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        row = torch.from_numpy(sample * 3 + position)[:, None]
        new = 100 * row + torch.arange(start, start + live.shape[1])
        chosen = np.arange(len(sample)) != self._skip
        return new[torch.from_numpy(chosen)].to(live.dtype), chosen


class Recorded(dict[str, torch.Tensor]):
    """A tap that keeps the rows of each site."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, site: str, rows: torch.Tensor, *_: Any) -> None:
        self[site] = rows.clone()

    def overwritten(self, site: str, rows: int) -> None:
        self.counts[site] = self.counts.get(site, 0) + rows


class Taps(SiteHooks):
    def at(self, rows: ForwardRows) -> None:
        self._rows = LiveRows.of(rows, rows.index, CPU)

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows:
        return self._rows


def six_rows(order: str = "in order") -> ForwardRows:
    """The rows of both samples of the batch, three tokens each."""
    index = np.arange(6) if order == "in order" else np.array([0, 2, 4, 1, 3, 5])
    sample, position = np.repeat([0, 1], 3), np.tile([0, 1, 2], 2)
    return ForwardRows(index, sample, position, np.ones(6, dtype=bool), 6)


def target(features: int) -> torch.Tensor:
    return (100 * torch.arange(6)[:, None] + torch.arange(features)).float()


def overwrite(
    module: nn.Module,
    places: list[Place],
    editor: Any,
    rows: ForwardRows | None = None,
    **options: Any,
) -> tuple[Recorded, Taps]:
    seen = Recorded()
    taps = Taps(module, places, seen, editor, **options)
    taps.at(rows or six_rows())
    return seen, taps


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((6, 4), "in order"),
        ((2, 3, 4), "in order"),
        ((3, 2, 4), "by sequence"),
        ((9, 4), "in order"),
    ],
    ids=["packed", "batch first", "sequence first", "padded"],
)
def test_rows_are_read_and_written_where_they_lie(shape: tuple[int, ...], order: str) -> None:
    live = torch.randn(shape)
    before = live.clone()
    rows = LiveRows.of(six_rows(order), six_rows(order).index, CPU)
    rows.write(live, target(4))
    assert torch.equal(rows.read(live), target(4))
    if order == "by sequence":
        assert torch.equal(live, target(4).reshape(2, 3, 4).transpose(0, 1))
    assert torch.equal(live.reshape(-1, 4)[6:], before.reshape(-1, 4)[6:])


def test_some_of_the_packed_rows_are_read_from_a_tensor_that_has_these_alone() -> None:
    """Of six packed rows, sample 1 is recorded; a kernel then takes the rows 2 to 5."""
    packed = torch.arange(6.0)[:, None]
    six = six_rows()
    others = np.where(six.sample == 1, 1, -1)
    some = ForwardRows(six.index, others, six.position, six.sampled, six.cells)
    for rows in (LiveRows.of(six, six.index, CPU), LiveRows.of(some, six.index, CPU)):
        part = rows.part(slice(2, 5))
        within = [(i, s, p) for i, s, p in zip(six.index, six.sample, six.position, strict=True)]
        recorded = rows.sample
        wanted = [(i, s, p) for i, s, p in within if 2 <= i < 5 and s in recorded]
        assert part.cells == 3
        assert part.read(packed[2:5])[:, 0].tolist() == [i for i, _, _ in wanted]
        assert [*zip(part.sample, part.position, strict=True)] == [(s, p) for _, s, p in wanted]


def test_a_view_of_heads_is_written_through() -> None:
    """Like rotated queries: `[B, heads, S, D]`, viewed as `[B, S, heads, D]`."""
    base = torch.zeros(2, 2, 3, 2)
    rows = LiveRows.of(six_rows(), six_rows().index, CPU)
    rows.write(base.transpose(1, 2), target(4))
    assert torch.equal(base.transpose(1, 2).reshape(6, 4), target(4))


class Layer(nn.Module):
    """Keeps the residual stream in a variable, like decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.Identity(), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = x * 1.0
        return stream + self.mlp(self.norm(stream) * 2.0)


@torch.no_grad()
def test_what_follows_reads_the_new_value_and_the_tap_saw_the_old_one() -> None:
    layer, x = Layer(), torch.randn(6, 4)
    places = [
        Place(sites=("stream",), module="norm", end="input"),
        Place(sites=("out",), module="mlp"),
    ]
    seen, taps = overwrite(layer, places, Fixed())
    with taps:
        result = layer(x)
    assert torch.equal(seen["stream"], x)
    assert torch.equal(seen["out"], layer.mlp(target(4) * 2.0))
    assert torch.equal(result, target(4) + target(4))
    assert seen.counts == {"stream": 6, "out": 6}
    # All hooks are removed again.
    assert torch.equal(layer(x), x + layer.mlp(x * 2.0))


@torch.no_grad()
def test_the_inside_of_a_region_stays_live_until_it_has_been_read() -> None:
    layer, x = Layer(), torch.randn(6, 4)
    places = [
        Place(sites=("stream",), module="norm", end="input"),
        Place(sites=("out",), module="mlp"),
    ]
    seen, taps = overwrite(layer, places, Fixed(late=("stream",)))
    with taps:
        result = layer(x)
    assert torch.equal(seen["out"], layer.mlp(x * 2.0))
    assert torch.equal(result, target(4) + target(4))


@torch.no_grad()
def test_rows_that_are_not_chosen_stay_live() -> None:
    layer, x = Layer(), torch.randn(6, 4)
    seen, taps = overwrite(layer, [Place(sites=("out",), module="mlp")], Fixed(skip=2))
    with taps:
        result = layer(x)
    wanted = x + target(4)
    wanted[2] = x[2] + layer.mlp(x * 2.0)[2]
    assert torch.equal(result, wanted)
    assert seen.counts == {"out": 5}


class Biased(nn.Module):
    """Like megatron-core's linears, leaves the addition of the bias to the next operator."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1.0, torch.full((4,), 7.0)


class Pair(nn.Module):
    """Like vLLM's norm, returns the normed rows and the residual stream."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 0.5, x * 1.0


@torch.no_grad()
def test_a_bias_is_in_what_is_written() -> None:
    x = torch.randn(6, 4)
    model = nn.ModuleDict({"linear": Biased()})
    place = Place(sites=("out",), module="linear", access=WITH_BIAS)
    seen, taps = overwrite(model, [place], Fixed(skip=1))
    with taps:
        out, bias = model["linear"](x)
    assert bias is None
    assert torch.equal(seen["out"], x + 7)
    wanted = target(4)
    wanted[1] = x[1] + 7
    assert torch.equal(out, wanted)


@torch.no_grad()
def test_both_parts_of_a_pair_are_written() -> None:
    model = nn.ModuleDict({"norm": Pair()})
    places = [
        Place(sites=("stream",), module="norm", access=SECOND),
        Place(sites=("normed",), module="norm", access=FIRST),
    ]
    seen, taps = overwrite(model, places, Fixed(late=("stream",)))
    x = torch.randn(6, 4)
    with taps:
        normed, stream = model["norm"](x)
    assert torch.equal(normed, target(4))
    assert torch.equal(stream, target(4))
    assert torch.equal(seen["stream"], x)
    assert torch.equal(seen["normed"], x * 0.5)


def shape(kv_heads: int) -> ModelShape:
    return replace(SHAPE, heads=4, kv_heads=kv_heads, head_dim=2)


QKV = ("q", "k", "v")


def vllm_qkv(model: ModelShape, tp: int) -> Layout:
    q = even("q", model.heads * model.head_dim, tp)
    return fused(q, kv_heads("k", model, tp), kv_heads("v", model, tp))


def megatron_qkv(model: ModelShape, tp: int) -> Layout:
    return grouped_qkv(model, tp, QKV)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("layout_of", [vllm_qkv, megatron_qkv])
@torch.no_grad()
def test_every_rank_writes_its_own_slices(layout_of: Any, heads: int, tp: int) -> None:
    """The ranks' slices form the new value, and each row is counted once over all ranks."""
    model = shape(heads)
    layout = layout_of(model, tp)
    counts: dict[str, int] = {}
    held = []
    for rank in range(tp):
        size = sum(p.size for _, p in layout.local(rank))
        live = torch.randn(6, size)
        place = Place(sites=QKV, module="qkv", layout=layout)
        tap = Recorded()
        qkv, ranks = nn.ModuleDict({"qkv": nn.Identity()}), Ranks(rank, tp, CPU)
        taps = Taps(qkv, [place], tap, Fixed(), ranks=ranks)
        taps.gather = lambda local: [local] * tp  # type: ignore[method-assign]
        taps.at(six_rows())
        taps.visit(place, live)
        held.append(live)
        for site, n in tap.counts.items():
            counts[site] = counts.get(site, 0) + n
    for op, features in (("q", 8), ("k", 2 * heads), ("v", 2 * heads)):
        assert torch.equal(layout.assemble(op, held, 1), target(features))
    assert counts == dict.fromkeys(QKV, 6)


CELLS = (np.array([0, 0, 1]), np.array([0, 2, 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_perturbation_moves_each_element_by_one_ulp(dtype: torch.dtype) -> None:
    live = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    live[0, :4] = torch.tensor([0.0, torch.inf, torch.nan, torch.finfo(dtype).max])
    new, chosen = Editor(Intervention(kind="perturb"), BATCH)("a", live, *CELLS, 0)
    assert chosen.all()
    up = torch.nextafter(live, torch.full_like(live, torch.inf))
    down = torch.nextafter(live, torch.full_like(live, -torch.inf))
    finite = torch.isfinite(live)
    finite[0, 3] = False
    assert ((new == up) | (new == down))[finite].all()
    assert 60 < int((new == up)[finite].sum()) < 130
    assert new[0, 1] == torch.inf
    assert new[0, 2].isnan()
    assert torch.isfinite(new[0, 3])


def test_its_signs_are_those_of_the_cell_and_feature_wherever_they_lie() -> None:
    live = torch.ones(3, 8)
    editor = Editor(Intervention(kind="perturb", seed=5), BATCH)
    whole, _ = editor("a", live, *CELLS, 0)
    part, _ = editor("a", live[1:, 4:], CELLS[0][1:], CELLS[1][1:], 4)
    assert torch.equal(part, whole[1:, 4:])
    others = [
        Editor(Intervention(kind="perturb", seed=6), BATCH)("a", live, *CELLS, 0)[0],
        editor("b", live, *CELLS, 0)[0],
    ]
    assert all(not torch.equal(o, whole) for o in others)
    more, _ = Editor(Intervention(kind="perturb", seed=5, ulps=3), BATCH)("a", live, *CELLS, 0)
    assert ((more > 1) == (whole > 1)).all()
    assert not torch.equal(more, whole)


def test_an_intervention_says_what_it_reads() -> None:
    source = RecordedPass(folder=Path("x"), passname="prefill")
    with pytest.raises(ValueError, match="graft: source or base is missing"):
        Intervention(kind="graft")
    with pytest.raises(ValueError, match="shift"):
        Intervention(kind="shift", source=source)
    with pytest.raises(ValueError, match="perturb"):
        Intervention(kind="perturb", source=source)
