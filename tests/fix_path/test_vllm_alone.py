"""The real vLLM by itself: its plugin, its compiler, its overrides, and off means off."""

import math
import struct
import tomllib
from pathlib import Path
from typing import Any

import pytest
from bit_equal import Bits
from family_models import family_model
from rlk_kernels.integrations.vllm import PLUGIN

ROOT = Path(__file__).resolve().parents[2]
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
STRETCHED = {"hf_overrides": {"rope_parameters": ROPE | {"rope_theta": 10000.0}}}


@pytest.fixture(scope="module")
def eager(vllm_bits: Bits) -> dict[str, dict[str, Any]]:
    """Results of eager code with the kernels, with the model's rope and with a stretched rope."""
    cases = {"plain": {}, "stretched": STRETCHED}
    return vllm_bits(
        [{"name": n, "kernels": "registered", "options": options} for n, options in cases.items()],
        step=10,
    )


@pytest.fixture(scope="module")
def cold(vllm_bits: Bits) -> dict[str, dict[str, Any]]:
    """Results of a process that starts as a user's process does, with the kernels: with the model
    in a separate process, as in vLLM by default, and compiled, with a stretched rope."""
    apart = {"name": "apart", "apart": True}
    compiled = {"name": "compiled", "options": STRETCHED | {"enforce_eager": False}}
    cases = [case | {"kernels": "registered"} for case in (apart, compiled)]
    return vllm_bits(cases, step=10, cold=True)


def test_off_is_off(vllm_bits: Bits) -> None:
    """Before the kernels, after them, and with the plugin switched off."""
    hows = {"own": "off", "on": "registered", "taken out": "off", "plugin": "plugin"}
    every = {"all tokens": True, "options": {"max_logprobs": -1}}
    cases = [{"name": n, "kernels": k} | every for n, k in hows.items()]
    found = vllm_bits(cases, step=10)
    for how in ("own", "on"):
        check_all_tokens(found[how])
    assert found["taken out"] == found["own"]
    assert found["own"]["ran"] == []
    assert found["plugin"] == found["on"]
    assert found["on"]["ran"] == [
        *("embedding", "linear", "logp", "paged_attention", "rms_norm", "rope", "swiglu"),
        "write_kv_cache",
    ]
    assert found["on"]["decode"] != found["own"]["decode"]
    assert found["on"]["decode"] == found["on"]["prefill"]
    assert found["on"]["hash"] != found["own"]["hash"], "the compile cache tells them apart"


def test_a_model_in_a_process_of_its_own_has_the_kernels_too(
    eager: dict[str, dict[str, Any]], cold: dict[str, dict[str, Any]]
) -> None:
    """It receives the names that are registered here."""
    for what in ("tokens", "decode", "prefill"):
        assert cold["apart"][what] == eager["plain"][what]


def check_all_tokens(found: dict[str, Any]) -> None:
    """Log-probs of all tokens, of listed tokens and of the largest agree and are sorted, and that
    of the sampled token is the one from decoding."""
    asked = found["all tokens"]
    every = asked["all"]["sampled"]
    assert len(every) == len(asked["all"]["prompt"]) == 1024
    for where in ("sampled", "prompt"):
        values = [value(bits) for bits, _ in asked["all"][where].values()]
        assert abs(sum(map(math.exp, values)) - 1) < 1e-5
        for token, (bits, rank) in asked["three"][where].items():
            assert asked["all"][where][token] == [bits, rank]
    (sampled,) = asked["sampled"]["sampled"]
    assert sampled == str(found["tokens"][1][0])
    assert every[sampled] == [found["decode"][1][:8], 1]
    assert set(asked["listed"]["sampled"]) == {sampled, "11", "7", "500"}
    assert set(asked["fewer listed"]["sampled"]) == {sampled, "7"}
    for name in ("listed", "fewer listed"):
        for token, (bits, _) in asked[name]["sampled"].items():
            assert bits == every[token][0]


def value(bits: str) -> float:
    (number,) = struct.unpack("f", bytes.fromhex(bits))
    return number


def test_the_plugin_is_what_vllm_is_told_of() -> None:
    import importlib

    text = (ROOT / "kernels" / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    ((plugin, target),) = project["entry-points"]["vllm.general_plugins"].items()
    assert plugin == PLUGIN
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.whole_matrix
def test_compiled_code_is_loaded_where_it_belongs(
    tmp_path: Path, vllm_bits: Bits, eager: dict[str, dict[str, Any]]
) -> None:
    """Code with the kernels, without them, and with them again uses one compile cache: each loads
    its own code, and with the kernels the bits are those of eager code."""

    def compiled(kernels: str) -> dict[str, Any]:
        case = {"name": "compiled", "kernels": kernels, "options": {"enforce_eager": False}}
        cache = str(tmp_path / "cache")
        return vllm_bits([case], step=10, cold=True, VLLM_CACHE_ROOT=cache)["compiled"]

    on, off = compiled("registered"), compiled("off")
    for what in ("tokens", "decode", "prefill"):
        assert on[what] == eager["plain"][what]
    # Without taps on the norms of q and k, the norms and the rotation are one operator.
    assert "norm_rope" not in eager["plain"]["ran"]
    assert on["ran"] == sorted([*eager["plain"]["ran"], "norm_rope"])
    assert off["ran"] == []
    assert off["decode"] != on["decode"]
    assert compiled("registered") == on


@pytest.mark.whole_matrix
def test_norms_around_residuals_are_one_operator(tmp_path: Path, vllm_bits: Bits) -> None:
    """In compiled code of Gemma 3, which has a norm before and after each branch."""
    model = family_model(tmp_path, "gemma3_text", max_position_embeddings=1024)
    usual = {"kernels": "registered", "model": str(model)}
    cases = [
        usual | {"name": name, "options": {"enforce_eager": name == "eager"}}
        for name in ("eager", "compiled")
    ]
    found = vllm_bits(cases, step=10, cold=True)
    for what in ("tokens", "decode", "prefill"):
        assert found["compiled"][what] == found["eager"][what]
    fused = set(found["compiled"]["ran"]) - set(found["eager"]["ran"])
    assert fused == {"norm_add_norm", "norm_rope"}


def test_a_rope_that_an_override_stretches(
    eager: dict[str, dict[str, Any]], cold: dict[str, dict[str, Any]]
) -> None:
    """Eager and compiled, where its factor goes through the compiler's graph."""
    assert eager["stretched"]["decode"] != eager["plain"]["decode"]
    assert eager["stretched"]["decode"] == eager["stretched"]["prefill"]
    for what in ("tokens", "decode", "prefill"):
        assert cold["compiled"][what] == eager["stretched"][what]
    assert "norm_rope" in cold["compiled"]["ran"]
