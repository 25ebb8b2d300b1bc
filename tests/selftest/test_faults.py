"""Every fault of the catalogue, planted into a live HF model: first seen where it says, and gone
afterwards. The same on the other engines: `rlk-align selftest`."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlk_align.data import data_path
from rlk_align.engines.base import Sampling
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.patch import patch_of
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.worker import replace_fault
from rlk_align.errors import BadOption
from rlk_align.model.families import FAMILIES
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.selftest.faults.catalogue import FAULTS, choose, faults_of
from rlk_align.selftest.tied_model import tied_model

MODEL = data_path("model")
SHAPE = read_shape(MODEL)
SITES = [s.name for s in model_sites(SHAPE)]
PROMPTS = TokenBatch(
    tuple(
        Sample(f"p{i}", tuple(range(40 + 30 * i, 40 + 30 * i + n))) for i, n in enumerate((9, 20))
    )
)
NEW = 6
HERE = {n: f for n, f in faults_of("hf").items() if not f.needs and not f.sparse}
SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
SPARSE_SITES = {s.name: s for s in model_sites(read_shape(SPARSE))}
SHARED = dataclasses.replace(read_shape(SPARSE), model_type="glm4_moe", shared_intermediate=160)
SHARED_SITES = {s.name: s for s in model_sites(SHARED)}
GATED = dataclasses.replace(SHARED, model_type="qwen2_moe")
SUNK = dataclasses.replace(SHARED, model_type="gpt_oss")
HYBRID = dataclasses.replace(
    SHAPE, model_type="qwen3_5_text", delta_layers=(0, 1, 2), delta_key_heads=2, delta_heads=4
)
STATE_SPACE = dataclasses.replace(HYBRID, model_type="granitemoehybrid", unrotated_layers=(3,))
BESIDE = dataclasses.replace(
    SHARED, model_type="granitemoehybrid", delta_layers=(0, 1), delta_key_heads=2, delta_heads=4
)
VALUES_OF_KEYS: dict[str, Any] = {
    **{"wide_layers": (3,), "wide_head_dim": 64, "wide_kv_heads": 1, "keys_are_values": True},
}
LATENT = dataclasses.replace(SHARED, model_type="deepseek_v3", latent=64, query_latent=48)
OF_SPARSE = {n: f for n, f in FAULTS.items() if f.sparse and f.needs != "variant"}

Rows = dict[tuple[str, int, int], torch.Tensor]
"""(site, sample, position) -> the row."""


class _Tap:
    def __init__(self) -> None:
        self.rows: Rows = {}

    def __call__(
        self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        for row, s, p in zip(rows.clone(), sample.tolist(), position.tolist(), strict=True):
            self.rows[site, s, p] = row


class Watched:
    """An engine with one set of options, and its values without a fault."""

    def __init__(self, options: str, model: Path = MODEL) -> None:
        self.options = options
        self.engine = HFEngine(self._spec(""), model, read_shape(model))
        self.engine.kernels = patch_of(self._spec(""))
        self.engine.open()
        self.planted = ExitStack()
        replace_fault(self.engine, self.planted)
        tap = _Tap()
        sampled = self.engine.sample(PROMPTS, Sampling(NEW, 0), tap, lambda _: None)
        self.batch = PROMPTS.with_responses(sampled.responses)
        self.decode = tap.rows
        self.prefill = self.scored()

    def _spec(self, fault: str) -> EngineSpec:
        options = ",".join(filter(None, [self.options, f"fault={fault}" if fault else ""]))
        return EngineSpec.parse(f"hf:{options}" if options else "hf")

    def plant(self, fault: str) -> None:
        self.engine.spec = self._spec(fault)
        replace_fault(self.engine, self.planted)

    def scored(self) -> Rows:
        tap = _Tap()
        logprobs = self.engine.score(self.batch, tap, lambda _: None)
        for i, sample in enumerate(self.batch.samples):
            for p, value in zip(sample.sampled_positions, logprobs[i], strict=True):
                tap.rows["logprob", i, p] = torch.tensor([value])
        return tap.rows

    def decoded(self) -> tuple[list[list[int]], Rows]:
        tap = _Tap()
        sampled = self.engine.sample(PROMPTS, Sampling(NEW, 0), tap, lambda _: None)
        return sampled.responses, tap.rows


def options_of(name: str) -> str:
    """The options that the fault needs in an HF engine."""
    return ",".join(f"{k}={v}" for k, v in choose("hf", name).needs("hf").items())


@pytest.fixture(scope="module")
def watched() -> Iterator[Callable[[str], Watched]]:
    made: dict[str, Watched] = {}

    def engine(options: str) -> Watched:
        if options not in made:
            made[options] = Watched(options)
        return made[options]

    yield engine
    made.clear()


def differing(a: Rows, b: Rows) -> dict[str, int]:
    """Returns the common rows of each site whose bits differ, in execution order."""
    found = dict.fromkeys(SPARSE_SITES if "layers.2.experts" in {k[0] for k in a} else SITES, 0)
    for key in a.keys() & b.keys():
        found[key[0]] += not torch.equal(a[key], b[key])
    return {site: n for site, n in found.items() if n}


@pytest.mark.parametrize("name", [n for n, f in HERE.items() if not f.decode])
def test_a_fault_is_where_it_says(watched: Callable[[str], Watched], name: str) -> None:
    fault = HERE[name]
    here = watched(options_of(name))
    here.plant(name)
    found = differing(here.prefill, here.scored())
    here.plant("")
    assert next(iter(found), None) == fault.site
    assert differing(here.prefill, here.scored()) == {}, "something is left of it"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Watched]]:
    """The embedded sparse model, or a variant with ties between experts if the fault needs them."""
    made: dict[tuple[str, str], Watched] = {}

    def engine(name: str, options: str = "") -> Watched:
        key = ",".join(filter(None, (options_of(name), options))), FAULTS[name].needs
        if key not in made:
            tied = tmp_path_factory.mktemp("tied") / "model"
            made[key] = Watched(key[0], tied_model(SPARSE, tied) if key[1] == "ties" else SPARSE)
        return made[key]

    yield engine
    made.clear()


EARLY = "expert-weight-early"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "") for name in OF_SPARSE),
        *((name, "kernels=rlk") for name in OF_SPARSE if name != EARLY),
    ],
)
def test_a_fault_of_a_sparse_layer_is_where_it_says(
    sparse: Callable[..., Watched], name: str, options: str
) -> None:
    here = sparse(name, options)
    here.plant(name)
    found = differing(here.prefill, here.scored())
    here.plant("")
    assert next(iter(found), None) == FAULTS[name].site
    assert differing(here.prefill, here.scored()) == {}, "something is left of it"


def test_a_fault_of_a_product_that_the_kernels_replace_is_refused() -> None:
    with pytest.raises(BadOption, match="the kernels compute the experts") as error:
        EngineSpec.parse(f"hf:kernels=rlk,fault={EARLY}")
    assert error.value.fix == "leave kernels=rlk out"


def test_a_fault_of_the_other_kind_of_layer_is_refused(sparse: Callable[..., Watched]) -> None:
    here = sparse("expert-flipped")
    assert not FAULTS["proj-channel-shift"].fits(SPARSE_SITES)
    with pytest.raises(BadOption, match=r"layers\.2\.up_proj is of a sparse layer"):
        here.plant("proj-channel-shift")
    here.plant("")
    with pytest.raises(BadOption, match=r"has no layers\.2\.experts"):
        Watched("fault=expert-flipped")


ROWS = {
    "proj-one-position": lambda id, position: position == 7,
    "embed-one-token": lambda id, position: id == 40,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_fault_of_some_rows_is_in_those_alone(
    watched: Callable[[str], Watched], name: str
) -> None:
    here, site = watched(""), FAULTS[name].site
    here.plant(name)
    rows = here.scored()
    here.plant("")
    wrong = {k[1:] for k in rows if k[0] == site and not torch.equal(rows[k], here.prefill[k])}
    ids = {
        (i, p): id for i, sample in enumerate(here.batch.samples) for p, id in enumerate(sample.ids)
    }
    assert wrong == {cell for cell, id in ids.items() if ROWS[name](id, cell[1])}


FEATURES = {
    "norm-channel": lambda f: f % 32 == 11,
    "attn-one-head": lambda f: f // 32 == 1,
    "proj-channel-shift": lambda f: f == 11,
    "proj-weight-element": lambda f: f == 5,
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_fault_of_some_features_is_in_those_alone(
    watched: Callable[[str], Watched], name: str
) -> None:
    """The values are equal except for the rounding of a recomputed product."""
    here, site = watched(""), FAULTS[name].site
    here.plant(name)
    rows = here.scored()
    here.plant("")
    keys = [k for k in rows if k[0] == site]
    a, b = (torch.stack([r[k].float() for k in keys]) for r in (here.prefill, rows))
    off = ((a - b).abs() > 0.01 * a.abs()).any(0)
    assert {f for f, wrong in enumerate(off.tolist()) if wrong} == {
        f for f in range(len(off)) if FEATURES[name](f)
    }


@pytest.mark.parametrize("name", [n for n, f in HERE.items() if f.decode])
def test_a_fault_of_decode_is_in_decode_alone(watched: Callable[[str], Watched], name: str) -> None:
    here = watched("")
    here.plant(name)
    prefill, (responses, rows) = here.scored(), here.decoded()
    here.plant("")
    assert differing(here.prefill, prefill) == {}
    # Rows count up to the first other sampled token, which the engine then reads.
    same = {}
    for key, row in rows.items():
        given = key[2] - len(PROMPTS.samples[key[1]].prompt_ids) + 1
        theirs = responses[key[1]][: max(0, given)]
        if list(here.batch.samples[key[1]].response_ids[: max(0, given)]) == theirs:
            same[key] = row
    found = differing(here.decode, same)
    assert next(iter(found)) == FAULTS[name].site
    prompts = {k: r for k, r in same.items() if k[2] < len(PROMPTS.samples[k[1]].prompt_ids)}
    assert differing(here.decode, prompts) == {}


@pytest.mark.parametrize("name", [n for n, f in HERE.items() if f.strength and not f.decode])
def test_a_stronger_fault_is_further_off(watched: Callable[[str], Watched], name: str) -> None:
    fault = HERE[name]
    here = watched(options_of(name))
    keys = [k for k in here.prefill if k[0] == fault.site]
    clean = torch.stack([here.prefill[k].double() for k in keys])
    assert fault.strength is not None
    off = []
    for strength in (fault.strength.curve[0], fault.strength.curve[-1]):
        here.plant(f"{name}@{strength:g}")
        rows = here.scored()
        off.append(float((torch.stack([rows[k].double() for k in keys]) - clean).norm()))
    here.plant("")
    if len(fault.strength.curve) > 1:
        assert off[1] > 1.5 * off[0]


def test_a_dropped_bias_wants_one(model_copy: Callable[..., Path]) -> None:
    def add_biases(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in [n for n in tensors if n.endswith("_proj.weight") and "self_attn" in n]:
            bias = 0.1 * torch.randn(len(tensors[name]), generator=generator)
            tensors[name.replace(".weight", ".bias")] = bias.to(tensors[name].dtype)

    here = Watched("", model_copy(config={"attention_bias": True}, weights=add_biases))
    here.plant("proj-bias-dropped")
    found = differing(here.prefill, here.scored())
    assert next(iter(found)) == "layers.1.k_proj"
    with pytest.raises(BadOption, match=r"layers\.1\.k_proj has no bias"):
        Watched("fault=proj-bias-dropped")


def test_a_model_without_the_place_is_refused(model_copy: Callable[..., Path]) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".layers.2." in n or ".layers.3." in n]:
            del tensors[name]

    config = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    small = model_copy(config=config, weights=drop)
    with pytest.raises(BadOption, match=r"model of 2 layers has no layers\."):
        Watched("fault=attn-window", small)


def test_the_catalogue_is_whole() -> None:
    classes = {
        "norm": "reduction",
        "rope": "elementwise",
        "attention": "attention",
        "cache": "attention",
        "projection": "matmul",
        "activation": "elementwise",
        "residual": "elementwise",
        "embedding": "elementwise",
        "logits": "matmul",
        "logprob": "logprob",
    }
    mixed = ("weights", "input", "routing", "recurrence", "state space", "latent attention")
    dense = {s.name: s for s in model_sites(SHAPE)}
    assert len(FAULTS) >= 40
    kinds = [name for name, family in FAMILIES.items() if not family.experts]
    shapes = [dataclasses.replace(SHAPE, model_type=kind) for kind in kinds]
    shapes.append(dataclasses.replace(SHAPE, model_type="smollm3", unrotated_layers=(3,)))
    shapes.append(dataclasses.replace(shapes[kinds.index("gemma4_text")], **VALUES_OF_KEYS))
    shapes += [GATED, SUNK, HYBRID, STATE_SPACE, LATENT, BESIDE]
    variants = [{s.name: s for s in model_sites(shape)} for shape in shapes]
    for name, fault in FAULTS.items():
        sites = SPARSE_SITES if fault.sparse else dense
        sites = SHARED_SITES if fault.needs == "shared" else sites
        sites = next(filter(fault.fits, variants)) if fault.needs == "variant" else sites
        assert fault.needs != "variant" or not fault.fits(dense)
        of, order = {n: s.op_class for n, s in sites.items()}, list(sites)
        assert fault.fits(sites), name
        assert list(fault.sites) == sorted(fault.sites, key=order.index), name
        if fault.op_class in classes:
            assert {of[s] for s in fault.sites} == {classes[fault.op_class]}, name
        assert (fault.expected == "precheck") == bool(fault.mismatch), name
        if fault.strength is not None:
            assert list(fault.strength.curve) == sorted(fault.strength.curve), name
    assert {f.op_class for f in FAULTS.values()} == {*classes, *mixed}
    for engine in ("hf", "vllm", "megatron"):
        assert len(faults_of(engine)) >= 40
