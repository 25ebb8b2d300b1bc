"""On a GPU, the real vLLM with the kernels: what it says of a sequence does not depend on who else
asks, nor on whether it decodes or scores, nor on whether it is compiled or replays CUDA graphs.

The models: the folder that RLK_TEST_MODEL names, else the embedded one; and GLM-4.5's shape.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from models import write_model
from modes import MODES, ask_all, runs

pytestmark = pytest.mark.skipif(not runs(), reason="needs vLLM and an NVIDIA GPU")


def _dense() -> str:
    from rlk_align.data import data_path

    return os.environ.get("RLK_TEST_MODEL") or str(data_path("model"))


@pytest.fixture(scope="module", params=["dense", "glm"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "dense":
        return _dense()
    return write_model(tmp_path_factory.mktemp("glm") / "model", "glm4_moe")


@pytest.fixture(scope="module")
def said(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each mode said, and vLLM's own kernels."""
    return ask_all(tmp_path_factory.mktemp("said"), model)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_depends_neither_on_its_company_nor_on_how_it_is_computed(
    said: Any, mode: str
) -> None:
    answers = said[mode]
    alone, *in_batches = answers["needle"]
    assert len(in_batches) == 4
    assert all(answer == alone for answer in in_batches)
    assert len(answers["together"]) == len(answers["decode"]) == 40
    assert answers["alone"] == answers["together"]
    assert answers["decode"] == answers["prefill"] == answers["scored alone"]
    assert answers["top"] == answers["together"], "log-probs of more tokens"


def test_modes_agree(said: Any) -> None:
    first = {k: v for k, v in said["eager"].items() if k != "replaced"}
    for mode in MODES:
        assert {k: said[mode][k] for k in first} == first, mode


def test_every_operator_is_replaced(said: Any, model: str) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    layers = config["num_hidden_layers"]
    dense = config.get("first_k_dense_replace", layers)
    assert said["eager"]["replaced"] == 4 + 15 * dense + 23 * (layers - dense)


def test_without_the_kernels_bits_move(said: Any) -> None:
    """The control: these questions tell."""
    stock = said["own kernels"]
    assert stock["decode"] != stock["prefill"]
