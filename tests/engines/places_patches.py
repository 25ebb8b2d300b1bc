"""Compares an engine's table of places with the operators that the kernels' integration replaces,
in a live model: `patch=places_patches:ENGINE`, which raises an error if the two differ."""

from collections.abc import Iterable
from typing import Any

from rlk_align.data import data_path
from rlk_align.engines.common.kernels import REPLACEABLE
from rlk_align.engines.common.places import Place
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import read_shape

SHAPE = read_shape(data_path("model"))


def hf(model: Any) -> None:
    from rlk_kernels.integrations import hf as kernels

    from rlk_align.engines.hf.places import hf_places

    compare(model, kernels.operators(model), hf_places(model, SHAPE))


def megatron(model: Any) -> None:
    from rlk_kernels.integrations import megatron as kernels

    from rlk_align.engines.megatron.places import megatron_places

    tied = model.share_embeddings_and_output_weights
    compare(model, kernels.operators(model), megatron_places(SHAPE, 1, te=False, tied=tied))


def vllm(model: Any) -> None:
    from rlk_kernels.integrations import vllm as kernels

    from rlk_align.engines.vllm.places import vllm_places

    compare(model, kernels.operators(model), vllm_places(model, SHAPE, 1))


def compare(model: Any, replaced: dict[str, Any], places: Iterable[Place]) -> None:
    table = {site: place for place in places for site in place.sites}
    wanted = {site for site in table if site.rpartition(".")[2] in REPLACEABLE}
    # No module computes log-probs.
    named = replaced.keys() - {"logprob"}
    assert named == wanted, f"one names {sorted(named ^ wanted)[:4]} alone"
    for site in sorted(wanted):
        place, formula = table[site], OPERATORS[site.rpartition(".")[2]].formula
        # The enclosing module computes an operator without a module of its own.
        path = place.module.rpartition(".")[0] if place.end == "input" else place.module
        modules = [model.get_submodule(path)]
        if formula == "embedding":
            modules = [model.get_submodule(place.holder)]
        elif formula in ("attention", "rotary"):
            # A submodule of the attention, or a module that all layers share, may compute these.
            inside = modules[0]
            parts = ("core_attention", "impl", "rotary_emb", "rope")
            modules += [getattr(inside, part) for part in parts if hasattr(inside, part)]
            modules += [
                m for n, m in model.named_modules() if n.endswith(("rotary_emb", "pos_emb"))
            ]
        assert any(replaced[site] is m for m in modules), f"{site} is not {path}"
