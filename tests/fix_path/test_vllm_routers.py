"""GLM-4.5 and GPT-OSS in a vLLM whose routers are torch's linears, and its own plain ones, as in
0.26: the kernels replace them, with the same bits as in vLLM 0.32."""

from pathlib import Path
from typing import Any

import pytest
from bit_equal import Bits
from family_models import family_model
from pair_models import CORRECTED
from random_model import write_random_model

pytestmark = pytest.mark.whole_matrix  # the pairs have the routers of vLLM 0.32
GLM: dict[str, Any] = CORRECTED | {
    "model_type": "glm4_moe", "dtype": "bfloat16", "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_random_model(tmp_path_factory.mktemp("glm") / "model", **GLM))


@pytest.fixture(scope="module")
def said(vllm_bits: Bits, model: str) -> dict[str, Any]:
    """Results of vLLM 0.32, with its own routers and with those of 0.26."""
    common = {"model": model, "kernels": "registered", "check": True}
    plain = common | {"plain routers": True}
    return vllm_bits(
        [
            common | {"name": "own form"},
            plain | {"name": "plain"},
            plain | {"name": "without kernels", "kernels": "off", "check": False},
            plain | {"name": "not replaced", "stock model": True},
        ],
        step=10,
    )


def test_plain_routers_are_replaced(said: dict[str, Any]) -> None:
    for name in ("own form", "plain"):
        assert said[name]["refusal"] == "", name
        assert said[name]["decode"] == said[name]["prefill"], name
    assert len(said["plain"]["decode"]) > 5
    assert said["plain"] == said["own form"]


def test_the_plain_routers_of_gpt_oss_are_replaced(vllm_bits: Bits, tmp_path: Path) -> None:
    model = family_model(tmp_path, "gpt_oss", max_position_embeddings=1024)
    common = {"model": str(model), "kernels": "registered", "check": True}
    plain = common | {"name": "plain", "plain routers": True}
    answers = vllm_bits([common | {"name": "own form"}, plain], step=10)
    assert [answers[name]["refusal"] for name in ("own form", "plain")] == ["", ""]
    assert len(answers["plain"]["decode"]) > 5
    assert answers["plain"] == answers["own form"]


def test_without_the_kernels_the_routers_are_vllms_own(said: dict[str, Any]) -> None:
    """The control, in the process that has run the model class with the kernels."""
    stock = said["without kernels"]
    assert stock["ran"] == []
    assert stock["decode"] != said["plain"]["decode"]


def test_a_router_that_is_not_replaced_is_named(said: dict[str, Any]) -> None:
    """A planted fault: the model class remains that of vLLM, and so do the routers."""
    assert said["not replaced"]["refusal"] == (
        "the engine still computes layers.1.router, layers.2.router"
    )


def test_compiled_and_with_new_weights(
    vllm_bits: Bits, model: str, said: dict[str, Any], tmp_path: Path
) -> None:
    other = str(write_random_model(tmp_path / "other", **GLM | {"initializer_range": 0.06}))
    common = {"model": model, "kernels": "registered"}
    plain = common | {"plain routers": True}
    answers = vllm_bits(
        [
            plain | {"name": "compiled", "options": {"enforce_eager": False}},
            common | {"name": "own form, reloaded", "reload": other},
            plain | {"name": "plain, reloaded", "reload": other},
        ],
        step=10,
        cold=True,
    )
    for what in ("tokens", "decode", "prefill"):
        assert answers["compiled"][what] == said["plain"][what]
        assert answers["plain, reloaded"][what] == answers["own form, reloaded"][what]
    # Random models may choose the same tokens.
    for what in ("decode", "prefill"):
        assert answers["plain, reloaded"][what] != said["plain"][what]
